"""The parts `time` and `search` of axes.py: steps with axes against steps that are data parallel.

Time: GPT and Llama of 6 layers and width 256 on 8 simulated devices, the same rows in one step,
with `tensor=4` and `context=4` and with all devices along `device`. The steps take turns in one
process.
Trace, search and compilation are the shapes of a state, which decide the plan, and a step's first
call, less a later one.

Search: processor seconds of finding the plan of GPT and of Llama for `tensor=4`, with 24 and with
80 layers, apart from tracing the loss. It is one thread. Nothing is compiled.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import LENGTH, NUM_DEVICES, Check, gpt, random_tokens, table
from jax.sharding import PartitionSpec

import zeroxla
from zeroxla.frontend import adapt
from zeroxla.models import GPT, Llama
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.plan_proof import PlanProof
from zeroxla.step.axes import split_loss
from zeroxla.step.axes.axis_planner import AxisPlanner
from zeroxla.step.axes.split_loss import SplitLoss

ROWS = 2 * NUM_DEVICES
OPTIMIZER = optax.adamw(1e-3)
SHAPE = {"layers": 6, "width": 256}
PARTS = 4
MESHES: dict[str, dict[str, int]] = {
    "data": {},
    f"tensor={PARTS}": {"tensor": PARTS},
    f"context={PARTS}": {"context": PARTS},
}
STEP_RATIO, COMPILE_RATIO, SEARCH_S = 1.15, 2.0, 60.0
DEPTHS = (24, 80)
SEARCHED = {"width": 1024, "heads": 8, "vocab": 32000, "loss_chunk": 0}
SEARCHED_LENGTH = 2048


def models() -> dict[str, Any]:
    """Return the models that train, by name."""
    return {
        "GPT, written out": gpt(scan=False, **SHAPE),
        "GPT, scanned": gpt(scan=True, **SHAPE),
        "Llama, scanned": Llama.tiny(vocab=256, heads=8, kv_heads=8, hidden=704, **SHAPE),
    }


class Run:
    """A step on a mesh, from the same weights as the others: each call takes one step and returns
    its seconds.

    Attributes:
      decide_s: seconds of deciding the shapes of the state: a trace, and the search.
      loss: of the last step.
    """

    def __init__(self, model: Any, axes: dict[str, int]) -> None:
        self.batch = random_tokens(ROWS)
        mesh = zeroxla.make_mesh(nodes=1, **axes)  # pyright: ignore[reportArgumentType]
        self.step = zeroxla.make_step(model, mesh, OPTIMIZER)
        begin = time.perf_counter()
        self.step.abstract_state(self.batch)
        self.decide_s = time.perf_counter() - begin
        self.state = self.step.init(jax.random.key(0), self.batch)
        jax.block_until_ready(self.state)
        self.loss = float("nan")

    def __call__(self) -> float:
        begin = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        seconds = time.perf_counter() - begin
        self.loss = float(metrics["loss"])
        return seconds


def step_times(model: Any, *, turns: int, compiles: int) -> dict[str, Any]:
    """Return the times of a model's steps on all meshes, in seconds.

    Args:
      model: the model.
      turns: how often every step is timed. In a turn each of them runs once.
      compiles: the number of times that each is traced, searched and compiled.
    """
    first: dict[str, list[float]] = {name: [] for name in MESHES}
    runs: dict[str, Run] = {}
    for turn in range(compiles):
        runs = {}
        for name in sorted(MESHES, reverse=turn % 2 == 1):
            jax.clear_caches()  # so that nothing is left of the step before
            runs[name] = Run(model, MESHES[name])
            first[name].append(runs[name].decide_s + runs[name]())
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            seconds = run()
            if turn:  # the first one warms up
                times[name].append(seconds)
        losses = [run.loss for run in runs.values()]
        np.testing.assert_allclose(losses, losses[0], rtol=1e-3)
    steady = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {
        "step_s": steady,
        "step_ratio": _ratios(times),
        "compile_s": {n: statistics.median(s) - steady[n] for n, s in first.items()},
        "compile_ratio": _ratios({n: [x - steady[n] for x in s] for n, s in first.items()}),
        "all_steps_s": times,
    }


def _ratios(times: dict[str, list[float]]) -> dict[str, float]:
    """Return for each mesh the median, over the turns, of its time divided by that of `data`."""
    return {
        name: statistics.median(a / b for a, b in zip(seconds, times["data"], strict=True))
        for name, seconds in times.items()
        if name != "data"
    }


def search_times(kind: str, *, scan: bool, layers: int) -> dict[str, float]:
    """Return the processor seconds of the two traces, of the search, of its proof, and of all."""
    shape = {**SEARCHED, "layers": layers, "scan": scan, "attention_block": SEARCHED_LENGTH}
    if kind == "GPT":
        model: Any = GPT(length=SEARCHED_LENGTH, **shape)
    else:
        model = Llama.tiny(**shape, kv_heads=8, hidden=2816)
    adapted = adapt(model)
    batch = {"tokens": jax.ShapeDtypeStruct((1, SEARCHED_LENGTH + 1), jnp.int32)}
    params, state = jax.eval_shape(adapted.init, jax.random.key(0), batch)
    key = jax.eval_shape(lambda: jax.random.key(1))
    mesh = zeroxla.make_mesh(nodes=1, devices=jax.devices()[:PARTS], tensor=PARTS)

    def loss(params: Any, state: Any, batch: Any, key: Any) -> Any:
        return adapted.loss(params, state, batch, key, train=True)

    def split() -> jax.Array:
        costs = {"tensor": AxisCosts()}
        SplitLoss.of(loss, [("tensor", PARTS)], params, state, batch, key, costs=costs)
        return jnp.zeros(())

    spent = {"trace": 0.0, "search": 0.0, "proof": 0.0}
    begin = time.process_time()
    with (
        timed(split_loss, "trace", spent),
        timed(AxisPlanner, "plan", spent, "search"),
        timed(PlanProof, "check", spent, "proof"),
    ):
        jax.eval_shape(
            jax.shard_map(split, mesh=mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False)
        )
    spent["search"] -= spent["proof"]
    return {**spent, "all": time.process_time() - begin}


@contextmanager
def timed(
    module: Any, name: str, spent: dict[str, float], key: str | None = None
) -> Iterator[None]:
    """Add the processor seconds in a function of a module to `spent`."""
    function: Callable[..., Any] = getattr(module, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[key or name] += time.process_time() - begin

    with mock.patch.object(module, name, run):
        yield


def measure_time(*, turns: int, compiles: int) -> dict[str, Any]:
    """Return the times of steps and of compilations of every model."""
    jax.config.update("jax_enable_compilation_cache", False)
    return {
        name: step_times(model, turns=turns, compiles=compiles) for name, model in models().items()
    }


def measure_search() -> list[dict[str, Any]]:
    """Return the processor seconds of every search."""
    return [
        {"model": kind, "scan": scan, "layers": n, **search_times(kind, scan=scan, layers=n)}
        for kind in ("GPT", "Llama")
        for scan in (True, False)
        for n in DEPTHS
    ]


def time_in_words(found: dict[str, Any], turns: int) -> str:
    """Return the table of times as markdown."""
    lines = [
        [
            f"{model}, {mesh}",
            *(f"{1e3 * x['step_s'][name]:.0f}" for name in (mesh, "data")),
            f"{x['step_ratio'][mesh]:.2f}x",
            *(f"{x['compile_s'][name]:.1f}" for name in (mesh, "data")),
            f"{x['compile_ratio'][mesh]:.2f}x",
        ]
        for model, x in found.items()
        for mesh in x["step_ratio"]
    ]
    header = ["", "step, ms", "data, ms", "ratio", "trace + compile, s", "data, s", "ratio"]
    return (
        f"{SHAPE['layers']} layers of width {SHAPE['width']}, float32, AdamW, {ROWS} x {LENGTH} "
        f"tokens in a step on {NUM_DEVICES} simulated devices of one node: {PARTS} of them along "
        f"the axis and the others along `device`, against all of them along `device`. Median of "
        f"{turns} alternating steps; ratios are medians of the ratios of a turn. The seconds "
        "of trace, search and compilation are the time of the first step minus that of a later "
        "one. Only "
        f"ratios carry over to other machines.\n\n{table(header, lines)}"
    )


def search_in_words(found: list[dict[str, Any]]) -> str:
    """Return the table of searches as markdown."""
    lines = [
        [
            _searched(x),
            *(f"{x[name]:.1f}" for name in ("search", "proof", "trace", "all")),
        ]
        for x in found
    ]
    header = ("model", "search", "proof", "traces", "all")
    return (
        f"Processor seconds of the search for a plan with tensor={PARTS}, for one sequence of "
        f"{SEARCHED_LENGTH} tokens; of its proof on small instances; of the two traces, of the "
        f"loss and of the loss that runs the plan; and of all of it.\n\n{table(header, lines)}"
    )


def _searched(row: dict[str, Any]) -> str:
    kind = "scanned" if row["scan"] else "written out"
    return f"{row['model']}, {kind}, {row['layers']} layers"


def time_checks(found: dict[str, Any]) -> list[Check]:
    """Compare the times with the targets."""
    return [
        Check(name=f"{model}, {mesh}: {text} over data parallel", value=x[key][mesh], limit=limit)
        for model, x in found.items()
        for mesh in x["step_ratio"]
        for text, key, limit in (
            ("step time", "step_ratio", STEP_RATIO),
            ("trace, search and compilation", "compile_ratio", COMPILE_RATIO),
        )
    ]


def search_checks(found: list[dict[str, Any]]) -> list[Check]:
    """Compare the searches of the deepest models with the target."""
    return [
        Check(
            name=f"{_searched(x)}: processor seconds of the search",
            value=x["search"],
            limit=SEARCH_S,
        )
        for x in found
        if x["layers"] == DEPTHS[-1]
    ]
