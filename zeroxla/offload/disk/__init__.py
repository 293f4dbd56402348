"""State on disk: a preallocated file for each step, read and written beside the update."""
