"""Compare steps under a memory budget with jax's checkpoint policies: 8 models, 6 budgets.

`ZeroConfig(memory=...)` gives a step 1.0 to 0.25 of the temporaries that it takes without a budget.
For each budget: the compiler's temporaries, or the refusal; the FLOPs of the compiled program over
those without a budget (products and convolutions, and all), and whether loss and gradients are the
same bits. Beside them are the four policies of `jax.checkpoint_policies` that need no names, around
each block of the model, without a budget; and a budget of exactly what each policy takes, within
which the products' FLOPs must be at most the policy's. Last come the seconds in which an 80-layer
GPT that is written out is decided.

Two simulated devices; XLA's CPU scheduler is told to save memory. The models are narrow (width
128), so that they compile in seconds. Costs are weighed at the rates of the table's CPU, on which
the programs run. Backward gathers its leaves again, with a budget as with a policy.

    python benchmarks/memory_budgets.py [--models GPT ...] [--shares 0.5 ...] [--policies ...]

Exits with 1 if a target is missed; writes results/memory_budgets.json, .md and .png. A run with
`--models` replaces these models' figures only. All of it takes about 2 hours on 2 cores, most of it
compilation; with JAX_COMPILATION_CACHE_DIR, what was compiled before is not compiled again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from common import MEMORY_SCHEDULER, RESULTS, Check, report, start, table
from memory_budgets_measure import NUM_DEVICES, POLICIES, Measure, seconds_to_decide
from memory_budgets_models import CASES
from memory_budgets_picture import draw
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

FILE = RESULTS / "memory_budgets.json"
SHARES = (1.0, 0.8, 0.65, 0.5, 0.35, 0.25)
DECIDE = "80 layers"
MOST_SECONDS = 10.0
ROUNDING = 1.001


def measure_apart(name: str, options: argparse.Namespace, cache: str, say: Any) -> Any:
    """Return the figures of a model, or the seconds to decide, from a process of its own."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {MEMORY_SCHEDULER}".strip()
    shares = [str(share) for share in options.shares]
    command = [sys.executable, __file__, "--measure", name, "--shares", *shares]
    command += ["--policies", *options.policies]
    env = {"JAX_COMPILATION_CACHE_DIR": cache, **os.environ, "XLA_FLAGS": flags}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    run = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    last = ""
    for line in run.stdout:
        if last:
            say(last)
        last = line.strip()
    if run.wait():
        raise RuntimeError(f"measuring {name!r} ended with exit code {run.returncode}")
    return json.loads(last)


def measure(name: str, options: argparse.Namespace) -> Any:
    start(devices=NUM_DEVICES)
    if name == DECIDE:
        return seconds_to_decide(80)
    return Measure(name).all(options.shares, options.policies)


def label(row: dict[str, Any]) -> str:
    kinds = {"none": "no budget", "policy": "{policy}", "as policy": "budget of {policy}"}
    return kinds.get(row["kind"], "budget {share:.2f}").format(**row)


def cells(row: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    """Return a row's label, temporaries, their share, FLOPs, equality and number of tries."""
    if "temporaries" not in row:
        return [label(row), f"refused, smallest {row['smallest']}", *[""] * 5]
    error = "same bits" if row["same_bits"] else f"{row['error']:.1e}"
    return [
        label(row),
        f"{row['temporaries'] / 1e6:.1f} MB",
        f"{row['temporaries'] / whole['temporaries']:.3f}",
        f"{row['products'] / whole['products']:.4f}",
        f"{row['flops'] / whole['flops']:.4f}",
        error,
        str(len(row["tries"])) if "tries" in row else "",
    ]


HEADER = ("program", "temporaries", "share", "products' FLOPs", "all FLOPs", "error", "tries")


def make_checks(models: dict[str, list[dict[str, Any]]], decide: Any) -> list[Check]:
    checks = []
    for name, rows in models.items():
        found = [row for row in rows if "temporaries" in row]
        over = sum(not row["fits"] for row in found)
        checks.append(Check(name=f"{name}: programs over their budget", value=over, limit=0))
        error = max(row["error"] for row in found)
        checks.append(Check(name=f"{name}: relative error", value=error, limit=1e-6))
        by_policy = {row["policy"]: row for row in rows if row["kind"] == "policy"}
        worst, refused = 0.0, 0
        for row in rows:
            if row["kind"] == "as policy" and "temporaries" in row:
                worst = max(worst, row["products"] / by_policy[row["policy"]]["products"])
            elif row["kind"] == "as policy":
                refused += 1
        what = "FLOPs of products over a policy's within its memory, at most"
        checks.append(Check(name=f"{name}: {what}", value=worst, limit=ROUNDING))
        what = "policies whose memory is refused"
        checks.append(Check(name=f"{name}: {what}", value=refused, limit=0))
    if decide is not None:
        seconds = decide["cut_s"] + decide["choose_s"]
        name = f"seconds to decide, {decide['layers']} layers written out"
        checks.append(Check(name=name, value=seconds, limit=MOST_SECONDS, unit=" s"))
    return checks


def write(models: dict[str, list[dict[str, Any]]], decide: Any) -> int:
    """Print and write the result; return the exit status."""
    parts = []
    for name, rows in models.items():
        lines = [cells(row, rows[0]) for row in rows]
        shown = Table(*HEADER, title=name, title_justify="left")
        for line in lines:
            shown.add_row(*line)
        Console().print(shown)
        parts.append(f"## {name}\n\n{table(HEADER, lines)}")
    body = (
        "Temporaries of a device as the compiler plans them with "
        f"`{MEMORY_SCHEDULER}`, {NUM_DEVICES} simulated devices; FLOPs are counted in the compiled "
        "programs, loops as often as they run, over those without a budget. Loss and gradients are "
        "compared with those without a budget: the same bits, or the largest difference over the "
        "largest element of a gradient.\n\n![](memory_budgets.png)\n\n" + "\n\n".join(parts)
    )
    if decide is not None:
        body += (
            f"\n\nAn {decide['layers']}-layer GPT that is written out has {decide['segments']} "
            f"segments. In seconds of the CPU, tracing its step takes {decide['trace_s']:.1f}, "
            f"cutting and weighing its segments {decide['cut_s']:.1f}, and choosing what they keep "
            f"{decide['choose_s']:.1f}."
        )
    if models:
        draw(RESULTS / "memory_budgets.png", models)
    found = {"models": models, "decide": decide}
    title = "Steps within a budget of memory"
    return report("memory_budgets", title, body, found, make_checks(models, decide))


def main() -> int:
    parser = argparse.ArgumentParser(description="Steps within a budget of memory.")
    parser.add_argument("--models", nargs="*", default=[*CASES, DECIDE], help="parts of names")
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=[*POLICIES])
    parser.add_argument("--measure", help="measure this model, and print its figures only")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options)))
        return 0
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    models, decide = before.get("models", {}), before.get("decide")
    wanted = [n for n in [*CASES, DECIDE] if any(part in n for part in options.models)]
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with tempfile.TemporaryDirectory() as cache, Progress(*columns) as progress:
        task = progress.add_task("", total=None)
        for name in wanted:

            def say(text: str, name: str = name) -> None:
                progress.update(task, description=f"{name}: {text}")

            say("starts")
            found = measure_apart(name, options, cache, say)
            if name == DECIDE:
                decide = found
            else:
                models[name] = found
    return write({name: models[name] for name in CASES if name in models}, decide)


if __name__ == "__main__":
    sys.exit(main())
