"""Processes, compiler options and the host's part of a program, as the supported versions of JAX
have them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed, xla_bridge
from jax.experimental import compute_on

JAX_VERSION: tuple[int, ...] = jax.__version_info__[:3]

COMPUTE_ON = "compute_on"
"""The primitive that a function from `compute_on_host` becomes in a trace."""


def backends_started() -> bool:
    """Return whether JAX has made its devices. Their number cannot change afterwards."""
    return xla_bridge.backends_are_initialized()


def coordination_client() -> Any | None:
    """Return the client of `jax.distributed`'s key-value store; None if it was not initialized."""
    return distributed.global_state.client


def compiler_options(platform: str, *, prefetch: bool) -> dict[str, Any]:
    """Return the compiler options of a step on one platform. Other platforms reject them.

    They concern GPUs with gathers that run ahead. The first option gathers in each turn of a loop
    what the next turn needs. The second one is about copies: a loop copies what it keeps of each
    turn into a stack, beside the compute. XLA's scheduler takes such a copy to last 5 ms. To hide
    it, the scheduler leaves no matmuls for the gathers, unless this option sets copies apart.

    Args:
      platform: "cpu", "gpu" or "tpu".
      prefetch: whether gathers run ahead.
    """
    if platform != "gpu" or not prefetch:
        return {}
    if JAX_VERSION < (0, 11, 1):
        return {"xla_gpu_enable_pipelined_all_gather": True}
    return {
        "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
        "xla_gpu_experimental_enable_selective_memcpy_overlap": True,
    }


def compute_on_host(fun: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
    """Return a function that the host computes. Its arguments and results are in host memory.

    Up to JAX 0.11.0 `compute_on` is a context that does not say where results are; `compute_on2` is
    the decorator.
    """
    decorate: Any = getattr(compute_on, "compute_on2", None) or compute_on.compute_on
    return decorate(fun, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)


def before_threads_end(function: Callable[[], None]) -> None:
    """Call a function at the interpreter's end, while executors still take work.

    Handlers of `atexit` come too late for that: from Python 3.9 on the executors of
    `concurrent.futures` have ended by then. They end in a handler of `threading`, which is called
    after those that are registered later. A Python without such handlers calls nothing.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(function)
