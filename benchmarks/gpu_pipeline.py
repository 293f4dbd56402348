"""The GPU schedule of pipelined steps, compiled for 8 H200 that nobody has to own.

A GPT in bfloat16 in 4 ranks of 2 devices: how many conditionals a program has, which of its sends
between ranks run beside one, and which gathers run beside matmuls. Nothing runs.

    python benchmarks/gpu_pipeline.py

Exits with 1 if a target is missed; writes results/gpu_pipeline.json and results/gpu_pipeline.md.
Takes 3 minutes on 2 cores, and needs JAX's CUDA wheels, as benchmarks/gpu_schedule.py does. Without
the wheels it says so and exits with 0.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
import optax
from common import Check, report, table
from gpu_schedule import LENGTH, model
from jax.sharding import Mesh
from schedule import gathers

import zeroxla
from zeroxla.planning.gpu_topology import H200, WheelsMissingError, target_mesh

RANKS, DEVICES, MICROBATCHES = 4, 2, 8
VARIANTS: dict[str, dict[str, Any]] = {
    f"{schedule}, weights={weights}": {"schedule": schedule, "weights": weights}
    for weights in ("step", "tick")
    for schedule in ("1f1b", "zb-h1", "interleaved", "zb-v")
}
PERMUTE = re.compile(r" %(\S+) = .* collective-permute(|-start|-done)\(")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """The conditionals, the sends and the gathers of a compiled step.

    Attributes:
      conditionals: the number of conditionals.
      permutes: the number of sends between ranks in a tick.
      beside: how many of these have a conditional between their start and their done.
      gathers: the number of gathers in the forwards and backwards of a tick.
      hidden_bytes: the share of their bytes that has a matmul beside it.
    """

    conditionals: int
    permutes: int
    beside: int
    gathers: int
    hidden_bytes: float


def compile_step(mesh: Mesh, *, schedule: str, weights: str) -> Program:
    """Compile a step for the mesh, and read its schedule."""
    pipeline = zeroxla.Pipeline.from_model(model(scan=True), schedule=schedule)
    step = zeroxla.make_step(
        pipeline,
        mesh,
        optax.adamw(1e-3),
        config=zeroxla.ZeroConfig(compute_dtype="bfloat16", persistence_threshold=0),
        microbatches=MICROBATCHES,
        weights=weights,
    )
    rows = DEVICES * MICROBATCHES
    batch = {"tokens": jax.ShapeDtypeStruct((rows, LENGTH + 1), np.int32)}
    text = step.lower(step.abstract_state(batch), batch).compile().as_text()
    permutes, beside = sends(text)
    mine = [g for g in gathers(text) if g.direction]
    total = sum(g.count * g.result_bytes for g in mine)
    hidden = sum(g.count * g.result_bytes for g in mine if g.matmuls)
    return Program(
        conditionals=len(re.findall(r" conditional\(", text)),
        permutes=permutes,
        beside=beside,
        gathers=sum(g.count for g in mine),
        hidden_bytes=hidden / total if total else 0.0,
    )


def sends(text: str) -> tuple[int, int]:
    """Return the number of permutes of a compiled program, which is scheduled, and how many have a
    conditional between their start and their done."""
    total = beside = 0
    waiting: dict[str, bool] = {}  # by start: whether a conditional has come since
    for line in text.splitlines():
        if " conditional(" in line:
            waiting = dict.fromkeys(waiting, True)
        found = PERMUTE.search(line)
        if found is None:
            continue
        name, kind = found.groups()
        if kind == "-done":
            start = re.search(r"-done\(%([^),]+)", line)
            assert start is not None
            beside += waiting.pop(start.group(1))
        else:
            total += 1
            if kind == "-start":
                waiting[name] = False
    return total, beside


def main() -> int:
    try:
        mesh = target_mesh(H200, {"pipe": RANKS, "node": 1, "device": DEVICES})
    except WheelsMissingError as error:
        print(f"nothing measured: {error}")
        return 0
    programs = {name: compile_step(mesh, **options) for name, options in VARIANTS.items()}
    header = (
        "step",
        "conditionals",
        "sends in a tick",
        "beside a conditional",
        "gathers of ticks",
        "their bytes beside matmuls",
    )
    lines = [
        [
            name,
            *map(str, (p.conditionals, p.permutes, p.beside, p.gathers)),
            f"{p.hidden_bytes:.0%}" if p.gathers else "",
        ]
        for name, p in programs.items()
    ]
    body = (
        f"GPT of benchmarks/gpu_schedule.py in {RANKS} ranks of {DEVICES} H200, {MICROBATCHES} "
        "micro-batches, compiled ahead of time (CUDA 13). Two conditionals are at the ends of a "
        "step, the others in a tick. A GPU's host reads which branch to take, so each costs a "
        "synchronisation. With a forward and a backward in a tick what the one sends travels "
        "beside the other; with one op in it nothing is left to run beside. Where weights are "
        "gathered in every tick XLA lets no send run beside a conditional, which has collectives "
        "of its own; gathers run beside matmuls in the loop over a stage's layers, and those "
        "before and behind it do not.\n\n"
        f"{table(header, lines)}"
    )
    first = programs["1f1b, weights=step"]
    checks = [
        Check(
            name="1f1b, weights=step: sends that run beside no conditional",
            value=first.permutes - first.beside,
            limit=0,
        ),
        *(
            Check(name=f"{name}: conditionals", value=p.conditionals, limit=limit)
            for name, p in programs.items()
            for limit in (3 if "zb" in name else 4,)
        ),
    ]
    figures = {
        "target": {"device": H200.stem, "pipe": RANKS, "devices_per_node": DEVICES},
        "plugin": {name: version(name) for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt")},
        "programs": {name: dataclasses.asdict(program) for name, program in programs.items()},
    }
    return report("gpu_pipeline", "GPU schedule of pipelines", body, figures, checks)


if __name__ == "__main__":
    sys.exit(main())
