"""Equality with one device: every case of tests/tools/zoo on every mesh, plain and with all knobs
turned.

The runs are those of `pytest -m full tests/step/test_equality.py`, compiled as users compile. Each
compares loss and gradients of the first step, and the leaves after 20 AdamW steps, with the
unsharded model. tests/tools/equality.py measures the errors.

    python benchmarks/equality_matrix.py [pytest arguments, such as -k gpt]

Exits with 1 if a bound is exceeded or a run fails; writes results/equality_matrix.json and
results/equality_matrix.md. Takes some two hours on 2 cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import Check, report, table

ROOT = Path(__file__).resolve().parent.parent
GRADIENT_BOUND, STEPS_BOUND = 5e-6, 1e-4


def run(arguments: list[str]) -> tuple[list[dict[str, Any]], int]:
    """Return the measured rows, and 1 if a test failed, else 0."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "rows.jsonl"
        lines.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2"]
        status = subprocess.run(
            [*command, "-m", "full", "tests/step/test_equality.py", *arguments],
            cwd=ROOT,
            env={**os.environ, "EQUALITY_RESULTS": str(lines)},
            check=False,
        ).returncode
        return [json.loads(line) for line in lines.read_text().splitlines()], int(status != 0)


def first_step(row: dict[str, Any]) -> float:
    """Return the largest error of a row's first step."""
    return max(row["loss"], row["gradient"][1], row["norm"], row["metrics"])


def after_steps(row: dict[str, Any]) -> float:
    """Return the largest error of a row's leaves and model state after all steps."""
    return max(row["params"][1], row["model_state"][1])


def main() -> int:
    rows, failed = run(sys.argv[1:])
    cells: dict[str, dict[tuple[int, int], list[dict]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        cells[row["case"]][tuple(row["mesh"])].append(row)
    meshes = sorted({tuple(row["mesh"]) for row in rows})
    lines = [
        [case, *(cell(by_mesh[mesh]) if mesh in by_mesh else "" for mesh in meshes)]
        for case, by_mesh in sorted(cells.items())
    ]
    body = (
        f"{len(rows)} runs: each case of `tests/tools/zoo` on each mesh (nodes x devices), plainly "
        "and with every knob turned (persistence threshold 40, prefetch, kept leaves, shards "
        "alone, 2 micro-batches). A cell is the largest relative error of loss, gradients, "
        "gradient norm and metrics in the first step / of leaves and model state after 20 AdamW "
        "steps.\n\n" + table(["case", *(f"{nodes}x{devices}" for nodes, devices in meshes)], lines)
    )
    checks = [
        Check(name="a run failed (1: yes)", value=failed, limit=0),
        Check(name="error, first step", value=max(map(first_step, rows)), limit=GRADIENT_BOUND),
        Check(name="error, 20 steps", value=max(map(after_steps, rows)), limit=STEPS_BOUND),
    ]
    return report("equality_matrix", "Equality with one device", body, {"rows": rows}, checks)


def cell(rows: list[dict[str, Any]]) -> str:
    """Return the largest errors of a case on a mesh."""
    return f"{max(map(first_step, rows)):.0e} / {max(map(after_steps, rows)):.0e}"


if __name__ == "__main__":
    sys.exit(main())
