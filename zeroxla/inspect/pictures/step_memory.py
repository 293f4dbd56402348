"""Draws the memory of a device over one step, and what is largest at its peak."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from zeroxla.inspect.pictures.figures import COLORS, FRAME, INK, finish, new_figure, quiet
from zeroxla.program.extras import extra
from zeroxla.program.live.residents import Resident
from zeroxla.program.report import format_bytes
from zeroxla.step.memory.step_memory import STATE, TEMPORARIES, UPDATE, StepMemory

if TYPE_CHECKING:
    import os

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS: tuple[str, ...] = ("state and batch", *TEMPORARIES)
_COLOR_OF: dict[str, str] = dict(zip(_KINDS, ("#9A9A9A", *COLORS), strict=False))
_UPDATE_SHARE = 0.08
"""The part of the step's width that the update takes, which is one point of the curve."""
_MOST_LETTERS = 44


def plot_step_memory(
    report: StepMemory, room: float | None, path: str | os.PathLike | None
) -> Figure:
    """Draw a step's memory: areas over its equations, and bars of the ten largest at the peak; see
    `plot_memory`."""
    with extra("plot", "pictures need"):
        from matplotlib.patches import Patch

    largest = report.largest()
    height = 3.4 + 0.34 * len(largest)
    figure = new_figure(width=9, height=height)
    shares = (2.9, 0.34 * len(largest) + 0.3)
    curve, bars = figure.subplots(2, 1, gridspec_kw={"height_ratios": shares})
    kinds = _curve(curve, report, room)
    _bars(bars, report)
    kinds += [k for k in dict.fromkeys(map(_kind, largest)) if k not in kinds]
    handles = [Patch(color=_COLOR_OF[k], label=k) for k in _KINDS if k in kinds]
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=6,
        frameon=False,
        fontsize=8,
        labelcolor=INK,
    )
    return finish(figure, path)


def _curve(axes: Axes, report: StepMemory, room: float | None) -> list[str]:
    """Draw the areas; return the kinds that are there."""
    from matplotlib.ticker import FuncFormatter

    points = list(report.curve)
    num = sum(p.phase != UPDATE for p in points)
    width = max(1.0, _UPDATE_SHARE * num)
    # Each equation is as wide as the others; the update follows them.
    edges = np.append(np.arange(num, dtype=float), num + width * np.arange(1 + len(points) - num))
    rows = {k: np.array([p.num_bytes.get(k, 0) for p in points]) for k in TEMPORARIES}
    rows = {k: row for k, row in rows.items() if row.any()}
    rows = {_KINDS[0]: np.full(len(points), report.state_bytes), **rows}
    below = np.zeros(len(points))
    for kind, row in rows.items():
        axes.stairs(
            below + row, edges, baseline=below, fill=True, color=_COLOR_OF[kind], linewidth=0,
            label=kind,
        )  # fmt: skip
        below = below + row
    top = 1.18 * max(below.max(), report.total_bytes, room or 0.0)
    if room is not None:
        axes.axhline(room, color=INK, linewidth=1, linestyle="--")
    at = 0
    for phase, run in itertools.groupby(p.phase for p in points):
        first, at = at, at + len(list(run))
        if first:
            axes.axvline(edges[first], color=INK, linewidth=0.7, linestyle=":")
        wide = edges[at] - edges[first] > 0.04 * edges[-1]
        if wide:
            middle = (edges[first] + edges[at]) / 2
            axes.text(middle, 0.985 * top, phase, ha="center", va="top", fontsize=8, color=INK)
    peak = int(below.argmax())
    axes.annotate(
        f"{format_bytes(report.total_bytes)} at the peak",
        ((edges[peak] + edges[peak + 1]) / 2, below[peak]),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=8,
        color=INK,
        weight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(0, top)
    axes.set_xticks([])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.tick_params(labelsize=8)
    axes.set_xlabel(
        "equations of the step, one after another; of a loop, one turn", fontsize=8, color=INK
    )
    axes.set_title(
        "Memory of a device over one step", fontsize=11, color=INK, loc="left", weight="bold"
    )
    quiet(axes)
    return list(rows)


def _bars(axes: Axes, report: StepMemory) -> None:
    largest = report.largest()
    longest = max((x.num_bytes for x in largest), default=1)
    for i, x in enumerate(largest):
        axes.barh([i], [x.num_bytes], height=0.62, color=_COLOR_OF[_kind(x)])
        arrays = f"{x.count} x {x.shape}" if x.count > 1 else x.shape
        what = x.kind if x.kind in STATE else f"unit {x.unit}" if x.unit else ""
        text = "   ".join(filter(None, (format_bytes(x.num_bytes), what, arrays, x.line)))
        inside = x.num_bytes > 0.495 * longest
        axes.annotate(
            text,
            (0 if inside else x.num_bytes, i),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            color="white" if inside else INK,
        )
    axes.set_yticks(range(len(largest)), [_short(x.name) for x in largest], fontsize=8)
    axes.set_ylim(len(largest) - 0.5, -0.5)
    axes.set_xlim(0, 1.02 * longest)
    axes.set_xticks([])
    axes.set_title("The largest at the peak", fontsize=9, color=INK, loc="left", weight="bold")
    quiet(axes)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.axvline(0, color=FRAME, linewidth=0.8)


def _kind(resident: Resident) -> str:
    return _KINDS[0] if resident.kind in STATE else resident.kind


def _short(name: str) -> str:
    return name if len(name) <= _MOST_LETTERS else "..." + name[3 - _MOST_LETTERS :]
