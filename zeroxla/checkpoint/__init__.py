"""Checkpoints that open on any mesh, and weights in and out of Hugging Face's format."""
