"""What devices could do at most, and what they have held."""

from __future__ import annotations

import jax

from zeroxla.mesh.machines import Machines


def peak_flops_per_s(kind: str, count: int) -> float | None:
    """Return the peak of `count` devices in products of their fastest dtype.

    Args:
      kind: JAX's name for the device, `device.device_kind`.
      count: the number of devices.

    Returns:
      FLOP/s; None if the table of devices (mesh/machines.toml) has no such GPU or TPU.
    """
    device = Machines.load().of_kind(kind)
    if device is None or device.platform == "cpu":
        return None
    return count * max(device.flops_per_s.values())


def peak_bytes() -> dict[str, float]:
    """Return "peak_memory_bytes", the most that a device of this process has held so far; nothing
    where devices do not count it, as CPUs do not."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found]
    return {"peak_memory_bytes": max(peaks)} if peaks else {}
