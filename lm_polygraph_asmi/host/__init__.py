"""Adapters to LM-Polygraph, its models and its side models. No score is computed here."""
