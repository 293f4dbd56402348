"""Draws the bytes of a step as stacked bars."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from zeroxla.inspect.comms_report import CommsReport, Row
from zeroxla.inspect.pictures.figures import COLORS, INK, finish, new_figure, quiet
from zeroxla.program.report import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXES = ("device", "node", "pipe", "tensor", "context", "expert")
_AXIS_COLORS: dict[str, str] = dict(zip(_AXES, (*COLORS[:5], COLORS[6]), strict=True))


def plot_comms(report: CommsReport, *, path: str | os.PathLike | None = None) -> Figure:
    """Draw the bytes of a step as stacked bars by phase, one segment per axis, kind and dtype.

    Args:
      report: a report that `comms` returned.
      path: file to save to (the suffix names the format), or None.

    Returns:
      The figure. It shows the bytes that a device receives and, if any cross hosts, the bytes that
      a host sends.
    """
    rows = report.rows
    panels = [("received by each device", "received_bytes")]
    if report.cross_host_bytes():
        panels.append(("sent by each host to other hosts", "cross_host_bytes"))
    figure = new_figure(width=1.6 + 4.4 * len(panels), height=4.6)
    phases = list(dict.fromkeys(row.phase for row in rows))
    colors = _segment_colors(rows)
    for i, (title, field) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), i + 1)
        _stack(axes, rows, phases, field, colors)
        axes.set_title(title, fontsize=10, color=INK, loc="left")
    mesh = " x ".join(f"{name}={size}" for name, size in report.mesh_shape.items())
    figure.suptitle(
        f"Bytes per step on {mesh}", x=0.02, ha="left", fontsize=12, color=INK, weight="bold"
    )
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return finish(figure, path)


def _segment_colors(rows: tuple[Row, ...]) -> dict[tuple[str, str, str], Any]:
    """Give each mesh axis a hue, and each of its kinds and dtypes a shade of it."""
    from matplotlib.colors import to_rgb

    by_axis: dict[str, list[tuple[str, str, str]]] = {}
    for row in rows:
        key = (row.axis, row.kind, row.dtype)
        if key not in by_axis.setdefault(row.axis, []):
            by_axis[row.axis].append(key)
    colors = {}
    for axis, keys in by_axis.items():
        red, green, blue = to_rgb(_AXIS_COLORS.get(axis, COLORS[5]))
        for i, key in enumerate(keys):
            white = 0.65 * i / len(keys)
            colors[key] = tuple(c + (1 - c) * white for c in (red, green, blue))
    return colors


def _stack(
    axes: Axes,
    rows: tuple[Row, ...],
    phases: list[str],
    field: str,
    colors: dict[tuple[str, str, str], Any],
) -> None:
    from matplotlib.ticker import FuncFormatter

    tops = dict.fromkeys(phases, 0.0)
    for key, color in colors.items():
        heights = dict.fromkeys(phases, 0.0)
        for row in rows:
            if (row.axis, row.kind, row.dtype) == key:
                heights[row.phase] += getattr(row, field)
        axes.bar(
            range(len(phases)),
            list(heights.values()),
            bottom=list(tops.values()),
            width=0.62,
            color=color,
            edgecolor="white",
            linewidth=0.6,
            label=" ".join(key),
        )
        for phase in phases:
            tops[phase] += heights[phase]
    for i, top in enumerate(tops.values()):
        axes.annotate(
            format_bytes(top) if top else "0",
            (i, top),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=INK,
        )
    labels = [phase.replace("+", "\n+ ").replace(" gather", "\ngather") for phase in phases]
    axes.set_xticks(range(len(phases)), labels, fontsize=8)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.tick_params(axis="y", labelsize=8)
    axes.set_ylim(0, 1.12 * max(tops.values(), default=1.0) or 1.0)
    quiet(axes)
