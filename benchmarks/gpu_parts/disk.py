"""State on disk: the same losses to the bit, and the rate against a plain copy on that disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from offload_disk import plain_copy, rate_of

import zeroxla
from gpu_parts.findings import Finding, Program, bounded, ratio
from gpu_parts.gpts import OPTIMIZER, SMALL, Run, Size
from gpu_parts.place import Place
from zeroxla import Offload, ZeroConfig
from zeroxla.offload.disk.disk_array import DiskArray

LARGE = Size(layers=8, width=1024, heads=16, vocab=8192, length=512, rows=4)
STEPS = 5
SUB_GROUP, SMALL_SUB_GROUP = 8_000_000, 20_000
LEAST_COPY = 1 << 26
"""The fewest bytes of the plain copy."""


def make(place: Place, folder: Path | None, **options: Any) -> tuple[zeroxla.Step, Any]:
    """Return (a step, a batch), with the state on disk in a folder or, without one, on the
    device."""
    size = SMALL if place.small else LARGE
    offload = Offload()
    if folder is not None:
        sub_group = SMALL_SUB_GROUP if place.small else SUB_GROUP
        offload = Offload(optimizer="disk", path=str(folder), sub_group=sub_group, **options)
    config = ZeroConfig(compute_dtype="bfloat16", offload=offload)
    step = zeroxla.make_step(size.model(), place.mesh(present=True), OPTIMIZER, config=config)
    return step, size.tokens(place.num_devices)


def measure(place: Place) -> Iterator[Finding]:
    """Train with the optimizer's state on the device and on the disk of TMPDIR."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {
            "device": Run(*make(place, None)),
            "disk": Run(*make(place, folder / "state", buffers=4)),
        }
        for _ in range(STEPS):
            for run in runs.values():
                run()
        on_disk = runs["disk"].state.opt_state
        arrays = [x for x in jax.tree.leaves(on_disk) if isinstance(x, DiskArray)]
        different = sum(a != b for a, b in zip(runs["device"].losses, runs["disk"].losses))
        yield bounded(f"of {STEPS} losses, those with other bits", different, 0)
        num_bytes = sum(x.nbytes for x in arrays)
        accesses = list(arrays[0].file.blocks.accesses)
        for kind in ("read", "write"):
            moved = sum(x.nbytes for x in accesses if x.kind == kind)
            name = f"bytes of a step, {kind}, over the {num_bytes / 1e6:,.0f} MB of the state"
            yield ratio(name, moved / num_bytes)
        rate = rate_of(accesses)
        text = f"{rate / 1e6:,.0f} MB/s"
        yield Finding(name="rate of a step, in and out", text=text, value=rate)
        name = "the same over a plain copy's on this disk"
        try:
            yield ratio(name, rate / plain_copy(folder, max(num_bytes, LEAST_COPY)))
        except OSError as error:  # a folder in memory, say, has no direct access
            yield Finding(name=name, text=f"no plain copy past the page cache: {error}")


def programs(place: Place) -> Iterator[Program]:
    """Yield the part of the step that computes the gradients. The updates are lowered when they
    first run, as their sizes depend on the file."""

    def lower() -> jax.stages.Lowered:
        with tempfile.TemporaryDirectory() as folder, place.lowering():
            step, batch = make(place, Path(folder) / "state")
            return step.lower(step.abstract_state(batch), batch)

    yield Program(name="gradients of a state on disk", lower=lower)
