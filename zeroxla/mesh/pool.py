"""`pool_threads`: the size of JAX's pool of threads on CPUs. This file does not import JAX."""

from __future__ import annotations

import os


def pool_threads(num_devices: int) -> int:
    """Return how many threads JAX's pool gets for simulated devices: 8 a device, or one a core.

    A device blocks a thread for each collective that it has in flight.
    """
    return max(8 * num_devices, os.cpu_count() or 1)
