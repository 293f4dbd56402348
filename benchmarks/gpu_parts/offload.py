"""State in pinned host memory: the same losses to the bit, time of a step, memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
from common import alternately
from offload import held

import zeroxla
from gpu_parts.findings import Finding, NotHereError, Program, bounded, megabytes, ratio
from gpu_parts.gpts import OPTIMIZER, SMALL, Run, Size, median_ratio
from gpu_parts.place import Place
from zeroxla import Offload, ZeroConfig
from zeroxla.inspect import memory

LARGE = Size(layers=8, width=1024, heads=16, vocab=8192, length=512, rows=4)
TURNS, SMALL_TURNS = 7, 3
BASE = "on the device"
PLACES = {
    BASE: Offload(),
    "optimizer in host memory": Offload(optimizer="host"),
    "optimizer and parameters in host memory": Offload(optimizer="host", params="host"),
}


def make(place: Place, offload: Offload) -> tuple[zeroxla.Step, Any]:
    """Return (a step with its state in some place, a batch)."""
    size = SMALL if place.small else LARGE
    config = ZeroConfig(compute_dtype="bfloat16", offload=offload)
    step = zeroxla.make_step(size.model(), place.mesh(), OPTIMIZER, config=config)
    return step, size.tokens(place.num_devices)


def measure(place: Place, places: dict[str, Offload] | None = None) -> Iterator[Finding]:
    """Train with each place of the state, in turns, from the same start."""
    runs = {name: Run(*make(place, offload)) for name, offload in (places or PLACES).items()}
    times = alternately(dict(runs), SMALL_TURNS if place.small else TURNS)
    for name, run in runs.items():
        if name != BASE:
            different = sum(a != b for a, b in zip(run.losses, runs[BASE].losses, strict=True))
            label = f"{name}: of {len(run.losses)} losses, those with other bits"
            yield bounded(label, different, 0)
    for name in runs:
        if name != BASE:
            label = f"{name}: time of a step over that with the state on the device"
            yield ratio(label, median_ratio(times, name, BASE))
    for name, run in runs.items():
        for where in ("device", "host"):
            label = f"{name}: state of one device that is in {where} memory"
            yield megabytes(label, held(run.state, where))
        program = run.step.lower(run.state, run.batch).compile()
        label = f"{name}: temporaries of a step, says the compiler"
        yield megabytes(label, memory(program).temp_bytes)
    if any(math.isnan(loss) for run in runs.values() for loss in run.losses):
        yield Finding(name="losses", text="a loss is NaN", failed=True)


def programs(place: Place) -> Iterator[Program]:
    """Yield the step for each place of the state."""

    def lower(offload: Offload) -> jax.stages.Lowered:
        if place.kind == "target" and offload != Offload():
            raise NotHereError("JAX gives a GPU that is not there no host memory to compile for")
        step, batch = make(place, offload)
        with place.lowering():
            return step.lower(step.abstract_state(batch), batch)

    for name, offload in PLACES.items():
        yield Program(name=f"state {name}", lower=functools.partial(lower, offload))
