"""A device with round figures, for tests that count the seconds of simulated steps."""

from __future__ import annotations

from zeroxla.mesh.machines import Device


def made_device(
    flops_per_s: float,
    *,
    memory_bytes: float = 1e12,
    bytes_per_s: float = 1e30,
    platform: str = "gpu",
    efficiency: float = 1.0,
) -> Device:
    """Return a device whose float32 products and memory are as fast as is said."""
    return Device(
        name="test",
        label="Test",
        flops_per_s={"float32": flops_per_s},
        memory_bytes=memory_bytes,
        bytes_per_s=bytes_per_s,
        link="nvlink4",
        platform=platform,
        efficiency=efficiency,
        source="a test",
    )
