"""Draw docs/pictures/rlhf.svg: what a device holds in the three phases of an iteration.

    python docs/pictures/rlhf.py [folder]

Colours are those of make.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
from make import DEVICE, FRAME, GRADIENT, INK, LEAF, NODE, PALE
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

WIDTH, GAP, HEIGHT = 3.1, 1.0, 3.3
# (name, height, colour) of what is held between phases, from below.
HELD = (
    ("actor: shards and moments", 0.62, DEVICE),
    ("critic: shards and moments (PPO)", 0.62, LEAF),
    ("reference: shards in 8 bits", 0.26, FRAME),
)
# Of each phase: its name, what it adds, what it hands on.
PHASES = (
    ("generate", (("actor, tensor-parallel", 0.55, NODE), ("cache", 0.3, NODE)), "responses"),
    ("score", (("reference, then critic", 0.55, NODE),), "advantages"),
    ("train", (("a layer at a time", 0.2, GRADIENT), ("activations", 0.55, GRADIENT)), ""),
)


def main(folder: Path) -> None:
    matplotlib.rcParams["svg.hashsalt"] = "zeroxla"
    matplotlib.rcParams["font.size"] = 10
    figure = Figure(figsize=(10.4, 3.5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for i, (name, added, result) in enumerate(PHASES):
        left = i * (WIDTH + GAP)
        phase(axes, left, name, added)
        if result:
            start, end = (left + WIDTH + 0.06, 2.75), (left + WIDTH + GAP - 0.06, 2.75)
            axes.add_patch(
                FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=INK)
            )
            middle = left + WIDTH + GAP / 2
            axes.text(middle, 2.9, result, ha="center", va="bottom", color=INK, fontsize=8.5)
    axes.set_xlim(-0.1, 3 * WIDTH + 2 * GAP + 0.1)
    axes.set_ylim(-0.1, HEIGHT + 0.35)
    axes.set_axis_off()
    figure.savefig(folder / "rlhf.svg", metadata={"Date": None})


def phase(axes: Axes, left: float, name: str, added: tuple[tuple[str, float, str], ...]) -> None:
    """Draw a device in a phase: what it holds always, and above what comes and goes."""
    frame = FancyBboxPatch(
        (left, 0), WIDTH, HEIGHT, boxstyle="round,pad=0,rounding_size=0.08", fc=PALE, ec=FRAME
    )
    axes.add_patch(frame)
    axes.text(left + WIDTH / 2, HEIGHT + 0.08, name, ha="center", va="bottom", weight="bold")
    bottom = 0.08
    for what, height, color in HELD:
        bar(axes, left, bottom, what, height, color, alpha=0.35)
        bottom += height + 0.04
    bottom += 0.1
    for what, height, color in added:
        bar(axes, left, bottom, what, height, color, alpha=0.6)
        bottom += height + 0.04


def bar(
    axes: Axes, left: float, bottom: float, what: str, height: float, color: str, alpha: float
) -> None:
    axes.add_patch(
        Rectangle((left + 0.08, bottom), WIDTH - 0.16, height, fc=color, ec=color, alpha=alpha)
    )
    middle = (left + WIDTH / 2, bottom + height / 2)
    axes.text(*middle, what, ha="center", va="center", color=INK, fontsize=8.5)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
