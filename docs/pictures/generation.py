"""Draw docs/pictures/generation.svg: a leaf's way from the training layout to a part, and back.

    python docs/pictures/generation.py [folder]

A leaf of 4 x 4 blocks on two nodes of two devices, tensor=2. The filled blocks are what a device
holds at that moment: at rest a quarter of the rows, to generate half of the columns.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
from make import DEVICE, FRAME, INK, LEAF, NODE, PALE
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

NODES, DEVICES, SIDE = 2, 2, 4
CELL, COLUMN, ROW, GAP = 0.16, 2.1, 0.86, 0.2
ROWS = [(node, device) for node in range(NODES) for device in range(DEVICES)]
ALL = range(SIDE)


def at_rest(node: int, device: int) -> set[tuple[int, int]]:
    row = device * NODES + node
    return {(row, column) for column in ALL}


def after_node_hop(node: int, device: int) -> set[tuple[int, int]]:
    return {(row, column) for row in ALL if row // NODES == device for column in ALL}


def part(node: int, device: int) -> set[tuple[int, int]]:
    return {(row, column) for row in ALL for column in ALL if column // DEVICES == device}


STAGES = [
    ("at rest:\na quarter of the rows", at_rest, NODE),
    ("after the\nhop over node", after_node_hop, DEVICE),
    ("exchanged over tensor:\nhalf of the columns", part, None),
    ("released", at_rest, None),
]


def y_of(row: int) -> float:
    return -(row * ROW + (row // DEVICES) * GAP)


def grid(axes: Axes, left: float, middle: float, held: set[tuple[int, int]]) -> None:
    for row in ALL:
        for column in ALL:
            axes.add_patch(
                Rectangle(
                    (left + column * CELL, middle + (SIDE / 2 - 1 - row) * CELL),
                    CELL,
                    CELL,
                    facecolor=LEAF if (row, column) in held else PALE,
                    edgecolor="white" if (row, column) in held else FRAME,
                    linewidth=0.8,
                )
            )


def draw(axes: Axes) -> None:
    width = SIDE * CELL
    for node in range(NODES):
        top, bottom = y_of(node * DEVICES), y_of(node * DEVICES + DEVICES - 1)
        frame = FancyBboxPatch(
            (-1.72, bottom - 0.38),
            1.72 + (len(STAGES) - 1) * COLUMN + width + 0.1,
            top - bottom + 0.76,
            boxstyle="round,pad=0.02,rounding_size=0.07",
            facecolor="none",
            edgecolor=FRAME,
        )
        axes.add_patch(frame)
        axes.text(-1.64, (top + bottom) / 2, f"node {node}", va="center", weight="bold", color=INK)
    for row, (_, device) in enumerate(ROWS):
        axes.text(-0.9, y_of(row), f"device {device}", va="center", color=INK)
    for column, (title, holds, color) in enumerate(STAGES):
        left = column * COLUMN
        axes.text(left + width / 2, 0.5, title, ha="center", va="bottom", color=INK, fontsize=8.5)
        for row, (node, device) in enumerate(ROWS):
            grid(axes, left, y_of(row), holds(node, device))
            for other, (node_b, device_b) in enumerate(ROWS):
                joined = device == device_b if color == NODE else node == node_b
                if color is not None and other != row and joined:
                    axes.annotate(
                        "",
                        (left + COLUMN - 0.06, y_of(other)),
                        (left + width + 0.06, y_of(row)),
                        arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.5},
                    )
            if title.startswith("exchanged"):
                axes.text(
                    left + width + 0.7,
                    y_of(row),
                    "draw\ntokens",
                    ha="center",
                    va="center",
                    color=INK,
                    fontsize=8.5,
                )
    axes.set(xlim=(-1.9, (len(STAGES) - 1) * COLUMN + width + 0.3), ylim=(y_of(3) - 0.5, 1.0))
    axes.set_aspect("equal")
    axes.axis("off")


def main(folder: Path) -> None:
    matplotlib.rcParams["svg.hashsalt"] = "zeroxla"
    matplotlib.rcParams["font.size"] = 9
    figure = Figure(figsize=(9.2, 5.0), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    draw(figure.subplots())
    figure.savefig(folder / "generation.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent)
