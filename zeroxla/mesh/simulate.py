"""`simulate`: shows this process's CPU as several devices."""

from __future__ import annotations

import os

import jax

from zeroxla.mesh.pool import pool_threads
from zeroxla.program.compat import backends_started


def simulate(
    num_devices: int, *, threads: int | None = None, keep_accelerators: bool = False
) -> None:
    """Show this process's CPU as `num_devices` devices. Call it before JAX is used.

    A collective blocks one thread for each simulated device, and JAX sizes its thread pool by the
    number of cores. With few cores the pool starves and the run dies in a rendezvous. The variable
    `NPROC` enlarges the pool, so this sets it.

    Args:
      num_devices: how many devices, 1 or more.
      threads: of the pool, `num_devices` or more. None means 8 a device or one a core, whichever is
        more, and no fewer than `NPROC` says. XLA splits every product of matrices among all of
        them, so one a device is faster where devices outnumber cores.
      keep_accelerators: leave GPUs visible. JAX then prefers them, and the simulated devices serve
        machines without GPUs.

    Raises:
      ValueError: `num_devices` is below 1, or `threads` below `num_devices`.
      RuntimeError: JAX has already started, with other devices or another pool.
    """
    if num_devices < 1:
        raise ValueError(f"cannot simulate {num_devices} devices; give 1 or more")
    if threads is not None and threads < num_devices:
        raise ValueError(
            f"{threads} threads are too few for {num_devices} devices: each device keeps one while "
            f"it waits in a collective; give {num_devices} or more, or leave threads out"
        )
    at_least = int(os.environ.get("NPROC", "0"))
    pool = max(pool_threads(num_devices), at_least) if threads is None else threads
    if backends_started():
        right_pool = at_least >= min(pool, 64) if threads is None else at_least == threads
        if jax.default_backend() == "cpu" and len(jax.devices()) == num_devices and right_pool:
            return
        wanted = "" if threads is None else f", threads={threads}"
        raise RuntimeError(
            f"simulate({num_devices}{wanted}) came after JAX had started with {len(jax.devices())} "
            f"{jax.default_backend()} device(s) and NPROC={at_least or 'not set'}; call it first "
            f"thing in the program (in a notebook: restart the kernel and run it in the first cell)"
        )
    os.environ["NPROC"] = str(pool)
    if not keep_accelerators:
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
