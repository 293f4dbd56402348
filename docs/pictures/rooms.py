"""Draw docs/pictures/rooms.svg and .png: the rooms of zeroxla/, their order, their imports.

    python docs/pictures/rooms.py [folder]

Order and imports are those that tests/test_rooms.py holds.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import matplotlib
from make import DEVICE, FRAME, INK, PALE
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from test_rooms import FLOORS, imports, modules, room_of

ROOMS = [room for floor in FLOORS for room in sorted(floor)]


def main(folder: Path) -> None:
    matplotlib.rcParams["svg.hashsalt"] = "zeroxla"
    matplotlib.rcParams["font.size"] = 10
    counts, files = Counter(), Counter()
    for module in modules():
        room = room_of(module)
        files[room] += 1
        counts.update((room, room_of(other)) for other in imports(module))
    figure = Figure(figsize=(9.2, 5.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    last = len(ROOMS) - 1
    for y, room in enumerate(reversed(ROOMS)):
        axes.add_patch(Rectangle((-4.5, y - 0.4), 3.8, 0.8, facecolor=PALE, edgecolor=FRAME))
        axes.text(-4.3, y, room, va="center", weight="bold", color=INK)
        axes.text(-0.85, y, f"{files[room]} files", va="center", ha="right", color=INK, fontsize=8)
        axes.text(y, -0.75, room, ha="left", va="bottom", color=INK, fontsize=9, rotation=40)
        axes.plot([-0.6, last], [y, y], color=FRAME, linewidth=0.5)
        axes.plot([y, y], [-0.6, y], color=FRAME, linewidth=0.5)
        axes.scatter(y, y, s=14, color=FRAME, marker="s", linewidths=0, zorder=3)
        for x, other in enumerate(reversed(ROOMS)):
            if count := counts[room, other] * (room != other):
                axes.scatter(x, y, s=22 * count**0.7, color=DEVICE, linewidths=0, zorder=3)
    axes.set_xlim(-4.6, last + 1.2)
    axes.set_ylim(last + 0.6, -2.2)
    axes.text(
        -4.5, -1.1, "a room imports\nthe rooms right of it", color=INK, fontsize=8, va="center"
    )
    axes.set_axis_off()
    for suffix in ("svg", "png"):
        metadata = {"Date": None} if suffix == "svg" else None
        figure.savefig(folder / f"rooms.{suffix}", metadata=metadata, dpi=130)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
