"""`simulate`: shows this process's CPU as several devices."""

from __future__ import annotations

import os

import jax

from zeroxla.program.compat import backends_started


def simulate(num_devices: int, *, keep_accelerators: bool = False) -> None:
    """Show this process's CPU as `num_devices` devices. Call it before JAX is used.

    A collective blocks one thread for each simulated device, and JAX sizes its thread pool by the
    number of cores. With few cores the pool starves and the run dies in a rendezvous. The variable
    `NPROC` enlarges the pool, so this sets it, to 64 or more.

    Args:
      num_devices: how many devices, 1 or more.
      keep_accelerators: leave GPUs visible. JAX then prefers them, and the simulated devices serve
        machines without GPUs.

    Raises:
      ValueError: `num_devices` is below 1.
      RuntimeError: JAX has already started, with other devices or without the larger pool.
    """
    if num_devices < 1:
        raise ValueError(f"cannot simulate {num_devices} devices; give 1 or more")
    pool = max(64, 8 * num_devices)
    if backends_started():
        enough_threads = int(os.environ.get("NPROC", "0")) >= min(pool, 64)
        if jax.default_backend() == "cpu" and len(jax.devices()) == num_devices and enough_threads:
            return
        raise RuntimeError(
            f"simulate({num_devices}) came after JAX had started with {len(jax.devices())} "
            f"{jax.default_backend()} device(s); call it first thing in the program (in a "
            f"notebook: restart the kernel and run it in the first cell)"
        )
    os.environ["NPROC"] = str(max(pool, int(os.environ.get("NPROC", "0"))))
    if not keep_accelerators:
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
