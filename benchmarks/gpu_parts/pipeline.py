"""A pipelined step in two stages (1F1B): loss and gradients against the unsharded model, time."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
from common import alternately

import zeroxla
from gpu_parts.findings import Finding, Program, bounded, largest_error, ratio
from gpu_parts.gpts import OPTIMIZER, SMALL, Run, Size, median_ratio, plain_gradients
from gpu_parts.place import Place
from zeroxla import ZeroConfig

LARGE = Size(layers=8, width=768, heads=12, vocab=8192, length=512, rows=8)
STAGES, MICROBATCHES = 2, 8
SMALL_MICROBATCHES = 2
TURNS, SMALL_TURNS = 7, 2
BOUND = 1e-4
"""The largest difference of the loss or of a gradient, over the largest magnitude of the leaf."""


def make(place: Place, dtype: str) -> tuple[Any, zeroxla.Step, Any]:
    """Return (the model, its pipelined step, a batch)."""
    size = SMALL if place.small else LARGE
    model = size.model()
    pipeline = zeroxla.Pipeline.from_model(model, schedule="1f1b")
    step = zeroxla.make_step(
        pipeline,
        place.mesh(pipe=STAGES),
        OPTIMIZER,
        config=ZeroConfig(compute_dtype=dtype),
        microbatches=SMALL_MICROBATCHES if place.small else MICROBATCHES,
    )
    return model, step, size.tokens(place.num_devices)


def measure(place: Place) -> Iterator[Finding]:
    """Compare in float32; then time the step against ZeRO-3 on the same devices, in bfloat16."""
    with jax.default_matmul_precision("highest"):
        model, step, batch = make(place, "float32")
        state = step.init(jax.random.key(0), batch)
        loss, grads = step.grad(state, batch)
        expected = plain_gradients(model, zeroxla.full_params(state), batch)
    name = "loss against the unsharded model: relative error"
    yield bounded(name, abs(float(loss) - expected[0]) / expected[0], BOUND)
    yield bounded("gradients against jax.grad: error", largest_error(grads, expected[1]), BOUND)
    del state, grads
    model, step, batch = make(place, "bfloat16")
    config = ZeroConfig(compute_dtype="bfloat16")
    whole = zeroxla.make_step(model, place.mesh(), OPTIMIZER, config=config)
    runs = {"pipeline": Run(step, batch), "zero3": Run(whole, batch)}
    times = alternately(dict(runs), SMALL_TURNS if place.small else TURNS)
    name = f"time of a step in {STAGES} stages over ZeRO-3 on the same {place.num_devices} devices"
    yield ratio(name, median_ratio(times, "pipeline", "zero3"))


def programs(place: Place) -> Iterator[Program]:
    """Yield the pipelined step in both dtypes."""

    def lower(dtype: str) -> jax.stages.Lowered:
        _, step, batch = make(place, dtype)
        with place.lowering():
            return step.lower(step.abstract_state(batch), batch)

    for dtype in ("float32", "bfloat16"):
        name = f"1F1B in {STAGES} stages, {dtype}"
        yield Program(name=name, lower=functools.partial(lower, dtype))
