"""Time of pipelines: a step over the same model without, critical paths, compilation.

A GPT of 8 layers of width 256 in 4 stages on 4 simulated devices, 16 micro-batches of 2 x 128
tokens. Simulated devices share the cores, so a step costs the work of all stages, and idle ticks
show if they work. Against it stands the same model, every layer recomputed in backward, as on each
stage: on the 4 devices with data parallelism (ZeRO-3), and on one; both with gradient accumulation
over as many rows at a time. In forwards of all layers a step without stages does 4 for each
micro-batch (forward, recomputation, backward), a pipelined one 1/4 less, as the last stage needs no
forward besides. They take turns in one process. So do steps of all schedules.

    python benchmarks/pipeline_time.py [--turns 7] [--compiles 2]

Exits with 1 if a target is missed; writes results/pipeline_time.json and results/pipeline_time.md.
Takes about 6 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import jax
import numpy as np
import optax
from common import LENGTH, Check, alternately, random_tokens, report, start, table, token_shapes
from pipeline_time_schedules import (
    LAYERS,
    MICROBATCHES,
    ROWS,
    SCHEDULES,
    STAGES,
    WIDTH,
    critical_paths,
    gpt,
    pipeline_step,
)

import zeroxla
from zeroxla.models import GPT

PIPELINED, PARALLEL, ALONE = "pipelined", "4 devices, data parallel", "1 device"
FEW, MANY = 8, 64  # micro-batches of the two compilations
DEEP, NARROW = 32, 64  # layers and width of the model that is scanned and written out


def whole_step(devices: int) -> zeroxla.Step:
    """Return the step without stages, over as many rows at a time on each device."""
    mesh = zeroxla.make_mesh(nodes=1, devices_per_node=devices)
    return zeroxla.make_step(
        gpt(remat=True), mesh, optax.adamw(1e-3), microbatches=MICROBATCHES // devices
    )


class Run:
    """A step in training."""

    def __init__(self, step: zeroxla.Step) -> None:
        self.step, self.batch = step, random_tokens(MICROBATCHES * ROWS)
        self.state = step.init(jax.random.key(0), self.batch)
        self.loss = 0.0

    def seconds(self) -> float:
        begin = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready(jax.tree.leaves(self.state.params))
        taken = time.perf_counter() - begin
        self.loss = float(metrics["loss"])
        return taken


def times_of(steps: dict[str, zeroxla.Step], turns: int) -> dict[str, list[float]]:
    """Return seconds of steps, taken in turns; the losses must agree."""

    def check() -> None:
        losses = [run.loss for run in runs.values()]
        np.testing.assert_allclose(losses, losses[0], rtol=1e-3)

    runs = {name: Run(step) for name, step in steps.items()}
    return alternately({name: run.seconds for name, run in runs.items()}, turns, check)


def ratios_to(name: str, times: dict[str, list[float]], *, inverse: bool) -> dict[str, float]:
    """Return the median of the ratios of a turn: of one step's time to each, or the inverse."""
    ratios = {
        other: statistics.median(a / b for a, b in zip(times[name], taken, strict=True))
        for other, taken in times.items()
    }
    return {other: 1 / x for other, x in ratios.items()} if inverse else ratios


def compile_times(compiles: int) -> dict[int, list[float]]:
    """Return seconds to trace, lower and compile a step, by its number of micro-batches."""
    times: dict[int, list[float]] = {FEW: [], MANY: []}
    for turn in range(compiles):
        for microbatches in sorted(times, reverse=turn % 2 == 1):
            jax.clear_caches()  # so that nothing is left of the one before
            step, batch = pipeline_step(microbatches), token_shapes(microbatches * ROWS)
            state = step.abstract_state(batch)
            begin = time.perf_counter()
            step.lower(state, batch).compile()
            times[microbatches].append(time.perf_counter() - begin)
    return times


