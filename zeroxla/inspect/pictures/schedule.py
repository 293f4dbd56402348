"""Draws a pipeline schedule as people draw it: stages down, ticks across."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from zeroxla.inspect.pictures.figures import COLORS, FRAME, INK, finish, new_figure
from zeroxla.pipeline.schedule import NONE, Schedule
from zeroxla.pipeline.schedule_cost import work_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_WIDTH = 24.0  # inches
_SMALLEST = 4.0  # points: the smallest number that can be read
_BOX = 0.84  # the height of a box; stages are 1 apart


def plot_schedule(
    schedule: Schedule,
    *,
    forward: float = 1,
    backward: float = 2,
    weight: float | None = None,
    path: str | os.PathLike | None = None,
) -> Figure:
    """Draw a schedule in lockstep: a box for each forward, backward and weight gradient.

    A box is as wide as its work, and a tick as wide as the work of its busiest stage. Within a tick
    forwards stand at the left and backwards at the right. Blank space is idle time.

    Args:
      schedule: a schedule that `zeroxla.make_schedule` made, or tables of your own.
      forward: the work of one forward of one stage, in any unit.
      backward: the work of one whole backward.
      weight: the part of `backward` for the gradient of the leaves. None means half.
      path: file to save to (the suffix names the format), or None.

    Returns:
      The figure. The numbers are micro-batches; they are left out if they would be too small to
      read.

    Raises:
      ValueError: negative work, `weight` above `backward`, or a schedule without work.
    """
    work_TSO = work_of(schedule, forward, backward, weight)  # ticks, stages, ops
    widths_T = work_TSO.sum(axis=2).max(axis=1, initial=0)
    total = float(widths_T.sum())
    if not total:
        raise ValueError(
            f"schedule {schedule.name!r} holds no work, so there is nothing to draw; give it "
            "entries, and work above 0"
        )
    least = float(work_TSO[work_TSO > 0].min())
    inches = min(_MAX_WIDTH - 1.0, 0.26 / least * total)
    figure = new_figure(width=1.0 + max(inches, 4.6), height=1.5 + 0.36 * schedule.stages)
    axes = figure.add_subplot()
    starts_T = np.concatenate([[0.0], np.cumsum(widths_T)])
    _boxes(axes, schedule, work_TSO, starts_T, points_per_unit=72 * inches / total)
    _frame(axes, schedule, starts_T, points_per_unit=72 * inches / total)
    figure.suptitle(
        f"Schedule {schedule.name} (stages: {schedule.stages}, micro-batches: "
        f"{schedule.microbatches}, ticks: {schedule.ticks})",
        x=0.02,
        ha="left",
        fontsize=12,
        color=INK,
        weight="bold",
    )
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    return finish(figure, path)


def _boxes(
    axes: Axes,
    schedule: Schedule,
    work_TSO: np.ndarray,
    starts_T: np.ndarray,
    *,
    points_per_unit: float,
) -> None:
    from matplotlib.patches import Rectangle

    name = "input gradient" if schedule.splits else "backward"
    ops = (
        ("forward", schedule.forward, COLORS[0], "white"),
        (name, schedule.backward, COLORS[1], "black"),
        ("weight gradient", schedule.weight, COLORS[2], "white"),
    )
    # All numbers have the size that fits the narrowest box.
    narrowest = float(work_TSO[work_TSO > 0].min()) * points_per_unit
    size = min(9.0, 1.25 * narrowest / len(str(schedule.microbatches - 1)))
    named: set[str] = set()
    for tick, stage in np.ndindex(schedule.ticks, schedule.stages):
        widths = work_TSO[tick, stage]
        # Forwards begin at the left end of the tick; the rest ends at its right end.
        right = float(starts_T[tick + 1])
        lefts = (float(starts_T[tick]), right - widths[1] - widths[2], right - widths[2])
        for (label, table, color, ink), left, width in zip(ops, lefts, widths, strict=True):
            microbatch = table[tick, stage]
            if microbatch == NONE:
                continue
            box = Rectangle(
                (left, stage - _BOX / 2),
                width,
                _BOX,
                facecolor=color,
                edgecolor="white",
                linewidth=0.7,
                label=label if label not in named else f"_{label}",
            )
            named.add(label)
            axes.add_patch(box)
            if width and size >= _SMALLEST:
                axes.text(
                    left + width / 2,
                    stage,
                    str(microbatch),
                    ha="center",
                    va="center_baseline",
                    fontsize=size,
                    color=ink,
                )


def _frame(axes: Axes, schedule: Schedule, starts_T: np.ndarray, *, points_per_unit: float) -> None:
    from matplotlib.ticker import NullLocator

    for stage in range(schedule.stages):
        axes.axhspan(stage - _BOX / 2, stage + _BOX / 2, color="#F6F6F6", linewidth=0, zorder=0)
    axes.vlines(
        starts_T, -0.5, schedule.stages - 0.5, color=FRAME, linewidth=0.5, zorder=0.5
    )  # fmt: skip
    axes.set_xlim(0, starts_T[-1])
    axes.set_ylim(schedule.stages - 0.5, -0.5)
    # Labels stand at least 14 points apart.
    apart = 14 / points_per_unit
    middles, labels, last = [], [], -np.inf
    for tick in range(schedule.ticks):
        middle = (starts_T[tick] + starts_T[tick + 1]) / 2
        if middle - last >= apart:
            middles, labels, last = [*middles, middle], [*labels, str(tick)], middle
    axes.set_xticks(middles, labels, fontsize=7, color=INK)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("tick", fontsize=8, color=INK, loc="left")
    axes.set_yticks(
        range(schedule.stages), [f"stage {s}" for s in range(schedule.stages)], fontsize=8
    )
    axes.tick_params(length=0, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
