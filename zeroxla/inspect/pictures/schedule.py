"""Draws a pipeline schedule as people draw it: ranks down, ticks across."""

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
    from matplotlib.patches import Rectangle

_MAX_WIDTH = 24.0  # inches
_SMALLEST = 4.0  # points: the smallest number that can be read
_BOX = 0.84  # the height of a box; rows are 1 apart
_LIGHTEST = 0.62  # how near to white the last chunk's colour is


def plot_schedule(
    schedule: Schedule,
    *,
    forward: float = 1,
    backward: float = 2,
    weight: float | None = None,
    path: str | os.PathLike | None = None,
) -> Figure:
    """Draw a schedule in lockstep: a box for each forward, backward and weight gradient.

    Every rank has a row. A box is as wide as its work, and a tick as wide as the busiest rank's.
    Within a tick forwards stand at the left and backwards at the right. Where a rank has several
    stages, its chunks, the later ones are lighter. Blank space is idle time.

    Args:
      schedule: a schedule that `zeroxla.make_schedule` made, or tables of your own.
      forward: the work of one micro-batch's forward on a rank, in all its stages, in any unit.
      backward: the work of its whole backward.
      weight: the part of `backward` for the gradient of the leaves. None means half.
      path: file to save to (the suffix names the format), or None.

    Returns:
      The figure. The numbers are micro-batches; they are left out if they would be too small to
      read.

    Raises:
      ValueError: negative work, `weight` above `backward`, or a schedule without work.
    """
    work_TRO = work_of(schedule, forward, backward, weight)  # ticks, ranks, ops
    widths_T = work_TRO.sum(axis=2).max(axis=1, initial=0)
    total = float(widths_T.sum())
    if not total:
        raise ValueError(
            f"schedule {schedule.name!r} holds no work, so there is nothing to draw; give it "
            "entries, and work above 0"
        )
    least = float(work_TRO[work_TRO > 0].min())
    inches = min(_MAX_WIDTH - 1.0, 0.26 / least * total)
    figure = new_figure(
        width=1.0 + max(inches, 4.6),
        height=1.5 + 0.36 * schedule.num_ranks + 0.16 * (schedule.num_chunks - 1),
    )
    axes = figure.add_subplot()
    starts_T = np.concatenate([[0.0], np.cumsum(widths_T)])
    named = _boxes(axes, schedule, work_TRO, starts_T, points_per_unit=72 * inches / total)
    _frame(axes, schedule, starts_T, points_per_unit=72 * inches / total)
    figure.suptitle(
        f"Schedule {schedule.name} ({sizes_of(schedule)}, ticks: {schedule.ticks})",
        x=0.02,
        ha="left",
        fontsize=12,
        color=INK,
        weight="bold",
    )
    named = dict(sorted(named.items()))
    figure.legend(
        named.values(),
        [str(box.get_label()) for box in named.values()],
        loc="outside lower left",
        ncols=len({op for op, _ in named}),  # a column for each op, which is filled downwards
        frameon=False,
        fontsize=8,
    )
    return finish(figure, path)


def sizes_of(schedule: Schedule) -> str:
    """Return the numbers of a schedule, for a title."""
    chunks, ranks = schedule.num_chunks, schedule.num_ranks
    of = f"stages: {ranks}" if chunks == 1 else f"ranks: {ranks}, chunks: {chunks}"
    return f"{of}, micro-batches: {schedule.microbatches}"


def row_of(schedule: Schedule) -> str:
    """Return the word for a row of a schedule: its rank, or the only stage on it."""
    return "stage" if schedule.num_chunks == 1 else "rank"


def _boxes(
    axes: Axes,
    schedule: Schedule,
    work_TRO: np.ndarray,
    starts_T: np.ndarray,
    *,
    points_per_unit: float,
) -> dict[tuple[int, int], Rectangle]:
    """Draw the boxes; return one of each kind, by op and chunk."""
    from matplotlib.patches import Rectangle

    name = "input gradient" if schedule.splits else "backward"
    labels = ("forward", name, "weight gradient")
    # All numbers have the size that fits the narrowest box.
    narrowest = float(work_TRO[work_TRO > 0].min()) * points_per_unit
    size = min(9.0, 1.25 * narrowest / len(str(schedule.microbatches - 1)))
    named: dict[tuple[int, int], Rectangle] = {}
    for op, table in enumerate((schedule.forward, schedule.backward, schedule.weight)):
        for tick, stage in np.argwhere(table != NONE).tolist():
            rank = schedule.ranks[stage]
            chunk = schedule.stages_of(rank).index(stage)
            widths = work_TRO[tick, rank]
            # Forwards begin at the left end of the tick; the rest ends at its right end.
            right = float(starts_T[tick + 1])
            left = float(starts_T[tick]) if op == 0 else right - float(widths[op:].sum())
            label = labels[op] if schedule.num_chunks == 1 else f"{labels[op]}, chunk {chunk}"
            color, ink = _shade(op, chunk, schedule.num_chunks)
            box = Rectangle(
                (left, rank - _BOX / 2),
                widths[op],
                _BOX,
                facecolor=color,
                edgecolor="white",
                linewidth=0.7,
                label=label,
            )
            named.setdefault((op, chunk), box)
            axes.add_patch(box)
            if widths[op] and size >= _SMALLEST:
                axes.text(
                    left + widths[op] / 2,
                    rank,
                    str(table[tick, stage]),
                    ha="center",
                    va="center_baseline",
                    fontsize=size,
                    color=ink,
                )
    return named


def _shade(op: int, chunk: int, num_chunks: int) -> tuple[tuple[float, ...], str]:
    """Return the colour of an op of a chunk, and that of the numbers on it."""
    from matplotlib.colors import to_rgb

    white = _LIGHTEST * chunk / max(num_chunks - 1, 1)
    color = tuple(part + (1 - part) * white for part in to_rgb(COLORS[op]))
    return color, "white" if op != 1 and white < 0.3 else "black"


def _frame(axes: Axes, schedule: Schedule, starts_T: np.ndarray, *, points_per_unit: float) -> None:
    from matplotlib.ticker import NullLocator

    rows = schedule.num_ranks
    for row in range(rows):
        axes.axhspan(row - _BOX / 2, row + _BOX / 2, color="#F6F6F6", linewidth=0, zorder=0)
    axes.vlines(starts_T, -0.5, rows - 0.5, color=FRAME, linewidth=0.5, zorder=0.5)
    axes.set_xlim(0, starts_T[-1])
    axes.set_ylim(rows - 0.5, -0.5)
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
    axes.set_yticks(range(rows), [f"{row_of(schedule)} {r}" for r in range(rows)], fontsize=8)
    axes.tick_params(length=0, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