def deep_step(*, scan: bool, stages: int) -> zeroxla.Step:
    """Return the step of a deep model, which scans over its blocks or has them written out."""
    model = GPT(vocab=256, length=LENGTH, layers=DEEP, width=NARROW, heads=4, scan=scan)
    if stages > 1:
        model = zeroxla.Pipeline.from_model(model)
    mesh = zeroxla.make_mesh(pipe=stages, nodes=1, devices_per_node=STAGES // stages)
    return zeroxla.make_step(model, mesh, optax.adamw(1e-3), microbatches=FEW)


def num_leaves(*, scan: bool) -> int:
    """Return the number of leaves of the deep model."""
    state = deep_step(scan=scan, stages=1).abstract_state(token_shapes(STAGES * FEW))
    return len(jax.tree.leaves(state.params))


def deep_compile_times(compiles: int) -> dict[str, list[float]]:
    """Return seconds to lower and compile the deep model's steps. Its shapes are known by then, and
    its blocks are found and cut."""
    kinds = {
        f"{'scanned' if scan else 'written out'}, {stages} stages": {"scan": scan, "stages": stages}
        for scan in (True, False)
        for stages in (STAGES, 1)
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(compiles):
        for name in sorted(kinds, reverse=turn % 2 == 1):
            jax.clear_caches()
            step, batch = deep_step(**kinds[name]), token_shapes(STAGES * FEW)
            state = step.abstract_state(batch)
            begin = time.perf_counter()
            step.lower(state, batch).compile()
            times[name].append(time.perf_counter() - begin)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=7, help="timed steps of each program")
    parser.add_argument("--compiles", type=int, default=2, help="timed compilations of each")
    options = parser.parse_args()
    start()
    jax.config.update("jax_enable_compilation_cache", False)

    steps = {
        PIPELINED: pipeline_step(MICROBATCHES),
        PARALLEL: whole_step(STAGES),
        ALONE: whole_step(1),
    }
    times = times_of(steps, options.turns)
    ratios = ratios_to(PIPELINED, times, inverse=False)
    staged = {name: pipeline_step(MICROBATCHES, **given) for name, given in SCHEDULES.items()}
    schedule_times = times_of(staged, options.turns)
    over_1f1b = ratios_to("1F1B", schedule_times, inverse=True)
    step_lines = [
        [name, f"{statistics.median(taken):.2f}", f"{ratios[name]:.2f}"]
        for name, taken in times.items()
    ]
    paths, checks = critical_paths()
    path_lines = [
        [
            name,
            f"{path['ticks']:g}",
            *(f"{path[k]:.3f}" for k in ("lockstep", "asynchronous")),
            f"{over_1f1b[name]:.2f}",
        ]
        for name, path in paths.items()
    ]
    header = (
        "schedule",
        "ticks",
        "lockstep",
        "asynchronous",
        "measured over 1F1B",
    )
    compiling = compile_times(options.compiles)
    growth = statistics.median(
        many / few for many, few in zip(compiling[MANY], compiling[FEW], strict=True)
    )
    compile_lines = [[m, f"{statistics.median(taken):.1f}"] for m, taken in compiling.items()]
    deep = deep_compile_times(options.compiles)
    scanned, written = (f"{kind}, {STAGES} stages" for kind in ("scanned", "written out"))
    depth = statistics.median(a / b for a, b in zip(deep[written], deep[scanned], strict=True))
    deep_lines = [[name, f"{statistics.median(taken):.1f}"] for name, taken in deep.items()]
    checks = [
        Check(name=f"step time over {PARALLEL}", value=ratios[PARALLEL], limit=1.2),
        *checks,
        Check(name=f"trace + compile, {MANY} over {FEW} micro-batches", value=growth, limit=1.2),
        Check(
            name=f"compilation of {DEEP} layers in {STAGES} stages, written out over scanned",
            value=depth,
            limit=1.5,
        ),
    ]
    body = (
        f"GPT of {LAYERS} layers and width {WIDTH}, float32, AdamW, {MICROBATCHES} micro-batches "
        f"of {ROWS} x {LENGTH} tokens. Pipelined: 1F1B, {STAGES} stages of one simulated device. "
        "Without stages: every layer recomputed in backward, gradients accumulated over "
        f"{ROWS} sequences at a time. Median of {options.turns} alternating steps; ratios are "
        "medians of the ratios of a turn. Only ratios carry over to other machines.\n\n"
        f"{table(('step', 's', 'pipelined over it'), step_lines)}\n\n"
        f"The critical path of {STAGES} ranks and {MICROBATCHES} micro-batches, divided by "
        "(m + p - 1)(F + B). In this program ranks run in lockstep: after every tick all of "
        "them wait for the slowest one. In the next column a rank waits only for what it reads. "
        "All stages of a rank together take 1 for a forward and 2 for a backward, of which 1 is "
        "for the gradients of leaves. With a stash of inputs a backward runs the forward again, "
        "which takes 1 more, in the part for the gradient of the input. The last column is the "
        "measured time of a step, divided by 1F1B's. Simulated devices share the cores: a rank "
        "that waits costs nothing, so this column shows the work and the ticks that a schedule "
        "adds.\n\n"
        f"{table(header, path_lines)}\n\n"
        "Trace and compilation of the 1F1B step:\n\n"
        f"{table(('micro-batches', 's'), compile_lines)}\n\n"
        f"Lowering and compilation of a GPT of {DEEP} layers of width {NARROW}, whose blocks are "
        "scanned or written out, without the search for its blocks. The stages' own program is as "
        "long for both, as equal blocks run as a loop. What is left is done for each leaf, and the "
        f"one that is written out has {num_leaves(scan=False)} of them instead of "
        f"{num_leaves(scan=True)}: they are moved to their stage, and an optimizer updates each "
        "by itself, as without stages.\n\n"
        f"{table(('model', 's'), deep_lines)}"
    )
    figures = {
        "schedules_s": schedule_times,
        "over_1f1b": over_1f1b,
        "steps_s": times,
        "step_ratios": ratios,
        "critical_paths": paths,
        "compile_s": compiling,
        "compile_ratio": growth,
        "deep_compile_s": deep,
        "deep_compile_ratio": depth,
    }
    return report("pipeline_time", "Time of pipelines", body, figures, checks)


if __name__ == "__main__":
    sys.exit(main())
