"""The tables and the picture of kernels.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from common import RESULTS, table
from kernel_cases import KERNELS, MIB

COPY = "copy"
# Okabe and Ito's colours.
COLOURS = dict(
    zip(KERNELS, ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"), strict=True)
)
STYLES = {"mosaic": "-", "triton": "--", "xla": ":"}
Row = dict[str, Any]


def pivot(rows: list[Row], sizes: list[int], cell: Callable[[Row], str]) -> str:
    """Return a table with a line for each kernel, width, dtype and backend, a column for each
    size."""
    lines: dict[tuple, dict[int, str]] = {}
    for row in rows:
        key = (row["kernel"], row["bits"], row["dtype"] or "wires", row["backend"])
        lines.setdefault(key, {})[row["size"]] = "-" if "error" in row else cell(row)
    header = ["kernel", "bits", "dtype", "by", *(f"{size // MIB} MiB" for size in sizes)]
    return table(header, [[*key, *(line.get(s, "") for s in sizes)] for key, line in lines.items()])


def draw(rows: list[Row], sizes: list[int], file: str) -> None:
    """Draw GB/s against size: a panel for each width and dtype."""
    # gpu.py takes the tables in environments without matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, bits, dtype in zip(
        panels.flat, (8, 8, 4, 4), ("float32", "bfloat16") * 2, strict=True
    ):
        shown = [r for r in rows if r["bits"] == bits and r["dtype"] in (dtype, "")]
        shown = [r for r in shown if "error" not in r]
        for kernel in KERNELS:
            for backend, style in STYLES.items():
                points = [
                    (row["size"] / MIB, row["gb_per_s"])
                    for row in shown
                    if (row["kernel"], row["backend"]) == (kernel, backend)
                ]
                if points:
                    axes.plot(
                        *zip(*points),
                        style,
                        marker=".",
                        color=COLOURS[kernel],
                        label=f"{kernel} ({backend})",
                    )
        copies = [
            statistics.median(
                r["gb_per_s"] for r in shown if r["backend"] == COPY and r["size"] == size
            )
            for size in sizes
        ]
        axes.plot([s / MIB for s in sizes], copies, color="black", linewidth=2, label="copy")
        axes.set_xscale("log", base=2)
        axes.set_xticks([s / MIB for s in sizes], [str(s // MIB) for s in sizes])
        axes.set_title(f"{bits} bits, {dtype}", loc="left", fontsize=10)
        axes.grid(alpha=0.3)
    for axes in panels[1]:
        axes.set_xlabel("size, MiB")
    for axes in panels[:, 0]:
        axes.set_ylabel("GB/s, read and written")
    panels[0, 0].set_ylim(bottom=0)
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), loc="outside right upper", frameon=False
    )
    RESULTS.mkdir(exist_ok=True)
    canvas.print_png(RESULTS / file)
