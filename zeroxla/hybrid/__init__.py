"""Generate from the training state, in a tensor-parallel layout. See `engine`."""
