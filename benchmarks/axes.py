"""Axes that split the work on one row: bytes over the axis, memory, time, and time of the search.

    python benchmarks/axes.py [--only bytes memory time search] [--turns 15] [--compiles 2]

`--only` measures these parts again and takes the others from the last results. Each part is a
process of its own; see `axes_bytes.py`, `axes_memory.py` and `axes_time.py`. Times need a machine
that does nothing else.

Exits with 1 if a target is missed; writes results/axes.json, .md and .png. Takes about 20 minutes
on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import axes_bytes
import axes_memory
import axes_time
from common import MEMORY_SCHEDULER, RESULTS, report, start
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PARTS = {
    "bytes": "Bytes",
    "memory": "Memory",
    "time": "Time",
    "search": "The search",
}
FLAGS = {"memory": MEMORY_SCHEDULER}
NAMES = {"zeroxla": "zeroxla", "jax.jit": "jax.jit with annotations"}


def measure(part: str, asked: argparse.Namespace) -> Any:
    """Return the figures of a part, in this process."""
    start()
    if part == "bytes":
        return axes_bytes.measure()
    if part == "memory":
        return axes_memory.measure()
    if part == "time":
        times = axes_time.measure_time(turns=asked.turns, compiles=asked.compiles)
        return {"turns": asked.turns, "models": times}
    return axes_time.measure_search()


def measure_apart(part: str, asked: argparse.Namespace) -> Any:
    """Return the figures of a part from a fresh process."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS.get(part, '')}".strip()
    options = ["--turns", str(asked.turns), "--compiles", str(asked.compiles)]
    done = subprocess.run(
        [sys.executable, __file__, "--measure", part, *options],
        env={**os.environ, "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def before() -> dict[str, Any]:
    """Return the figures of the last results, by part."""
    path = RESULTS / "axes.json"
    return json.loads(path.read_text())["parts"] if path.exists() else {}


def draw(rows: list[dict[str, Any]]) -> None:
    """Write the picture. It shows the bytes of a block, divided by those of the formula."""
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.38
    for i, (name, label) in enumerate(NAMES.items()):
        sizes = [
            (row[name]["block"]["forward"] + row[name]["block"]["backward"]) / 2 / row["formula"]
            for row in rows
        ]
        places = [j + (i - 0.5) * width for j in range(len(rows))]
        axes.barh(places, sizes, height=width, label=label)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["case"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("bytes over the axis for a block's activations, over the formula")
    figure.legend(frameon=False, ncols=2, loc="outside upper center")
    figure.savefig(RESULTS / "axes.png", dpi=120)


def in_words(part: str, found: Any) -> str:
    """Return a part's markdown."""
    if part == "bytes":
        return f"{axes_bytes.in_words(found)}\n\n![Bytes over the formula](axes.png)"
    if part == "memory":
        return axes_memory.in_words(found)
    if part == "time":
        return axes_time.time_in_words(found["models"], found["turns"])
    return axes_time.search_in_words(found)


def checks_of(part: str, found: Any) -> list[Any]:
    """Return a part's targets."""
    if part == "bytes":
        return axes_bytes.make_checks(found)
    if part == "memory":
        return axes_memory.make_checks(found)
    if part == "time":
        return axes_time.time_checks(found["models"])
    return axes_time.search_checks(found)


def main() -> int:
    parser = argparse.ArgumentParser(description="Axes that split the work on one row.")
    parser.add_argument("--only", nargs="*", choices=PARTS, help="measure these again")
    parser.add_argument("--turns", type=int, default=15, help="timed steps on each mesh")
    parser.add_argument("--compiles", type=int, default=2, help="timed compilations of each")
    parser.add_argument("--measure", choices=PARTS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measure(asked.measure, asked)))
        return 0
    known = before()
    for part in PARTS if asked.only is None else asked.only:
        known[part] = measure_apart(part, asked)
    found = {part: known[part] for part in PARTS if part in known}
    RESULTS.mkdir(exist_ok=True)
    if "bytes" in found:
        draw(found["bytes"])
    body = "\n\n".join(f"## {PARTS[part]}\n\n{in_words(part, x)}" for part, x in found.items())
    checks = [check for part, x in found.items() for check in checks_of(part, x)]
    return report("axes", "Axes: tensor, context, expert", body, {"parts": found}, checks)


if __name__ == "__main__":
    sys.exit(main())
