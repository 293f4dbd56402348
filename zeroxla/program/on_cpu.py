"""`on_cpu`: where small programs run that prove something about a larger one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Return a context in which programs run on a CPU of this process, if JAX has one."""
    try:
        (device, *_) = jax.local_devices(backend="cpu")
    except RuntimeError:
        yield
        return
    with jax.default_device(device):
        yield
