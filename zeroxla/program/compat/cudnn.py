"""cuDNN's attention, traced for GPUs that may be absent."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn

CUDNN_VERSION = 91000
"""Programs for absent GPUs are traced for cuDNN 9.10, as the descriptions in `mesh/targets/`."""

_absent: contextvars.ContextVar[Any] = contextvars.ContextVar("absent_device", default=None)
"""The device for which JAX's checks of cuDNN are answered; None lets JAX look at its own."""


@contextlib.contextmanager
def for_devices_of(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Return a context in which JAX's checks of cuDNN are answered for a mesh's devices.

    A model that calls `jax.nn.dot_product_attention(implementation="cudnn")` is traced there for
    the mesh's GPUs, although they may be absent: while it traces, JAX asks this process for cuDNN
    and a GPU.
    """
    token = _absent.set(_absent_device(mesh))
    try:
        yield
    finally:
        _absent.reset(token)


def _absent_device(mesh: jax.sharding.Mesh) -> Any | None:
    """Return a device of the mesh, or the kind that an abstract mesh names; None if it is a GPU of
    this process, for which JAX's own checks hold."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        device = mesh.abstract_device or jax.devices()[0]
    else:
        device = mesh.devices.flat[0]
    if device.platform == "gpu" and jax.default_backend() == "gpu" and device in jax.devices():
        return None
    _answer_cudnn_checks()
    return device


@functools.cache
def _answer_cudnn_checks() -> None:
    """Let JAX's checks of cuDNN be answered for the device of `for_devices_of`; elsewhere JAX's own
    functions run."""

    def answered(own: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
        def check(*args: Any) -> Any:
            device = _absent.get()
            return own(*args) if device is None else answer(_capability(device), *args)

        return check

    answers = {
        "check_cudnn_version": lambda mine: CUDNN_VERSION,
        "check_compute_capability": lambda mine, least: mine >= _numbers(least),
        "is_cuda_compute_capability_equal": lambda mine, wanted: mine == _numbers(wanted),
    }
    for name, answer in answers.items():
        setattr(cudnn, name, answered(getattr(cudnn, name), answer))


def _capability(device: Any) -> tuple[int, ...]:
    """Return the compute capability of a GPU, such as (9, 0).

    Raises:
      ValueError: the device has none from which cuDNN has attention, 8.0.
    """
    found = getattr(device, "compute_capability", None) if device.platform == "gpu" else None
    if not found or _numbers(found) < (8, 0):
        what = f"{device.device_kind}, {f'compute capability {found}' if found else 'no GPU'}"
        raise ValueError(
            'the model calls jax.nn.dot_product_attention(implementation="cudnn"), a kernel of '
            f"NVIDIA GPUs from compute capability 8.0 on, and the mesh has {what}; plan it or "
            'compile it for such a GPU, or run it with implementation="xla"'
        )
    return _numbers(found)


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in str(capability).split("."))
