"""State on disk: each process has one preallocated file, read and written beside the update."""
