"""The schedules of benchmarks/pipeline_time.py, and how long their critical paths are."""

from __future__ import annotations

from typing import Any

import optax
from common import LENGTH, Check, token_shapes

import zeroxla
from zeroxla.inspect import comms
from zeroxla.models import GPT
from zeroxla.pipeline.schedule_cost import cost, critical_path
from zeroxla.pipeline.stash import make_stash

STAGES, MICROBATCHES, LAYERS, WIDTH, ROWS = 4, 16, 8, 256, 2  # ROWS: sequences of a micro-batch
KEPT = {"stash": "activations"}
SCHEDULES: dict[str, dict[str, Any]] = {
    "1F1B": {"schedule": "1f1b"},
    "1F1B, memory low": {"schedule": "1f1b", "memory": "low"},
    "GPipe": {"schedule": "gpipe"},
    "ZB-H1": {"schedule": "zb-h1"},
    "Interleaved, 2 chunks": {"schedule": "interleaved"},
    "ZB-V": {"schedule": "zb-v"},
    "DualPipeV": {"schedule": "dualpipev"},
    "1F1B, activations": {"schedule": "1f1b", **KEPT},
    "ZB-H1, activations": {"schedule": "zb-h1", **KEPT},
    "Interleaved, 2 chunks, activations": {"schedule": "interleaved", **KEPT},
    "ZB-V, activations": {"schedule": "zb-v", **KEPT},
    "DualPipeV, activations": {"schedule": "dualpipev", **KEPT},
}
LIMITS = {
    "1F1B": 1.1,
    "GPipe": 1.1,
    "ZB-H1": 1.1,
    "Interleaved, 2 chunks": 0.93,
    "ZB-V": 0.88,
    "ZB-H1, activations": 1.1,
    "Interleaved, 2 chunks, activations": 0.93,
    "ZB-V, activations": 0.88,
}
"""The targets of the critical path in lockstep over (m + p - 1)(F + B). Other schedules have none;
1F1B with memory="low" takes longer ticks for a shorter stash."""


def gpt(*, remat: bool) -> GPT:
    return GPT(vocab=256, length=LENGTH, layers=LAYERS, width=WIDTH, heads=8, remat=remat)


def pipeline_step(microbatches: int, **options: Any) -> zeroxla.Step:
    """Return the pipelined step; a stage is recomputed as a whole, so its layers are not."""
    pipeline = zeroxla.Pipeline.from_model(gpt(remat=False), **options)
    mesh = zeroxla.make_mesh(pipe=STAGES, nodes=1, devices_per_node=1)
    return zeroxla.make_step(pipeline, mesh, optax.adamw(1e-3), microbatches=microbatches)


def critical_paths() -> tuple[dict[str, dict[str, float]], list[Check]]:
    """Return the critical paths of the schedules' tables, and the targets.

    A forward of a rank's stages is 1, a backward 2, half of it for the leaves, and 1 more where it
    runs the forward again.

    That the program runs its table is read from it: a loop of as many turns as there are ticks,
    with a permute for each hop in each, after which every rank waits for its neighbours: in
    lockstep.
    """
    found, checks = {}, []
    for name, options in SCHEDULES.items():
        step, batch = pipeline_step(MICROBATCHES, **options), token_shapes(MICROBATCHES * ROWS)
        pipeline = zeroxla.Pipeline.from_model(gpt(remat=False), **options)
        schedule = pipeline.schedule(STAGES, MICROBATCHES, train=True)
        program = comms(step.lower(step.abstract_state(batch), batch), step.mesh)
        permutes = program.count(axis="pipe", kind="collective-permute")
        stash = make_stash(schedule)
        hops = [hop for hop in (*stash.input_arrivals, *stash.gradient_arrivals) if hop]
        if permutes != len(hops) * schedule.ticks:
            raise RuntimeError(
                f"the program of {name} has {permutes} permutes; its table of {schedule.ticks} "
                f"ticks with {len(hops)} hops has {len(hops) * schedule.ticks}"
            )
        backward = 3 if pipeline.runs_forward_again else 2
        ideal = (MICROBATCHES + STAGES - 1) * (1 + backward)
        found[name] = {
            "ticks": schedule.ticks,
            "lockstep": cost(schedule, 1, backward, 1) / ideal,
            "asynchronous": critical_path(schedule, 1, backward, 1) / ideal,
        }
        if name in LIMITS:
            text = f"{name}: critical path in lockstep over (m + p - 1)(F + B)"
            value = found[name]["lockstep"]
            checks.append(Check(name=text, value=value, limit=LIMITS[name]))
    return found, checks
