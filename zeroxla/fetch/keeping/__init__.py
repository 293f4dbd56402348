"""Which activations forward keeps for backward, which it sends to the host's memory, and which
backward computes again, so that a step fits a budget of bytes."""
