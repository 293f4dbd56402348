"""Draws an explained step: what the device and each link do, and when the device waits for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from zeroxla.inspect.pictures.figures import INK, PHASE_COLORS, finish, new_figure, quiet
from zeroxla.inspect.pictures.planned import PlannedEvent, PlannedTarget, PlannedTime

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAITS = "#C00000"
"""The colour of waits, which no phase has."""
_COMPUTE = "compute"


class ExplainedWait(Protocol):
    """A span in which nothing is computed, and what it waits for."""

    @property
    def start_s(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def event(self) -> PlannedEvent | None: ...


class ExplainedStep(Protocol):
    """A `zeroxla.planning.explain.report.Explanation`."""

    @property
    def target(self) -> PlannedTarget: ...
    @property
    def time(self) -> PlannedTime: ...
    @property
    def waits(self) -> Sequence[ExplainedWait]: ...
    @property
    def headline(self) -> str: ...


def plot_explanation(step: ExplainedStep, *, path: str | os.PathLike | None = None) -> Figure:
    """Draw an explained step.

    Args:
      step: what `zeroxla.explain` returned.
      path: file to save to (the suffix names the format), or None.

    Returns:
      The figure. It has a row for the device and one for each link, coloured by phase. In the
      device's row, and above the link that it waits for, waits are red.
    """
    lanes = [_COMPUTE, *(lane for lane in step.time.busy_s if lane != _COMPUTE)]
    figure = new_figure(width=11, height=1.6 + 0.7 * len(lanes))
    axes = figure.add_subplot()
    for phase, color in PHASE_COLORS.items():
        shown = False
        for i, lane in enumerate(lanes):
            spans = [
                (1e3 * e.start_s, 1e3 * (e.end_s - e.start_s))
                for e in step.time.events
                if e.lane == lane and e.phase.split("+")[0] == phase
            ]
            if spans:
                label = None if shown else phase
                axes.broken_barh(spans, (i - 0.3, 0.6), color=color, linewidth=0, label=label)
                shown = True
    spans = [(1e3 * wait.start_s, 1e3 * wait.seconds) for wait in step.waits]
    if spans:
        axes.broken_barh(spans, (-0.3, 0.6), color=WAITS, linewidth=0, label="waits")
    for i, lane in enumerate(lanes[1:], 1):
        spans = [
            (1e3 * wait.start_s, 1e3 * wait.seconds)
            for wait in step.waits
            if wait.event is not None and wait.event.lane == lane
        ]
        if spans:
            axes.broken_barh(spans, (i - 0.42, 0.1), color=WAITS, linewidth=0)
    axes.set_yticks(range(len(lanes)), [_words(step, lane) for lane in lanes], fontsize=9)
    axes.set_ylim(len(lanes) - 0.5, -0.6)
    axes.set_xlim(0, 1e3 * step.time.seconds or 1)
    axes.set_xlabel("ms", fontsize=8, color=INK)
    axes.set_title(step.headline, fontsize=10, color=INK, loc="left", wrap=True)
    figure.legend(loc="outside lower center", ncols=9, frameon=False, fontsize=8)
    quiet(axes)
    axes.grid(visible=False)
    return finish(figure, path)


def _words(step: ExplainedStep, lane: str) -> str:
    link = step.target.links.get(lane)
    return lane if link is None else f"{lane}\n{link.name}"
