"""The picture of memory_budgets.py: FLOPs over the share of temporaries, a line for each model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

COLORS = ("#2f6f9f", "#7fb2d6", "#b5562b", "#e0a070", "#4f8a4f", "#8a4f8a", "#b8962e", "#707070")
MARKS = {
    "nothing_saveable": "v",
    "dots_with_no_batch_dims_saveable": "s",
    "dots_saveable": "D",
    "everything_saveable": "*",
}


def draw(path: Path, models: dict[str, list[dict[str, Any]]]) -> None:
    """Write the picture.

    Args:
      path: the file.
      models: the rows of each model; the first is without a budget.
    """
    figure = Figure(figsize=(12, 3.2 * -(-len(models) // 4) + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(-(-len(models) // 4), min(4, len(models)), squeeze=False)
    for axes in grid.flat[len(models) :]:
        axes.set_axis_off()
    for axes, (name, rows), color in zip(grid.flat, models.items(), COLORS, strict=False):
        whole = rows[0]
        found = [row for row in rows if "temporaries" in row]
        points = {row["kind"]: [] for row in rows}
        for row in found:
            share = row["temporaries"] / whole["temporaries"]
            points[row["kind"]].append((share, row["products"] / whole["products"], row))
        ours = sorted(
            p[:2] for kind in ("none", "share", "as policy") for p in points.get(kind, [])
        )
        axes.plot(*zip(*ours, strict=True), color=color, marker="o", markersize=4)
        for share, flops, row in points.get("policy", []):
            mark = MARKS[row["policy"]]
            axes.plot(share, flops, mark, color="#c03030", markersize=7, fillstyle="none")
        refused = [row["share"] for row in rows if row["kind"] == "share" and row not in found]
        axes.plot(refused, [1.0] * len(refused), "x", color=color)
        axes.set_title(name, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(left=0)
        axes.set_ylim(0.97, max(1.35, *(y for _, y in ours)) + 0.02)
    for axes in grid[-1]:
        axes.set_xlabel("share of temporaries")
    for axes in grid[:, 0]:
        axes.set_ylabel("products' FLOPs, ratio")
    marks = [
        Line2D([], [], color="#606060", marker="o", markersize=4, label="memory=..."),
        Line2D([], [], color="#606060", marker="x", linestyle="", label="refused"),
        *(
            Line2D([], [], color="#c03030", marker=m, linestyle="", fillstyle="none", label=n)
            for n, m in MARKS.items()
        ),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
