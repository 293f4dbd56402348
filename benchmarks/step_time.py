"""Time of a train step on simulated devices: zeroxla over plain jit FSDP, as ratios.

GPT, unrolled and scanned, and Llama (6 layers of width 256, 2 x 128 tokens a device, AdamW), on 8
simulated devices as 2 nodes of 4. Both programs start from the same state and take the same batch
from host memory; they take turns in one process, and the ratio is the median over turns. The losses
must agree. Trace and compile time is that of the first call, less a steady step.

    python benchmarks/step_time.py [--turns 15] [--compiles 2]

Exits with 1 if a target is missed; writes results/step_time.json and results/step_time.md. Takes
about 2 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import LENGTH, NUM_DEVICES, Check, PlainFSDP, gpt, random_tokens, report, start, table
from jax.sharding import Mesh

import zeroxla
from zeroxla.models import Llama

ROWS = 2 * NUM_DEVICES
OPTIMIZER = optax.adamw(1e-3)
SHAPE = {"layers": 6, "width": 256}


def models() -> dict[str, Any]:
    """Return the models by name."""
    llama = Llama.tiny(vocab=256, heads=8, kv_heads=4, hidden=688, **SHAPE)
    return {
        "GPT, unrolled": gpt(scan=False, **SHAPE),
        "GPT, scanned": gpt(scan=True, **SHAPE),
        "Llama, scanned": llama,
    }


class Ours:
    """A zeroxla run from a copy of `state`: each call takes one step and returns the loss."""

    def __init__(self, model: Any, mesh: Mesh, state: zeroxla.TrainState, batch: Any) -> None:
        self.batch = batch
        self.step = zeroxla.make_step(model, mesh, OPTIMIZER)
        self.state = jax.tree.map(jnp.copy, state)

    def __call__(self) -> float:
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        return float(metrics["loss"])


class Plain:
    """A plain jit FSDP run from a copy of `state`."""

    def __init__(self, model: Any, mesh: Mesh, state: zeroxla.TrainState, batch: Any) -> None:
        self.batch = batch
        self.fsdp = PlainFSDP(model, mesh, OPTIMIZER, state, batch)
        self.params, self.opt_state = self.fsdp.place(state)
        self.key = jax.device_put(state.key, self.fsdp.shapes[3].sharding)

    def __call__(self) -> float:
        rows = jax.tree.map(
            lambda x, like: jax.device_put(x, like.sharding), self.batch, self.fsdp.shapes[2]
        )
        self.params, self.opt_state, loss = self.fsdp.train(
            self.params, self.opt_state, rows, self.key
        )
        jax.block_until_ready(self.params)
        return float(loss)


def timed(fun: Callable[[], float]) -> tuple[float, float]:
    """Return (seconds, result) of one call."""
    begin = time.perf_counter()
    result = fun()
    return time.perf_counter() - begin, result


def measure(model: Any, mesh: Mesh, *, turns: int, compiles: int) -> dict[str, Any]:
    """Return the times of both programs of one model, in seconds."""
    batch = random_tokens(ROWS)
    state = zeroxla.make_step(model, mesh, OPTIMIZER).init(jax.random.key(0), batch)
    kinds: dict[str, Any] = {"zeroxla": Ours, "plain": Plain}
    first: dict[str, list[float]] = {name: [] for name in kinds}
    losses = {}
    for turn in range(compiles):
        jax.clear_caches()  # so that nothing is left of the turn before
        runs = {name: kind(model, mesh, state, batch) for name, kind in kinds.items()}
        for name in sorted(kinds, reverse=turn % 2 == 0):
            seconds, losses[name] = timed(runs[name])
            first[name].append(seconds)
    steady: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(turns + 1):
        for name, run in runs.items():
            seconds, losses[name] = timed(run)
            if turn:  # the first one warms up
                steady[name].append(seconds)
    np.testing.assert_allclose(losses["zeroxla"], losses["plain"], rtol=1e-3)
    step = {name: statistics.median(times) for name, times in steady.items()}
    compiling = {name: [seconds - step[name] for seconds in times] for name, times in first.items()}
    return {
        "step_s": step,
        "step_ratio": _median_ratio(steady),
        "compile_s": {name: statistics.median(times) for name, times in compiling.items()},
        "compile_ratio": _median_ratio(compiling),
        "all_steps_s": steady,
    }


def _median_ratio(times: dict[str, list[float]]) -> float:
    return statistics.median(a / b for a, b in zip(times["zeroxla"], times["plain"], strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description="Step and compile time over plain jit FSDP.")
    parser.add_argument("--turns", type=int, default=15, help="timed steps of each program")
    parser.add_argument("--compiles", type=int, default=2, help="timed compilations of each")
    options = parser.parse_args()
    mesh = start()
    jax.config.update("jax_enable_compilation_cache", False)

    figures, lines, checks = {}, [], []
    for name, model in models().items():
        found = measure(model, mesh, turns=options.turns, compiles=options.compiles)
        figures[name] = found
        step, compiling = found["step_s"], found["compile_s"]
        lines.append(
            [
                name,
                *(f"{1e3 * step[kind]:.0f}" for kind in ("zeroxla", "plain")),
                f"{found['step_ratio']:.2f}x",
                *(f"{compiling[kind]:.1f}" for kind in ("zeroxla", "plain")),
                f"{found['compile_ratio']:.2f}x",
            ]
        )
        checks += [
            Check(name=f"{name}: step time ratio", value=found["step_ratio"], limit=1.15),
            Check(name=f"{name}: compile time ratio", value=found["compile_ratio"], limit=2.0),
        ]
    header = ["model", "step, ms", "plain, ms", "ratio", "trace + compile, s", "plain, s", "ratio"]
    body = (
        f"{SHAPE['layers']} layers of width {SHAPE['width']}, float32, AdamW, "
        f"{ROWS // NUM_DEVICES} x {LENGTH} tokens a device, {NUM_DEVICES} simulated devices as 2 "
        f"nodes of 4. Median of {options.turns} alternating steps; ratios are medians of the "
        "ratios of a turn. Only ratios carry over to other machines.\n\n"
        f"{table(header, lines)}"
    )
    return report("step_time", "Step time", body, {"models": figures}, checks)


if __name__ == "__main__":
    sys.exit(main())
