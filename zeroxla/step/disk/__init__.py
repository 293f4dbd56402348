"""The training step of a state that is on disk."""
