"""The options of a training setup, and their reader for DeepSpeed files. No arrays."""
