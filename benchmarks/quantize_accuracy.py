"""What quantization does to values: the three scale rules of a wire format, and the plain one.

Random numbers of six kinds, and the weights and gradients of the main job's GPT, through a round
trip at 8 and 4 bits in blocks of 64, 256 and 2048. The rule "mse" computes a step without a search;
a dense search over steps says how much that leaves to gain.

    python benchmarks/quantize_accuracy.py [--run FOLDER] [--steps 300]

FOLDER is a finished run of `zeroxla train`; without it one is trained first, with the default
options, which takes about 4 minutes on 2 cores. The rest takes about 2 minutes. Exits with 1 if a
target is missed; writes results/quantize_accuracy.json, .md and .png.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, Check, report, table
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from quantize_data import (
    DISTRIBUTIONS,
    LARGEST_BLOCK,
    OUTLIER,
    Trained,
    random_numbers,
    read_run,
    train_run,
)
from quantize_measures import DENSE_FACTORS, compare, search
from rich.progress import Progress

BLOCKS = (64, 256, 2048)
MIDDLE = 256  # the block of the picture and of asymmetric formats
SHIFTED = "normal + 4"  # in asymmetric formats only
REAL = ("weights", "gradients")
SIZE = 1 << 20
SEARCHED = 1 << 18
# Okabe and Ito's colours.
COLOURS = {
    "plain": "#999999",
    "bound": "#0072B2",
    "deepspeed": "#E69F00",
    "mse": "#009E73",
    "bound, rotated": "#56B4E9",
    "mse, rotated": "#CC79A7",
}
BY_BLOCK = ["blocks better by mse than by deepspeed", "worse"]  # headings
Row = dict[str, Any]


def numbers(name: str, block: int, trained: Trained) -> np.ndarray:
    """Return float32[T, block] of one kind."""
    if name == SHIFTED:
        x_N = random_numbers("normal", size=SIZE, block=block) + np.float32(4)
    elif name in REAL:
        x_N = trained.weights_N if name == "weights" else trained.gradients_N
    else:
        x_N = random_numbers(name, size=SIZE, block=block)
    return x_N.reshape(-1, block)


def sample(x_TB: np.ndarray) -> np.ndarray:
    """Return SEARCHED of the elements: runs of LARGEST_BLOCK at equal distances."""
    runs = x_TB.reshape(-1, LARGEST_BLOCK)
    places = np.linspace(0, len(runs) - 1, SEARCHED // LARGEST_BLOCK).astype(np.int64)
    return runs[places].reshape(-1, x_TB.shape[1])


def measure_all(trained: Trained) -> list[Row]:
    """Return a row for each kind of numbers, width, block and symmetry."""
    cases = [
        (name, bits, block, symmetric)
        for bits in (8, 4)
        for symmetric, blocks in ((True, BLOCKS), (False, (MIDDLE,)))
        for name in [*DISTRIBUTIONS, *REAL, *([] if symmetric else [SHIFTED])]
        for block in blocks
    ]
    rows = []
    with Progress() as progress:
        task = progress.add_task("round trips", total=len(cases))
        for name, bits, block, symmetric in cases:
            x_TB = numbers(name, block, trained)
            row = {"data": name, "bits": bits, "block": block, "symmetric": symmetric}
            row |= compare(x_TB, bits, symmetric=symmetric)
            if symmetric:
                row["search"] = search(sample(x_TB), bits)
            rows.append(row)
            progress.advance(task)
    return rows


def rules_of(bits: int) -> list[str]:
    """Return the rules that a width is measured with."""
    return [rule for rule in COLOURS if bits == 4 or "rotated" not in rule]


def symmetric_table(rows: list[Row], bits: int, measure: str, digits: int) -> str:
    """Return the table of one measure at one width; that of RMS errors also compares blocks."""
    compares = measure == "rms"
    header = ["data", "block", *rules_of(bits), *(BY_BLOCK if compares else [])]
    lines = []
    for row in rows:
        if row["bits"] == bits and row["symmetric"]:
            values = [row["measures"][rule][measure] for rule in rules_of(bits)]
            # No zero shows a sign.
            cells = [f"{round(value, digits) + 0.0:.{digits}f}" for value in values]
            cells += by_block(row) if compares else []
            lines.append([row["data"], row["block"], *cells])
    return table(header, lines)


def by_block(row: Row) -> list[str]:
    """Return the cells below BY_BLOCK."""
    return [f"{100 * row[name]:.1f} %" for name in ("better", "worse")]


def asymmetric_table(rows: list[Row]) -> str:
    """Return the table of asymmetric formats."""
    rules = ("bound", "deepspeed", "mse")
    lines = []
    for row in rows:
        if not row["symmetric"]:
            cells = [f"{row['measures'][rule]['rms']:.3f}" for rule in rules]
            lines.append([row["data"], row["bits"], *cells, *by_block(row)])
    return table(["data", "bits", *rules, *BY_BLOCK], lines)


def search_table(rows: list[Row]) -> str:
    """Return the table of the dense search."""
    lines = []
    for row in rows:
        if row["symmetric"] and row["data"] != "constant":
            found = row["search"]
            cells = [f"{found[name]:.3f}" for name in ("deepspeed", "mse", "dense")]
            left = f"{100 - 100 * found['dense'] / found['mse']:.2f} %"
            lines.append([row["data"], row["bits"], row["block"], *cells, left])
    header = ["data", "bits", "block", "deepspeed", "mse", "dense search", "left to gain"]
    return table(header, lines)


def draw(rows: list[Row]) -> None:
    """Draw results/quantize_accuracy.png: RMS errors, a panel for each width."""
    figure = Figure(figsize=(11, 7), layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)
    for axes, bits in zip(figure.subplots(2, 1), (8, 4), strict=True):
        wanted = (bits, MIDDLE, True)
        shown = [row for row in rows if (row["bits"], row["block"], row["symmetric"]) == wanted]
        rules = rules_of(bits)
        width = 0.86 / len(rules)
        for i, rule in enumerate(rules):
            places = np.arange(len(shown)) + (i - (len(rules) - 1) / 2) * width
            heights = [row["measures"][rule]["rms"] for row in shown]
            bars = axes.bar(places, heights, 0.92 * width, label=rule, color=COLOURS[rule])
            axes.bar_label(bars, fmt="%.2f" if bits == 8 else "%.1f", fontsize=6.5, padding=1)
        axes.set_xticks(range(len(shown)), [row["data"] for row in shown])
        axes.set_ylabel("RMS relative error, percent")
        axes.set_title(f"{bits} bits, blocks of {MIDDLE}", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.margins(x=0.01)
        axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
        axes.legend(ncols=len(rules), frameon=False, loc="upper left")
    RESULTS.mkdir(exist_ok=True)
    canvas.print_png(RESULTS / "quantize_accuracy.png")


def make_checks(rows: list[Row]) -> list[Check]:
    """Hold the rules' promises against the rows."""
    # Constants in asymmetric formats have no error by any rule.
    uneven = [row for row in rows if row["symmetric"] or row["data"] != "constant"]
    real = [row for row in rows if row["data"] in REAL and row["symmetric"]]

    def worst(among: list[Row], bits: int, ours: str, others: tuple[str, ...]) -> float:
        return max(
            row["measures"][ours]["rms"] / min(row["measures"][rule]["rms"] for rule in others)
            for row in among
            if row["bits"] == bits
        )

    return [
        *(
            Check(
                name=f"all numbers and blocks, symmetric and asymmetric, {bits} bits: RMS error of "
                "mse over deepspeed's",
                value=worst(uneven, bits, "mse", ("deepspeed",)),
                limit=1,
            )
            for bits in (8, 4)
        ),
        Check(
            name="weights and gradients, 4 bits: RMS error of mse over the best other rule's",
            value=worst(real, 4, "mse", ("plain", "bound", "deepspeed")),
            limit=1,
        ),
        Check(
            name="weights and gradients, 8 bits: RMS error of bound over deepspeed's",
            value=worst(real, 8, "bound", ("deepspeed",)),
            limit=1.01,
        ),
    ]


