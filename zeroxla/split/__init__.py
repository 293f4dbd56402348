"""Chooses which dims of which arrays a mesh axis splits: read from the trace, and proved."""
