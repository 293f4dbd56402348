"""A `zeropp` step of a GPT against plain `jax.jit`: gradients, 50 losses, memory, time.

Both compute in bfloat16 from float32 masters. Losses and the allocator's peak are taken in a
process for each program, times in turns in one process.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from common import PlainFSDP, alternately
from step_time import Plain, timed

import zeroxla
from gpu_parts.child import alone
from gpu_parts.findings import Finding, Program, bounded, largest_error, megabytes, ratio
from gpu_parts.gpts import OPTIMIZER, SMALL, Run, Size, median_ratio, plain_gradients
from gpu_parts.place import Place, peak_bytes
from zeroxla import ZeroConfig
from zeroxla.frontend import adapt
from zeroxla.inspect import memory
from zeroxla.program.compat import mesh_context

LARGE = Size(layers=12, width=768, heads=12, vocab=50304, length=1024, rows=4)
STEPS, TURNS, SMALL_TURNS = 50, 11, 3
LOSS_BOUND = 0.02
"""The largest difference of the losses of a step, over the loss of plain `jit`. A quantized wire
and the order of bfloat16 sums change the losses; a wrong gradient would change them more."""
GRADIENT_BOUND = 1e-4
KINDS = ("zeropp", "plain jit")
CONTROL, OTHER_ATTENTION = "plain jit, attention in blocks", "blockwise"
"""Plain `jit` with the same sums in another order: how far roundings alone take the losses."""


def size_of(place: Place) -> Size:
    """Return the GPT of this place."""
    return SMALL if place.small else LARGE


def make(place: Place, nodes: int) -> tuple[Any, zeroxla.Step, Any]:
    """Return (mesh, the step, a batch)."""
    mesh = place.mesh(nodes=nodes)
    size = size_of(place)
    everything = {"persistence_threshold": 0, "quantize_threshold": 600} if place.small else {}
    config = ZeroConfig.zeropp(compute_dtype="bfloat16", **everything)
    step = zeroxla.make_step(size.model(), mesh, OPTIMIZER, config=config)
    return mesh, step, size.tokens(place.num_devices)


class PlainRun(Plain):
    """Plain `jit` from its own initialisation: each call takes a step and returns its loss."""

    def __init__(self, place: Place, mesh: Any, batch: Any, **options: Any) -> None:
        model, key = size_of(place).model(**options), jax.random.key(0)
        self.batch = batch
        self.fsdp = plain_step(model, mesh, batch)
        placed = jax.tree.map(lambda x: x.sharding, self.fsdp.shapes[:2])

        def params(key: jax.Array) -> Any:
            return adapt(model).init(key, {"tokens": batch["tokens"][:1]})[0]

        self.params = jax.jit(params, out_shardings=placed[0])(key)
        self.opt_state = jax.jit(OPTIMIZER.init, out_shardings=placed[1])(self.params)
        self.key = jax.device_put(key, self.fsdp.shapes[3].sharding)


def plain_step(model: Any, mesh: Any, batch: Any) -> PlainFSDP:
    """Return the plain step, split as ZeRO-3 splits a state."""
    shapes = zeroxla.make_step(model, mesh, OPTIMIZER).abstract_state(batch)
    return PlainFSDP(model, mesh, OPTIMIZER, shapes, batch, compute_dtype="bfloat16")


def train(place: Place, nodes: int, kind: str) -> Iterator[dict[str, Any]]:
    """Train in a process of its own; yield the losses, the compiler's memory and the allocator's
    peak."""
    mesh, step, batch = make(place, nodes)
    if kind != "zeropp":
        options = {"attention": OTHER_ATTENTION} if kind == CONTROL else {}
        model = size_of(place).model(**options)
        planned = memory(plain_step(model, mesh, batch).lower().compile())
        run = PlainRun(place, mesh, batch, **options)
        losses = [run() for _ in range(STEPS)]
    else:
        planned = memory(step.lower(step.abstract_state(batch), batch).compile())
        ours = Run(step, batch)
        for _ in range(STEPS):
            ours()
        losses = ours.losses
    yield {"losses": losses, "bytes": planned.total_bytes, "peak_bytes": peak_bytes()}


def measure(place: Place, nodes: int = 1) -> Iterator[Finding]:
    """Yield the figures on a mesh with so many nodes."""
    found = {
        kind: alone("gpu_parts.step", "train", place, nodes, kind)[0] for kind in (*KINDS, CONTROL)
    }
    losses = np.array([found[kind]["losses"] for kind in (*KINDS, CONTROL)])
    off, control = np.max(np.abs(losses[[0, 2]] - losses[1]) / losses[1], axis=1)
    name = f"losses of {STEPS} steps against plain jit's, largest relative difference"
    yield Finding(name=f"{name}, {CONTROL}", text=f"{control:.3g}", value=control)
    yield bounded(f"{name}, zeropp", off, LOSS_BOUND)
    fall = losses[0][-1] / losses[0][0]
    name = f"loss of step {STEPS} over the first one's, zeropp (both learn one batch by heart)"
    yield bounded(name, fall, 0.99)
    for kind in KINDS:
        name = f"memory of a step, {kind}, says the compiler"
        yield megabytes(name, found[kind]["bytes"])
        peak = found[kind]["peak_bytes"]
        name = f"most memory in use, {kind}, says the allocator of a device"
        yield Finding(name=name, text="not counted") if peak is None else megabytes(name, peak)
    yield gradient_error(place, nodes)
    mesh, step, batch = make(place, nodes)
    plain = PlainRun(place, mesh, batch)
    ours = Run(step, batch)
    turns = SMALL_TURNS if place.small else TURNS
    times = alternately({"zeropp": ours, "plain jit": lambda: timed(plain)[0]}, turns)
    yield ratio("time of a step, zeropp over plain jit", median_ratio(times, *KINDS))
    size = size_of(place)
    tokens = size.rows * size.length * place.num_devices
    for kind in KINDS:
        rate = tokens / statistics.median(times[kind])
        yield Finding(name=f"tokens a second, {kind}", text=f"{rate:,.0f}", value=rate)


def gradient_error(place: Place, nodes: int) -> Finding:
    """Compare ZeRO-3's gradients in float32 with `jax.grad` of the unsharded model."""
    size = size_of(place)
    model, batch = size.model(), size.tokens(place.num_devices)
    with jax.default_matmul_precision("highest"):
        step = zeroxla.make_step(model, place.mesh(nodes=nodes), OPTIMIZER)
        state = step.init(jax.random.key(0), batch)
        loss, grads = step.grad(state, batch)
        expected = plain_gradients(model, zeroxla.full_params(state), batch)
    error = largest_error((loss, grads), expected)
    name = "loss and gradients in float32, ZeRO-3 against jax.grad of the unsharded model: error"
    return bounded(name, error, GRADIENT_BOUND)


def programs(place: Place, nodes: int = 1) -> Iterator[Program]:
    """Yield both steps, and the float32 step whose gradients are compared."""
    mesh, step, batch = make(place, nodes)
    model = size_of(place).model()
    whole = zeroxla.make_step(model, mesh, OPTIMIZER)

    def lower(step: zeroxla.Step) -> jax.stages.Lowered:
        with place.lowering():
            return step.lower(step.abstract_state(batch), batch)

    def lower_plain() -> jax.stages.Lowered:
        with place.lowering(), mesh_context(mesh):
            return plain_step(model, mesh, batch).lower()

    where = f"{nodes} x {place.num_devices // nodes} devices"
    yield Program(name=f"zeropp, {where}", lower=functools.partial(lower, step))
    yield Program(name=f"plain jit, {where}", lower=lower_plain)
    yield Program(name=f"ZeRO-3 in float32, {where}", lower=functools.partial(lower, whole))
