"""Run the full equality matrix and write its table: `python tests/equality_table.py`.

Every case of the zoo on every mesh, plainly and with every knob turned, compiled as users compile.
Takes some 20 minutes on 2 cores. The numbers are the largest relative errors that
tests/equality.py measures; the bounds are 5e-6 (loss, gradients) and 1e-4 (leaves after 20 steps).
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "benchmarks" / "results" / "equality.md"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "rows.jsonl"
        lines.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup"]
        status = subprocess.run(
            [*command, "-m", "full", "tests/test_equality.py", *sys.argv[1:]],
            cwd=ROOT,
            env={**os.environ, "EQUALITY_RESULTS": str(lines)},
            check=False,
        ).returncode
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(table(rows))
    print(f"wrote {TABLE} ({len(rows)} rows)")
    return status


def table(rows: list[dict]) -> str:
    """Return the Markdown page of the measured rows."""
    import jax

    cells: dict[str, dict[tuple[int, int], list[dict]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        cells[row["case"]][tuple(row["mesh"])].append(row)
    meshes = sorted({mesh for case in cells.values() for mesh in case})
    names = [f"{nodes}x{devices}" for nodes, devices in meshes]
    page = [
        "# Equality with one device",
        "",
        f"Written by `python tests/equality_table.py` with JAX {jax.__version__}: {len(rows)} "
        "runs, each case on each mesh (nodes x devices) plainly and with every knob turned "
        "(persistence threshold 40, prefetch, kept leaves, shards alone, 2 micro-batches).",
        "",
        "A cell is the largest relative error of loss, gradients, gradient norm and metrics in the "
        "first step / of the leaves after 20 AdamW steps. The bounds are 5e-6 / 1e-4.",
        "",
        "| case | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for case, by_mesh in cells.items():
        found = [cell(by_mesh[mesh]) if mesh in by_mesh else "" for mesh in meshes]
        page.append(f"| {case} | " + " | ".join(found) + " |")
    return "\n".join(page) + "\n"


def cell(rows: list[dict]) -> str:
    """Return the largest errors of a case on a mesh."""
    first = max(max(r["loss"], r["gradient"][1], r["norm"], r["metrics"]) for r in rows)
    return f"{first:.0e} / {max(r['params'][1] for r in rows):.0e}"


if __name__ == "__main__":
    sys.exit(main())
