"""State on disk: one preallocated file a process, read and written beside the update."""
