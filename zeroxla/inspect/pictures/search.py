"""Draws a search of settings: predicted speed over memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zeroxla.inspect.pictures.figures import COLORS, INK, finish, new_figure, quiet
from zeroxla.inspect.pictures.planned import RankedPlans
from zeroxla.program.extras import extra
from zeroxla.program.report import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = ("o", "s", "^", "D", "v", "P")


def plot_search(search: RankedPlans, *, path: str | os.PathLike | None = None) -> Figure:
    """Draw what `zeroxla.search_plans` found.

    Args:
      search: a search that found at least one plan.
      path: file to save to (the suffix names the format), or None.

    Returns:
      The figure, with a mark for each plan: tokens/s over the memory of a device. The colour of a
      mark stands for the preset, its shape for the number of stages; it is hollow without
      recomputation. The line is the memory that a device has.
    """
    with extra("plot", "pictures need"):
        from matplotlib.lines import Line2D
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure = new_figure(width=8.5, height=4.6)
    axes = figure.add_subplot()
    rows = search.found
    zeros = list(dict.fromkeys(row.choice.zero for row in rows))
    pipes = sorted({row.choice.mesh_shape.get("pipe", 1) for row in rows})
    for row in rows:
        color = COLORS[zeros.index(row.choice.zero) % len(COLORS)]
        marker = _MARKERS[pipes.index(row.choice.mesh_shape.get("pipe", 1)) % len(_MARKERS)]
        face = "none" if row.choice.remat is False else color
        axes.plot(
            [row.plan.most_bytes],
            [row.plan.tokens_per_s],
            marker=marker,
            linestyle="",
            markerfacecolor=face,
            markeredgecolor=color,
            alpha=1.0 if row.plan.fits else 0.45,
        )
    target = rows[0].plan.target
    room = target.device.usable_bytes
    axes.axvline(room, color=INK, linewidth=1, linestyle="--")
    axes.annotate(
        f" a program has {format_bytes(room)}",
        (room, 1.0),
        xycoords=("data", "axes fraction"),
        va="top",
        fontsize=8,
        color=INK,
    )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("memory of a device", fontsize=8, color=INK)
    axes.set_ylabel("tokens or examples a second", fontsize=8, color=INK)
    axes.tick_params(labelsize=8)
    axes.set_title(
        f"{rows[0].plan.num_parameters:,} parameters on {target.device.label}",
        fontsize=11,
        color=INK,
        loc="left",
        weight="bold",
    )

    def key(label: str, **style: object) -> Line2D:
        return Line2D([], [], linestyle="", color=INK, label=label, **style)  # pyright: ignore

    keys = [key(z, marker="o", markeredgecolor=c, markerfacecolor=c) for z, c in zip(zeros, COLORS)]
    keys += [key(f"pipe={p}", marker=m) for p, m in zip(pipes, _MARKERS)]
    if any(row.choice.remat is False for row in rows):
        keys.append(key("nothing recomputed", marker="o", markerfacecolor="none"))
    axes.legend(handles=keys, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    quiet(axes)
    return finish(figure, path)
