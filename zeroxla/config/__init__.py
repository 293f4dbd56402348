"""The options of a training setup, and a reader of DeepSpeed's files. Nothing here holds arrays."""
