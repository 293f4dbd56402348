"""Draws a run of islands: who trained when, what was exchanged, and the loss."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from zeroxla.inspect.pictures.figures import COLORS, INK, finish, new_figure, quiet
from zeroxla.program.report import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_islands(
    steps: Mapping[int, Sequence[tuple[float, Mapping[str, Any]]]],
    *,
    path: str | os.PathLike | None = None,
) -> Figure:
    """Draw a run of islands over time.

    Args:
      steps: for each island, by its slot, its steps: the time in seconds after each, and the
        metrics that `Island` returned. A long time without a step is drawn as absence.
      path: file to save to (the suffix names the format), or None.

    Returns:
      The figure: a lane for each island with a mark for each merge; below it the loss.

    Raises:
      ValueError: no island has taken a step.
    """
    if not any(steps.values()):
        raise ValueError("no island has taken a step; give the time and the metrics of each step")
    figure = new_figure(width=8.4, height=2.4 + 0.5 * len(steps) + 2.2)
    ratios = [0.6 + 0.5 * len(steps), 2.2]
    lanes, losses = figure.subplots(2, 1, sharex=True, height_ratios=ratios)
    sent = 0
    for lane, (slot, taken) in enumerate(sorted(steps.items())):
        color = COLORS[lane % len(COLORS)]
        times = np.asarray([time for time, _ in taken])
        for begin, end in _runs(times):
            lanes.barh(lane, end - begin, left=begin, height=0.5, color=color, alpha=0.35)
        merges = [(time, m) for time, m in taken if "outer_bytes" in m]
        sent += sum(m["outer_bytes"] for _, m in merges)
        together = [time for time, m in merges if m["outer_islands"] > 1]
        alone = [time for time, m in merges if m["outer_islands"] == 1]
        lanes.plot(together, [lane] * len(together), "o", color=color, markersize=5)
        lanes.plot(alone, [lane] * len(alone), "o", color=color, markersize=5, fillstyle="none")
        values = [float(np.asarray(m["loss"])) for _, m in taken]
        gaps = np.flatnonzero(np.diff(times) > _longest(times)) + 1
        times, values = np.insert(times, gaps, np.nan), np.insert(values, gaps, np.nan)
        losses.plot(times, values, color=color, linewidth=1.4, label=f"island {slot}")
    lanes.set_yticks(range(len(steps)), [f"island {slot}" for slot in sorted(steps)])
    lanes.invert_yaxis()
    lanes.set_title(
        f"Steps (bars) and merged exchanges (dots, rings if it was alone); {format_bytes(sent)} "
        "sent in all",
        fontsize=10,
        color=INK,
        loc="left",
    )
    losses.set_title("Loss of a step", fontsize=10, color=INK, loc="left")
    losses.set_xlabel("seconds", color=INK)
    losses.legend(frameon=False, fontsize=9)
    for axes in (lanes, losses):
        quiet(axes)
    lanes.grid(visible=False)
    return finish(figure, path)


def _longest(times: np.ndarray) -> float:
    """Return the longest time between two steps that is no absence: five usual ones, or a tenth of
    the run, in which programs may be compiled."""
    if len(times) < 2:
        return 0.0
    return max(5 * float(np.median(np.diff(times))), float(times[-1] - times[0]) / 10)


def _runs(times: np.ndarray) -> list[tuple[float, float]]:
    """Return beginning and end of each time without absence."""
    if len(times) < 2:
        return [(float(x), float(x)) for x in times]
    cuts = [0, *(np.flatnonzero(np.diff(times) > _longest(times)) + 1), len(times)]
    return [(float(times[a]), float(times[b - 1])) for a, b in itertools.pairwise(cuts)]
