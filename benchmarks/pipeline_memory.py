"""Memory of a pipelined step by schedule and number of micro-batches, from the compiler's figures.

A GPT of 8 small layers in 4 stages on 4 simulated devices, 4 x 128 tokens a micro-batch, so that
activations are most of it: the compiler's temporaries of a step with 4 to 64 micro-batches. The
batch grows with them; it is an argument and no temporary. Nothing runs.

    python benchmarks/pipeline_memory.py [--only SCHEDULE ...]

`--only` measures these schedules again, and takes the others from the last results.
Exits with 1 if a target is missed; writes results/pipeline_memory.json, .md and .png. Takes about 8
minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import optax
from common import LENGTH, MEMORY_SCHEDULER, RESULTS, Check, gpt, report, start, table, token_shapes
from jax.sharding import Mesh
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

import zeroxla
from zeroxla.pipeline.stash import make_stash

STAGES, LAYERS, WIDTH, ROWS = 4, 8, 64, 4  # ROWS: sequences of a micro-batch
COUNTS = (4, 8, 16, 32, 64)  # micro-batches
SCHEDULES: dict[str, dict[str, Any]] = {
    "1F1B": {"schedule": "1f1b"},
    "1F1B, memory low": {"schedule": "1f1b", "memory": "low"},
    "ZB-H1": {"schedule": "zb-h1"},
    "Interleaved, 2 chunks": {"schedule": "interleaved"},
    "ZB-V": {"schedule": "zb-v"},
    "DualPipeV": {"schedule": "dualpipev"},
    "1F1B, activations": {"schedule": "1f1b", "stash": "activations"},
    "ZB-V, activations": {"schedule": "zb-v", "stash": "activations"},
    "GPipe": {"schedule": "gpipe"},
}
LEAST = dict.fromkeys(("DualPipeV", "1F1B, activations", "ZB-V, activations"), 2 * STAGES)
"""The fewest micro-batches of a schedule. Where what a rank holds of one is most of a step's
memory, the fewest with which the schedule has its usual order: with fewer 1F1B holds all of them,
and ZB-V more of the last stage's."""
GROWS = "GPipe"
BOUNDARY = ROWS * LENGTH * WIDTH * 4  # bytes between two stages
FLAT = 0.05


def measure(mesh: Mesh, microbatches: int, options: dict[str, Any]) -> dict[str, int]:
    """Return the figures of one step, in bytes a device."""
    model = gpt(scan=True, layers=LAYERS, width=WIDTH)
    pipeline = zeroxla.Pipeline.from_model(model, **options)
    step = zeroxla.make_step(pipeline, mesh, optax.adamw(1e-3), microbatches=microbatches)
    batch = token_shapes(microbatches * ROWS)
    used = zeroxla.inspect.memory(step.lower(step.abstract_state(batch), batch).compile())
    stash = make_stash(pipeline.schedule(STAGES, microbatches, train=True))
    slots = stash.num_input_slots + stash.num_gradient_slots
    return {
        "temporaries": used.temp_bytes,
        "arguments": used.argument_bytes,
        "stash": slots * BOUNDARY,
    }


def before(name: str, microbatches: int) -> dict[str, int]:
    """Return the figures of a step in the last results."""
    found = json.loads((RESULTS / "pipeline_memory.json").read_text())
    return found["bytes"][name][str(microbatches)]


def draw(figures: dict[str, dict[int, dict[str, int]]]) -> None:
    """Write the picture: temporaries over micro-batches, a line for each schedule."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (name, found), marker in zip(figures.items(), "osx+v*DP^", strict=True):
        sizes = [found[m]["temporaries"] / 1e6 for m in found]
        axes.plot(list(found), sizes, marker=marker, linewidth=1.2, markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(COUNTS, map(str, COUNTS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"micro-batches, {STAGES} stages")
    axes.set_ylabel("temporaries of a device, MB")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(RESULTS / "pipeline_memory.png", dpi=120)


def make_checks(figures: dict[str, dict[int, dict[str, int]]]) -> list[Check]:
    """Compare the figures with the targets."""
    checks = []
    for name, found in figures.items():
        few, many = min(found), max(found)
        sizes = [x["temporaries"] for x in found.values()]
        if name == GROWS:
            text = f"{name}: temporaries at {few} over those at {many}, less than 1"
            checks.append(Check(name=text, value=sizes[0] / sizes[-1], limit=1 - FLAT))
        else:
            text = f"{name}: largest over smallest temporaries, {few} to {many} micro-batches"
            checks.append(Check(name=text, value=max(sizes) / min(sizes), limit=1 + FLAT))
    for stash in ("", ", activations"):
        zb_v, one = (figures[f"{name}{stash}"][COUNTS[-1]] for name in ("ZB-V", "1F1B"))
        text = f"ZB-V{stash}: temporaries over 1F1B's, {COUNTS[-1]} micro-batches"
        ratio = zb_v["temporaries"] / one["temporaries"]
        checks.append(Check(name=text, value=ratio, limit=1.0))
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=SCHEDULES, help="measure these again")
    only = parser.parse_args().only
    start(flags=MEMORY_SCHEDULER)
    mesh = zeroxla.make_mesh(pipe=STAGES, nodes=1, devices_per_node=1)
    figures = {}
    for name, options in SCHEDULES.items():
        counts = [m for m in COUNTS if m >= LEAST.get(name, 1)]
        if only is None or name in only:
            figures[name] = {m: measure(mesh, m, options) for m in counts}
        else:
            figures[name] = {m: before(name, m) for m in counts}
    lines = [
        [
            name,
            *(
                f"{found[m]['temporaries'] / 1e6:.2f} ({found[m]['stash'] / 1e6:.2f})"
                if m in found
                else ""
                for m in COUNTS
            ),
        ]
        for name, found in figures.items()
    ]
    RESULTS.mkdir(exist_ok=True)
    draw(figures)
    batches = [figures["1F1B"][m]["arguments"] / 1e6 for m in (COUNTS[0], COUNTS[-1])]
    body = (
        f"GPT of {LAYERS} layers and width {WIDTH}, float32, AdamW, in {STAGES} stages of one "
        f"device, {ROWS} x {LENGTH} tokens a micro-batch. Temporaries of a device as the compiler "
        f"plans them, MB, with `{MEMORY_SCHEDULER}`, by number of micro-batches; in brackets what "
        "of them is the stash of received activations and gradients, of "
        f"{BOUNDARY / 1e6:.2f} MB each. Arguments, of which the batch is the part that grows: "
        f"{batches[0]:.2f} to {batches[1]:.2f} MB.\n\n"
        f"{table(('schedule', *map(str, COUNTS)), lines)}\n\n"
        "![Temporaries over micro-batches](pipeline_memory.png)"
    )
    found = {"bytes": figures, "boundary_bytes": BOUNDARY, "stages": STAGES}
    return report("pipeline_memory", "Memory of pipelines", body, found, make_checks(figures))


if __name__ == "__main__":
    sys.exit(main())
