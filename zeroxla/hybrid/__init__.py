"""Generation from the training state, in a tensor-parallel layout. Begin with `engine`."""
