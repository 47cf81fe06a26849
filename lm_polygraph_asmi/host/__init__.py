"""Adapters for LM-Polygraph, its models and its side models; no score is computed here."""
