"""The picture of faults_islands.py: who was there when, and what became of tokens and loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faults_islands_figures import Found, lives
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

TRAINS, STARTS, CUT, GONE = "#4878a8", "#d8dee6", "#e0a030", "#c04040"
MARKS = {"computing": "o", "exchanging": "X", "joining": "v"}


def draw(path: Path, calm: Found, disturbed: Found, islands: int) -> None:
    """Write the picture.

    Args:
      path: the file.
      calm, disturbed: the two runs.
      islands: their number.
    """
    figure = Figure(figsize=(11, 9), layout="constrained")
    FigureCanvasAgg(figure)
    lanes, tokens, loss = figure.subplots(3, 1, height_ratios=(1.3, 1, 1))
    _draw_lanes(lanes, disturbed, islands)
    for found, label, color in ((calm, "undisturbed", "#606060"), (disturbed, "disturbed", TRAINS)):
        _plot(tokens, [(at, n / 1e6) for at, n in found.tokens], label, color)
        _plot(loss, [(at, x) for at, _, x in found.losses[1:]], label, color)
    tokens.set_ylabel("million tokens that count")
    loss.set_ylabel("validation loss,\nouter parameters")
    loss.set_xlabel("seconds")
    for axes in (tokens, loss):
        axes.legend(frameon=False)
    for axes in (lanes, tokens, loss):
        axes.set_xlim(0, disturbed.seconds)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _draw_lanes(axes: Any, found: Found, islands: int) -> None:
    """Draw a lane for each island, and one for the coordinator, the first at the top."""
    for life in lives(found.events, found.seconds):
        axes.barh(life.slot, life.first - life.spawned, left=life.spawned, height=0.7, color=STARTS)
        axes.barh(life.slot, life.ended - life.first, left=life.first, height=0.7, color=TRAINS)
    for event in found.events:
        if event["what"] == "disturbance" and event["kind"] == "cut":
            box = {"left": event["at"], "height": 0.24, "color": CUT}
            axes.barh(event["slot"], event["seconds"], **box)
    axes.barh(islands, found.seconds, height=0.7, color="#88a888")
    for event in found.events:
        if event["what"] == "disturbance" and event["kind"] == "coordinator":
            axes.barh(islands, event["seconds"], left=event["at"], height=0.7, color=GONE)
    for phase, mark in MARKS.items():
        kills = [e for e in found.events if e["what"] == "killed" and e["phase"] == phase]
        places = [e["at"] for e in kills], [e["slot"] for e in kills]
        axes.scatter(*places, marker=mark, s=42, color=GONE, edgecolor="white", zorder=3,
                     label=f"killed while {phase}")  # fmt: skip
    axes.set_yticks(range(islands + 1), [*(f"island {i}" for i in range(islands)), "coordinator"])
    axes.invert_yaxis()
    handles = [
        Patch(color=TRAINS, label="trains"),
        Patch(color=STARTS, label="starts, joins"),
        Patch(color=CUT, label="link cut"),
        Patch(color=GONE, label="coordinator gone"),
        *axes.get_legend_handles_labels()[0],
    ]
    axes.legend(
        handles=handles, ncols=4, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1)
    )


def _plot(axes: Any, points: Sequence[tuple[float, float]], label: str, color: str) -> None:
    axes.plot([x for x, _ in points], [y for _, y in points], label=label, color=color)