def body_of(rows: list[Row], trained: Trained) -> str:
    """Return what was measured, in markdown."""
    parts = [
        f"{SIZE:,} random numbers of each kind: normal; Laplace; Student's t with 3 degrees of "
        f"freedom; uniform in [-1, 1); normal with one element of each block at {OUTLIER:g} or "
        f"{-OUTLIER:g}; and blocks of one positive constant. Weights are those of the main job's "
        f"GPT after {trained.steps} steps, gradients those of the batch after (loss "
        f"{trained.loss:.3f}): the leaves of at least {LARGEST_BLOCK} elements, "
        f"{trained.weights_N.size:,} numbers, {100 * trained.share:.1f} % of all. Each is float32, "
        "quantized and dequantized. plain: step = absmax / (2^(bits-1) - 1), in NumPy. rotated: "
        "with hadamard=32. Steps are as by default: bfloat16 for bound and mse in blocks of 64, "
        "else float32.",
        "![RMS relative error](quantize_accuracy.png)",
    ]
    for bits, digits in ((8, 3), (4, 2)):
        parts += [
            f"## {bits} bits",
            "RMS relative error, ||y - x|| / ||x||, percent:",
            symmetric_table(rows, bits, "rms", digits),
            "Bias of the positive peak, mean of (y - x) / x, percent, over the blocks whose "
            "element of largest magnitude is positive:",
            symmetric_table(rows, bits, "peak_bias", digits),
            "Drift, the mean of y - x over the mean of |x|, percent:",
            symmetric_table(rows, bits, "drift", 3),
            "Cosine similarity of x and y:",
            symmetric_table(rows, bits, "cosine", digits + 3),
        ]
    searched = ", ".join(
        f"{len(f)} from {f[0]:.2f} to {f[-1]:.2f} at {bits} bits"
        for bits, f in DENSE_FACTORS.items()
    )
    parts += [
        "## Asymmetric",
        f"RMS relative error, percent, blocks of {MIDDLE}. {SHIFTED} is far from zero, what an "
        "offset is for.",
        asymmetric_table(rows),
        "## A dense search",
        f"RMS relative error in percent, on {SEARCHED:,} of the numbers, with float32 steps. In "
        "the dense search each block takes the best of many steps. They are peak / (2^(bits-1) x "
        f"factor) of either sign, with these factors: {searched}. Left to gain: by how much the "
        "search lowers the error of mse.",
        search_table(rows),
    ]
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Errors of quantization, by scale rule.")
    parser.add_argument("--run", type=Path, help="a finished run of `zeroxla train`")
    parser.add_argument("--steps", type=int, default=300, help="of the run that is trained if not")
    options = parser.parse_args()
    if options.run is not None:
        trained = read_run(options.run)
    else:
        with tempfile.TemporaryDirectory() as folder:
            train_run(Path(folder), steps=options.steps)
            trained = read_run(Path(folder))
    rows = measure_all(trained)
    draw(rows)
    figures = {"run": {"steps": trained.steps, "loss": trained.loss}, "rows": rows}
    title = "Accuracy of quantization"
    return report("quantize_accuracy", title, body_of(rows, trained), figures, make_checks(rows))


if __name__ == "__main__":
    sys.exit(main())
