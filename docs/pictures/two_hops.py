"""Draw docs/pictures/two_hops.svg and two_hops.png: a leaf's way in ZeRO++, hop by hop.

    python docs/pictures/two_hops.py [folder]

The strip of eight pieces beside each device is one leaf in the order of its shards; the filled
pieces are what that device holds at that moment. Colours and strips are those of make.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
from make import DEVICE, FRAME, GRADIENT, INK, LEAF, NODE, PALE, piece
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

NODES, DEVICES = 2, 4
PIECES = NODES * DEVICES
ROWS = [(node, device) for node in range(NODES) for device in range(DEVICES)]
BOTTOM = len(ROWS) - 1

PIECE = 0.155  # width of a piece; a strip is PIECES of them
STRIP = PIECE * PIECES
STEP = 2.42  # from a column to the next
ROW = 0.31
NODE_GAP = 0.30
LABELS = 1.95  # width of the names on the left
TOP, LOW = 1.05, -3.75  # limits of the upper panel
SPAN, BELOW = 0.55, 0.35  # what the lower panel is lower by, above and below

Held = Callable[[int], range]


def main(folder: Path) -> None:
    matplotlib.rcParams["svg.hashsalt"] = "zeroxla"
    matplotlib.rcParams["font.size"] = 10
    figure = Figure(figsize=(11.2, 8.0), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=[TOP - LOW, TOP - SPAN - LOW - BELOW])
    gathers(above)
    reduces(below)
    figure.savefig(folder / "two_hops.svg", metadata={"Date": None})
    figure.savefig(folder / "two_hops.png", dpi=120)


# ------------------------------------------------------------------ what a device holds


def shard(row: int) -> range:
    """The piece that a device stores: device-major, so that each hop joins neighbours."""
    node, device = ROWS[row]
    piece = device * NODES + node
    return range(piece, piece + 1)


def secondary(row: int) -> range:
    first = ROWS[row][1] * NODES
    return range(first, first + NODES)


def whole(row: int) -> range:
    return range(PIECES)


# ------------------------------------------------------------------ the two panels


def gathers(axes: Axes) -> None:
    frames(axes, 5)
    columns: list[tuple[str, Held]] = [
        ("shard", shard),
        ("secondary shard", secondary),
        ("gathered", whole),
        ("secondary shard", secondary),
        ("gathered", whole),
    ]
    for column, (title, held) in enumerate(columns):
        strips(axes, column, title, held, LEAF)
    hop(axes, 0, "node", "quantize,\nhop over node")
    hop(axes, 1, "device", "hop over device,\ndequantize")
    hop(axes, 3, "device", "hop over device\n")
    kept(axes)
    span(axes, 0, 2, "forward")
    span(axes, 3, 4, "backward: inside the node only (hpZ)")
    axes.set_title("Gathers: 8 bits between hosts (qwZ)", loc="left", weight="bold")
    limits(axes, LOW, TOP)


def reduces(axes: Axes) -> None:
    frames(axes, 3)
    strips(axes, 0, "its rows' gradient", whole, GRADIENT, partial=True)
    strips(axes, 1, "summed in the node", secondary, GRADIENT, partial=True)
    strips(axes, 2, "summed over all", shard, GRADIENT)
    hop(axes, 0, "device", "quantize, hop over\ndevice, dequantize, sum")
    hop(axes, 1, "node", "quantize, hop over\nnode, dequantize, sum")
    axes.set_title("Reduce: 4 bits between hosts (qgZ)", loc="left", weight="bold")
    legend(axes)
    limits(axes, LOW + BELOW, TOP - SPAN)


def limits(axes: Axes, low: float, top: float) -> None:
    axes.set_xlim(-LABELS - 0.05, 4 * STEP + STRIP + 0.15)
    axes.set_ylim(low, top)
    axes.set_aspect("equal")
    axes.axis("off")


# ------------------------------------------------------------------ pieces of a panel


def row_y(row: int) -> float:
    return -(row * ROW + (row // DEVICES) * NODE_GAP)


def frames(axes: Axes, num_columns: int) -> None:
    """Draw a box for each node, and the names on the left."""
    for node in range(NODES):
        top, bottom = row_y(node * DEVICES), row_y(node * DEVICES + DEVICES - 1)
        axes.add_patch(
            FancyBboxPatch(
                (-LABELS, bottom - 0.16),
                LABELS + (num_columns - 1) * STEP + STRIP + 0.1,
                top - bottom + 0.32,
                boxstyle="round,pad=0.02,rounding_size=0.07",
                facecolor="none",
                edgecolor=FRAME,
                linewidth=1.0,
            )
        )
        middle = (top + bottom) / 2
        axes.text(-LABELS + 0.08, middle, f"node {node}", va="center", weight="bold", color=INK)
    for row, (_, device) in enumerate(ROWS):
        axes.text(-0.18, row_y(row), f"device {device}", ha="right", va="center", color=INK)


def strips(
    axes: Axes, column: int, title: str, held: Held, color: str, *, partial: bool = False
) -> None:
    """Draw what every device holds; hatched where a sum is not complete."""
    left = column * STEP
    axes.text(left + STRIP / 2, 0.21, title, ha="center", va="bottom", color=INK)
    for row in range(len(ROWS)):
        for i in range(PIECES):
            filled = i in held(row)
            axes.add_patch(
                Rectangle(
                    (left + i * PIECE, row_y(row) - PIECE / 2),
                    PIECE,
                    PIECE,
                    facecolor="white" if filled and partial else color if filled else PALE,
                    edgecolor=(color if partial else "white") if filled else FRAME,
                    hatch="//////" if filled and partial else None,
                    linewidth=0.9,
                )
            )


def hop(axes: Axes, column: int, axis: str, words: str) -> None:
    """Draw who sends to whom from one column to the next."""
    color = NODE if axis == "node" else DEVICE
    left, right = column * STEP + STRIP + 0.04, (column + 1) * STEP - 0.04
    for a, (node_a, device_a) in enumerate(ROWS):
        for b, (node_b, device_b) in enumerate(ROWS):
            same_line = device_a == device_b if axis == "node" else node_a == node_b
            if a != b and same_line:
                arrow(axes, (left, row_y(a)), (right, row_y(b)), color, 1.1)
    axes.text(
        (left + right) / 2,
        row_y(BOTTOM) - 0.26,
        words,
        ha="center",
        va="top",
        color=color if axis == "device" else "#9A6A00",
        fontsize=9,
    )


def kept(axes: Axes) -> None:
    """Draw the way of the secondary shards from forward to backward."""
    start, end = STEP + STRIP / 2, 3 * STEP + STRIP / 2
    y = row_y(BOTTOM) - 0.72
    top = row_y(BOTTOM) - 0.24
    axes.plot([start, start, end], [top, y, y], color=LEAF, linewidth=1.6)
    arrow(axes, (end, y - 0.01), (end, top), LEAF, 1.6)
    axes.text((start + end) / 2, y - 0.05, "kept on each device", ha="center", va="top", color=LEAF)


def span(axes: Axes, first: int, last: int, words: str) -> None:
    left, right = first * STEP, last * STEP + STRIP
    axes.plot([left, right], [0.62, 0.62], color=INK, linewidth=1.2, solid_capstyle="butt")
    axes.text((left + right) / 2, 0.68, words, ha="center", va="bottom", weight="bold")


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, width: float
) -> None:
    axes.annotate(
        "",
        end,
        start,
        arrowprops={
            "arrowstyle": "-|>",
            "color": color,
            "linewidth": width,
            "mutation_scale": 8,
            "shrinkA": 0,
            "shrinkB": 0,
        },
    )


def legend(axes: Axes) -> None:
    x, y = 3 * STEP - 0.25, 0.0
    entries = (
        ("parameters", LEAF, "solid"),
        ("gradient, not yet summed\nover all devices", GRADIENT, "hatched"),
        ("gradient, summed", GRADIENT, "solid"),
        ("hop over node:\nbetween hosts, slow", NODE, "arrow"),
        ("hop over device:\ninside a host, fast", DEVICE, "arrow"),
    )
    for words, color, kind in entries:
        if kind == "arrow":
            arrow(axes, (x - 0.1, y), (x + 0.32, y), color, 1.6)
        else:
            piece(axes, x + 0.05, y, PIECE, color, hatched=kind == "hatched")
        axes.text(x + 0.48, y, words, va="center", color=INK)
        y -= 0.58


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
