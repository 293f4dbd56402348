"""Draws a plan: the memory of a device, the bytes of each link, the time line of one step."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zeroxla.inspect.pictures.figures import (
    COLORS,
    INK,
    PHASE_COLORS,
    finish,
    new_figure,
    quiet,
)
from zeroxla.inspect.pictures.planned import PlannedStep
from zeroxla.program.phases import PHASES
from zeroxla.program.report import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_plan(plan: PlannedStep, *, path: str | os.PathLike | None = None) -> Figure:
    """Draw a plan.

    Args:
      plan: a plan that `zeroxla.plan` returned.
      path: file to save to (the suffix names the format), or None.

    Returns:
      The figure. It shows memory by part, under a line at the memory that a device has; the bytes
      that a device receives over each link; and what each lane does in one step.
    """
    figure = new_figure(width=11, height=6.4)
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 1), height_ratios=(1.3, 1))
    _memory(figure.add_subplot(grid[0, 0]), plan)
    _bytes(figure.add_subplot(grid[0, 1]), plan)
    _time(figure.add_subplot(grid[1, :]), plan)
    device = plan.target.device
    mesh = " x ".join(f"{name}={size}" for name, size in plan.target.mesh_shape.items())
    figure.suptitle(
        f"{plan.num_parameters:,} parameters on {mesh} of {device.label}",
        x=0.02,
        ha="left",
        fontsize=12,
        color=INK,
        weight="bold",
    )
    return finish(figure, path)


def _memory(axes: Axes, plan: PlannedStep) -> None:
    from matplotlib.ticker import FuncFormatter

    bottom = 0.0
    parts = [(name, size) for name, size in plan.memory.parts().items() if size]
    for (name, num_bytes), color in zip(parts, COLORS, strict=False):
        label = f"{name}, {format_bytes(num_bytes)}"
        axes.bar([0], [num_bytes], bottom=[bottom], width=0.5, color=color, label=label)
        bottom += num_bytes
    room = plan.target.device.usable_bytes
    # A need that is small beside the device would be an invisible line under it.
    top, words = room, f"a program has {format_bytes(room)}"
    if 0 < bottom < room / 5:
        top, words = 1.25 * bottom, f"a program has {format_bytes(room)}, {room / bottom:.0f} x"
    else:
        axes.axhline(room, color=INK, linewidth=1, linestyle="--")
    axes.annotate(
        words,
        (0.98, top),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=INK,
    )
    axes.set_title("Memory of a device", fontsize=10, color=INK, loc="left")
    axes.set_xlim(-0.4, 1.7)
    axes.set_ylim(0, 1.12 * max(top, bottom))
    axes.set_xticks([])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.tick_params(axis="y", labelsize=8)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="center right", frameon=False, fontsize=8, handlelength=1
    )
    quiet(axes)


def _bytes(axes: Axes, plan: PlannedStep) -> None:
    from matplotlib.ticker import FuncFormatter

    links = [axis for axis in plan.target.mesh_shape if plan.comms.select(axis=axis)]
    phases = [p for p in PHASES if any(row.phase == p for row in plan.comms.collectives)]
    lefts = dict.fromkeys(links, 0.0)
    for phase in phases:
        widths = [plan.comms.total_bytes(axis=axis, phase=phase) for axis in links]
        color = _color(phase)
        axes.barh(links, widths, left=list(lefts.values()), height=0.5, color=color, label=phase)
        for axis, width in zip(links, widths, strict=True):
            lefts[axis] += width
    for i, (axis, total) in enumerate(lefts.items()):
        text = f" {format_bytes(total)}, {plan.target.links[axis].name}"
        axes.annotate(text, (total, i), va="center", fontsize=8, color=INK)
    axes.set_title("Received by a device over each link", fontsize=10, color=INK, loc="left")
    if not links:
        axes.set_axis_off()
        axes.annotate("nothing: there is one device", (0.02, 0.9), fontsize=8, color=INK)
        return
    axes.set_xlim(0, 1.45 * max(lefts.values(), default=1.0) or 1.0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.tick_params(labelsize=8)
    quiet(axes)
    axes.grid(visible=False)


def _time(axes: Axes, plan: PlannedStep) -> None:
    lanes = list(plan.time.busy_s)
    for i, lane in enumerate(lanes):
        events = [event for event in plan.time.events if event.lane == lane]
        for phase in PHASES:
            spans = [
                (event.start_s, event.end_s - event.start_s)
                for event in events
                if event.phase == phase
            ]
            if spans:
                axes.broken_barh(spans, (i - 0.36, 0.72), color=_color(phase), linewidth=0)
    shown = [p for p in PHASES if any(event.phase == p for event in plan.time.events)]
    for phase in shown:
        axes.barh([0], [0], color=_color(phase), label=phase)
    axes.set_yticks(range(len(lanes)), lanes, fontsize=9)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, plan.time.seconds)
    axes.set_xlabel("seconds", fontsize=8, color=INK)
    title = f"One step, {plan.time.seconds:.3g} s, {plan.tokens_per_s:,.0f} a second in all"
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=7, frameon=False, fontsize=8)
    quiet(axes)
    axes.grid(visible=False)


def _color(phase: str) -> str:
    return PHASE_COLORS[phase.split("+")[0]]
