"""The update of offloaded state, one sub-group after another."""
