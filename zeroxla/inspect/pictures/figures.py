"""The parts that the pictures share: colours, an empty figure, quiet axes, saving to a file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

from zeroxla.program.extras import extra

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLORS: tuple[str, ...] = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#8C6D1F",
    "#6A51A3",
)
PHASE_COLORS: dict[str, str] = {
    "forward": "#0072B2",
    "backward": "#CC79A7",
    "forward gather": "#56B4E9",
    "backward gather": "#EBC4DA",
    "reduce": "#E69F00",
    "update": "#009E73",
    "send": "#6A51A3",
    "move": "#8C6D1F",
    "deal": "#A6CE39",
    "owners": "#1B2A49",
    "other": "#B8B8B8",
}
"""A colour of its own for each of `zeroxla.program.phases.PHASES`."""
INK = "#333333"
FRAME = "#D8D8D8"


def new_figure(*, width: float, height: float) -> Figure:
    """Return an empty figure; width and height are in inches."""
    with extra("plot", "pictures need"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def quiet(axes: Axes) -> None:
    """Leave only the bottom line of the frame, and faint horizontal lines."""
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#ECECEC", linewidth=0.8)
    axes.tick_params(length=0, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FRAME)


def finish(figure: Figure, path: str | os.PathLike | None) -> Figure:
    """Save the figure if there is a path; return it."""
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
