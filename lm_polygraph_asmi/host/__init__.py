"""What LM-Polygraph and its side models need; nothing of how a score is computed."""
