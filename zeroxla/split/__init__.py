"""Which dim of which array a mesh axis splits, read from the trace and proved."""
