"""What the wires do to a model: the final loss of each preset, and of each of its parts.

    python benchmarks/quality.py [--steps 1000] [--work FOLDER] [--only NAME ...]

Trains a GPT of 0.83 million parameters on the Python files of the running interpreter's standard
library, on 8 simulated devices, once for each variant and seed: the same initial weights, the same
batches. 46 trainings of 1000 steps take about two hours on 2 cores; what is finished lies in
FOLDER (default runs/quality), and a run that was stopped goes on where it was. FOLDER knows nothing
of the code that trained: after a change of the wires take a new one.
Exits with 1 if a target is missed; writes results/quality.json, .md and .png.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from common import NUM_DEVICES, RESULTS, Check, report, start, table
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from quality_training import BATCH, EVAL_BATCH, LENGTH, NUM_FINAL_BATCHES, Setup, Trainer, train_all
from quality_variants import VARIANTS, Variant

from zeroxla.cli.data.text import load_corpus

Results = dict[str, list[dict[str, Any]]]  # by variant, one for each seed


def main() -> int:
    """Train what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--work", type=Path, default=Path("runs/quality"))
    parser.add_argument("--only", nargs="*", help="train only these variants, and report nothing")
    arguments = parser.parse_args()
    start(threads=NUM_DEVICES)  # the same bits as with more, sooner
    arguments.work.mkdir(parents=True, exist_ok=True)
    setup = Setup(load_corpus(), arguments.steps, arguments.work)
    chosen = [v for v in VARIANTS if arguments.only is None or v.name in arguments.only]
    results = train(setup, chosen)
    if arguments.only is not None:
        return 0
    return write_report(setup, results)


def train(setup: Setup, variants: list[Variant]) -> Results:
    """Train every variant from every seed of its own: seed by seed, so that pairs come first."""
    trainers = {v.name: Trainer(setup, v) for v in variants}
    most = max(v.seeds for v in variants)
    jobs = [(v, seed) for seed in range(most) for v in variants if seed < v.seeds]
    return train_all(jobs, trainers, setup.steps, loss_of=lambda result: result["loss"])


def differences(results: Results, name: str) -> list[float]:
    """Return the relative differences of a variant's losses to zero3's, seed by seed."""
    pairs = zip(results[name], results["zero3"], strict=False)
    return [mine["loss"] / base["loss"] - 1 for mine, base in pairs]


def standard_error(found: list[float]) -> float | None:
    """Return the standard error of the mean of these differences, None of a single one."""
    return statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else None


def write_report(setup: Setup, results: Results) -> int:
    """Write tables and picture; return the exit code."""
    # Of the same sums in another order: what a difference may be without any wire being at fault.
    null = differences(results, "null")
    spread = max(null) - min(null) if len(null) > 1 else abs(null[0])
    rows, checks = [], []
    for variant in VARIANTS:
        found = differences(results, variant.name)
        mean, error = statistics.mean(found), standard_error(found)
        losses = [r["loss"] for r in results[variant.name]]
        errors = [r["gradient"] for r in results[variant.name]]
        rows.append(
            (
                variant.name,
                variant.says,
                len(losses),
                f"{statistics.mean(losses):.4f}",
                ", ".join(f"{100 * d:+.2f}" for d in found),
                f"{100 * mean:+.3f}",
                "" if error is None else f"{100 * error:.3f}",
                f"{statistics.mean(e['cosine'] for e in errors):.6f}",
                f"{100 * statistics.mean(e['relative_l2'] for e in errors):.3g}",
            )
        )
        if variant.bar is not None:
            name = f"loss of {variant.name} above zero3's, mean of {len(losses)} seeds"
            limit = 100 * (variant.bar + spread)
            checks.append(Check(name=name, value=100 * mean, limit=limit, unit=" %"))
    draw(results)
    several = [differences(results, v.name) for v in VARIANTS if v.seeds > 1]
    scatter = max(max(found) - min(found) for found in several)
    tokens = NUM_FINAL_BATCHES * EVAL_BATCH * LENGTH
    header = ("variant", "what it is", "seeds", "final loss", "above zero3's, %, each seed")
    body = (
        f"A GPT of 4 layers and width 128 over bytes ({setup.corpus.source}), {setup.steps} steps "
        f"of {BATCH} x {LENGTH} tokens, 8 simulated devices as 2 nodes of 4, float32 computation; "
        f"the loss is the mean over {tokens:,} held-out tokens with exact weights, in nats. The "
        "variants share initial weights and batches, seed by seed. `null` is zero3 again, its sums "
        f"in another order: its differences spread over {100 * spread:.3f} %, which is added to "
        "each bar. That is bare float32 rounding; any coarser rounding sends training down another "
        f"path, and the difference of one variant varies by up to {100 * scatter:.1f} % between "
        "seeds. A row of a single seed says no more than that.\n\n"
        "![losses during training](quality.png)\n\n"
        "The last two columns compare one gradient, where the training ended, with that of exact "
        "wires: its cosine, and the norm of the difference in percent of its own.\n\n"
        + table((*header, "mean", "standard error", "cosine", "off by, %"), rows)
    )
    figures = {"steps": setup.steps, "spread": spread, "results": results}
    return report("quality", "Quality of the wires", body, figures, checks)


def draw(results: Results) -> None:
    """Draw the loss of each preset above zero3's during training, as the mean over seeds."""
    figure = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    for variant in VARIANTS:
        curves = [dict(map(tuple, r["curve"])) for r in results[variant.name]]
        bases = [dict(map(tuple, r["curve"])) for r in results["zero3"]]
        steps = sorted(curves[0])
        losses = [statistics.mean(c[s] for c in curves) for s in steps]
        pairs = list(zip(curves, bases, strict=False))
        excess = [100 * statistics.mean(c[s] / b[s] - 1 for c, b in pairs) for s in steps]
        style = {"linewidth": 2 if variant.seeds > 1 else 1, "label": variant.name}
        style["linestyle"] = "-" if variant.seeds > 1 else ":"
        above.plot(steps, losses, **style)
        below.plot(steps, excess, **style)
    above.set_ylabel("held-out loss, nats")
    below.set_ylabel("above zero3's, %")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    handles, labels = below.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=5, frameon=False)
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "quality.png", dpi=120)


if __name__ == "__main__":
    sys.exit(main())
