"""Weights to and from other programs: safetensors files, with Hugging Face's names or flat ones."""
