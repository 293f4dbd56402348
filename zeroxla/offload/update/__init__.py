"""The update of offloaded state, one sub-group after another, on the device or on the host."""
