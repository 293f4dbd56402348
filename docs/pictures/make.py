"""Draw docs/pictures/zero3.svg and zero3.png: one unit's way through a step, and a step's units.

    python docs/pictures/make.py [folder]

Above, one unit on two nodes of two devices: the strip of four pieces beside each device is the
unit, the filled pieces are what that device holds at that moment. Below, three units over a step.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

# Okabe and Ito's colours, the same meanings as in zeroxla.inspect: blue inside a node, orange
# between nodes.
DEVICE, NODE = "#0072B2", "#E69F00"
LEAF, GRADIENT = "#009E73", "#CC79A7"
INK, PALE, FRAME = "#333333", "#F3F3F3", "#BDBDBD"

NODES, DEVICES = 2, 2
PIECES = NODES * DEVICES
# Rows of the picture: (node, device), the top one first.
ROWS = [(node, device) for node in range(NODES) for device in range(DEVICES)]

PIECE = 0.19  # width of a piece; a strip is PIECES of them
STRIP = PIECE * PIECES
STEP = 1.42  # from a column to the next
ROW = 0.50
NODE_GAP = 0.32


def main(folder: Path) -> None:
    matplotlib.rcParams["svg.hashsalt"] = "zeroxla"
    matplotlib.rcParams["font.size"] = 9
    figure = Figure(figsize=(12.6, 6.1), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=[3.7, 1.7])
    one_unit(above)
    one_step(below)
    figure.savefig(folder / "zero3.svg", metadata={"Date": None})
    figure.savefig(folder / "zero3.png", dpi=130)


# ------------------------------------------------------------------ above: one unit


def row_y(row: int) -> float:
    return -(row * ROW + (row // DEVICES) * NODE_GAP)


def piece_of(row: int) -> int:
    """The piece that a device stores: device-major, so that each hop joins neighbours."""
    node, device = ROWS[row]
    return device * NODES + node


def after_node_hop(row: int) -> list[int]:
    first = ROWS[row][1] * NODES
    return list(range(first, first + NODES))


def strip(
    axes: Axes, column: int, row: int, held: list[int], color: str, *, partial: bool = False
) -> None:
    """Draw the unit with the pieces in `held` filled; hatched where the sum is not complete."""
    left, bottom = column * STEP, row_y(row) - PIECE / 2
    for piece in range(PIECES):
        filled = piece in held
        axes.add_patch(
            Rectangle(
                (left + piece * PIECE, bottom),
                PIECE,
                PIECE,
                facecolor="white" if filled and partial else color if filled else PALE,
                edgecolor=("white" if not partial else color) if filled else FRAME,
                hatch="//////" if filled and partial else None,
                linewidth=0.9,
            )
        )


def hop(axes: Axes, column: int, axis: str) -> None:
    """Draw who sends to whom from one column to the next."""
    color = NODE if axis == "node" else DEVICE
    for a, (node_a, device_a) in enumerate(ROWS):
        for b, (node_b, device_b) in enumerate(ROWS):
            same_line = device_a == device_b if axis == "node" else node_a == node_b
            if a != b and same_line:
                axes.annotate(
                    "",
                    ((column + 1) * STEP - 0.04, row_y(b)),
                    (column * STEP + STRIP + 0.04, row_y(a)),
                    arrowprops={
                        "arrowstyle": "-|>",
                        "color": color,
                        "linewidth": 1.5,
                        "mutation_scale": 9,
                        "shrinkA": 0,
                        "shrinkB": 0,
                    },
                )


def one_unit(axes: Axes) -> None:
    whole = list(range(PIECES))
    columns = [
        ("at rest", lambda row: ([piece_of(row)], LEAF, False)),
        ("after the\nhop over node", lambda row: (after_node_hop(row), LEAF, False)),
        ("gathered:\ncompute", lambda row: (whole, LEAF, False)),
        ("released", lambda row: ([piece_of(row)], LEAF, False)),
        ("after the\nhop over node", lambda row: (after_node_hop(row), LEAF, False)),
        ("gathered again:\ncompute", lambda row: (whole, LEAF, False)),
        ("its rows'\ngradient", lambda row: (whole, GRADIENT, True)),
        ("summed in\nthe node", lambda row: (after_node_hop(row), GRADIENT, True)),
        ("summed:\nto the optimizer", lambda row: ([piece_of(row)], GRADIENT, False)),
    ]
    for node in range(NODES):
        top, bottom = row_y(node * DEVICES), row_y(node * DEVICES + DEVICES - 1)
        axes.add_patch(
            FancyBboxPatch(
                (-1.72, bottom - 0.2),
                1.72 + (len(columns) - 1) * STEP + STRIP + 0.12,
                top - bottom + 0.4,
                boxstyle="round,pad=0.02,rounding_size=0.07",
                facecolor="none",
                edgecolor=FRAME,
                linewidth=1.0,
            )
        )
        axes.text(-1.64, (top + bottom) / 2, f"node {node}", va="center", weight="bold", color=INK)
    for row, (_, device) in enumerate(ROWS):
        axes.text(-0.9, row_y(row), f"device {device}", va="center", color=INK)
    for column, (title, content) in enumerate(columns):
        middle = column * STEP + STRIP / 2
        axes.text(middle, 0.30, title, ha="center", va="bottom", color=INK, fontsize=8.5)
        for row in range(len(ROWS)):
            held, color, partial = content(row)
            strip(axes, column, row, held, color, partial=partial)
    gathers = ((0, "node"), (1, "device"), (3, "node"), (4, "device"))
    reductions = ((6, "device"), (7, "node"))
    for column, axis in gathers + reductions:
        hop(axes, column, axis)
    for column in (2, 5):
        for row in range(len(ROWS)):
            axes.annotate(
                "",
                ((column + 1) * STEP - 0.06, row_y(row)),
                (column * STEP + STRIP + 0.06, row_y(row)),
                arrowprops={"arrowstyle": "-|>", "color": FRAME, "linewidth": 1.0},
            )
    for first, last, words in (
        (0, 3, "forward: gather, compute, release"),
        (3, 8, "backward: gather again, compute, reduce"),
    ):
        left = first * STEP + (STRIP + 0.22 if first else STRIP / 2)
        right = last * STEP + (STRIP + 0.06 if last == 3 else STRIP)
        axes.plot([left, right], [0.93, 0.93], color=INK, linewidth=1.2, solid_capstyle="butt")
        axes.text((left + right) / 2, 0.99, words, ha="center", va="bottom", weight="bold")
    axes.set_title("One unit (a few layers) on two nodes of two devices", loc="left", weight="bold")
    legend(axes)
    axes.set_xlim(-1.8, (len(columns) - 1) * STEP + STRIP + 0.2)
    axes.set_ylim(row_y(len(ROWS) - 1) - 0.75, 1.25)
    axes.set_aspect("equal")
    axes.axis("off")


def piece(
    axes: Axes, x: float, y: float, side: float, color: str, *, hatched: bool = False
) -> None:
    """Draw a square as legends show a piece, its left edge at x and its centre at height y."""
    square = Rectangle(
        (x, y - side / 2),
        side,
        side,
        facecolor="white" if hatched else color,
        edgecolor=color,
        hatch="//////" if hatched else None,
        linewidth=0.9,
    )
    axes.add_patch(square)


def legend(axes: Axes) -> None:
    y = row_y(len(ROWS) - 1) - 0.52
    x = -1.64
    for words, color, kind, width in (
        ("parameters", LEAF, "solid", 1.55),
        ("gradient, not yet summed over all devices", GRADIENT, "hatched", 3.75),
        ("gradient, summed", GRADIENT, "solid", 1.95),
        ("hop over node: between hosts, slow", NODE, "arrow", 3.5),
        ("hop over device: inside a host, fast", DEVICE, "arrow", 2),
    ):
        if kind == "arrow":
            axes.annotate(
                "",
                (x + 0.34, y),
                (x - 0.04, y),
                arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.5},
            )
        else:
            piece(axes, x + 0.08, y, PIECE, color, hatched=kind == "hatched")
        axes.text(x + 0.42, y, words, va="center", fontsize=8.5, color=INK)
        x += width


# ------------------------------------------------------------------ below: one step


def one_step(axes: Axes) -> None:
    """Three units over a step: gathered one at a time, forward and in reverse."""
    units = 3
    end = 2 * units
    for unit in range(units):
        forward, backward = unit, end - 1 - unit
        y = -unit
        axes.plot([-0.9, end + 1.45], [y, y], color=LEAF, linewidth=1.6, zorder=1)
        axes.plot(
            [forward + 0.88, backward + 0.12],
            [y + 0.30, y + 0.30],
            color="#8C8C8C",
            linewidth=2.2,
            zorder=1,
        )
        axes.plot([backward + 0.9, end + 0.55], [y - 0.22] * 2, color=GRADIENT, linewidth=1.6)
        for start, words in ((forward, "forward"), (backward, "backward")):
            axes.add_patch(
                Rectangle((start + 0.08, y - 0.36), 0.84, 0.74, facecolor=LEAF, edgecolor="none")
            )
            axes.text(start + 0.5, y, words, ha="center", va="center", color="white", weight="bold")
        axes.text(-1.0, y, f"unit {unit}", ha="right", va="center", color=INK)
    axes.add_patch(
        Rectangle((end + 0.55, -units + 0.55), 0.62, units - 0.1, facecolor=INK, edgecolor="none")
    )
    axes.text(
        end + 0.86,
        -(units - 1) / 2,
        "optimizer",
        color="white",
        ha="center",
        va="center",
        weight="bold",
        rotation=90,
    )
    x = end + 1.9
    lines = (
        ("gathered whole: one unit at a time", LEAF, 7),
        ("parameters: each device's own piece", LEAF, 1.6),
        ("activations kept for backward", "#8C8C8C", 2.2),
        ("gradient: each device's own piece", GRADIENT, 1.6),
    )
    for i, (words, color, width) in enumerate(lines):
        y = 0.2 - 0.78 * i
        axes.plot([x, x + 0.28], [y, y], color=color, linewidth=width, solid_capstyle="butt")
        axes.text(x + 0.38, y, words, va="center", fontsize=8.5, color=INK)
    axes.set_title(
        "A step of three units: memory of one device over time", loc="left", weight="bold"
    )
    axes.set_xlim(-1.75, end + 4.6)
    axes.set_ylim(-units + 0.4, 0.62)
    axes.axis("off")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
