"""Draws memory: as stacked bars, one for each report, or over one step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from zeroxla.inspect.pictures.figures import COLORS, INK, finish, new_figure, quiet
from zeroxla.inspect.pictures.step_memory import plot_step_memory
from zeroxla.program.extras import extra
from zeroxla.program.report import format_bytes
from zeroxla.step.memory.step_memory import StepMemory

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class HasParts(Protocol):
    """A memory report."""

    def parts(self) -> Mapping[str, float]:
        """Return bytes by name; they add up to all bytes that are held."""
        ...


def plot_memory(
    reports: HasParts | Mapping[str, HasParts],
    *,
    room: float | None = None,
    path: str | os.PathLike | None = None,
) -> Figure:
    """Draw the memory of one device: over a step, or as stacked bars.

    Args:
      reports: one report, or several by name to compare. A report comes from
        `zeroxla.inspect.memory`, `Plan.memory`, `Plan.generation`, or is a `Phase` of
        `PhaseReport.phases()`.
      room: the bytes that a device has, drawn as a line, or None.
      path: file to save to (the suffix names the format), or None.

    Returns:
      The figure. Of one report on a step it has the temporaries over the step's equations as
      areas by kind, with its phases, and bars of the ten largest residents at the peak; otherwise a
      bar for each report.

    Raises:
      ValueError: there are no reports.
    """
    with extra("plot", "pictures need"):
        from matplotlib.ticker import FuncFormatter

    if isinstance(reports, StepMemory):
        return plot_step_memory(reports, room, path)
    named = reports if isinstance(reports, Mapping) else {"": reports}
    if not named:
        raise ValueError("there are no reports to draw; give one, or several by name")
    bars = {name: report.parts() for name, report in named.items()}
    kinds = list(dict.fromkeys(part for parts in bars.values() for part in parts))
    figure = new_figure(width=8, height=1.5 + 0.55 * len(bars))
    axes = figure.add_subplot()
    for i, parts in enumerate(bars.values()):
        left = 0.0
        for part, num_bytes in parts.items():
            color = COLORS[kinds.index(part) % len(COLORS)]
            axes.barh([i], [num_bytes], left=[left], height=0.6, color=color)
            left += num_bytes
        axes.annotate(f" {format_bytes(left)}", (left, i), va="center", fontsize=8, color=INK)
    shown = [k for k in kinds if any(parts.get(k) for parts in bars.values())]
    for kind in shown:
        axes.barh([0], [0], color=COLORS[kinds.index(kind) % len(COLORS)], label=kind)
    if room is not None:
        axes.axvline(room, color=INK, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(bars)), list(bars), fontsize=9)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    most = max([sum(parts.values()) for parts in bars.values()] + [room or 0.0])
    axes.set_xlim(0, 1.15 * most or 1.0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.tick_params(labelsize=8)
    axes.set_title("Memory of a device", fontsize=11, color=INK, loc="left", weight="bold")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    quiet(axes)
    axes.grid(visible=False)
    return finish(figure, path)
