"""Draws how axes split a model: the arrays of its modules in order, and what travels between."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from zeroxla.inspect.pictures.figures import COLORS, FRAME, INK, finish, new_figure
from zeroxla.program.report import format_bytes
from zeroxla.split.axis_report import AxisReport, in_words
from zeroxla.split.axis_scopes import AxisMove, ScopeRow
from zeroxla.split.holdings import COPIES, SUMMANDS, WHOLE, Holding, Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 40
"""The most rows in a panel: the first ones."""
_DIM_COLORS = (COLORS[0], COLORS[2], COLORS[1], COLORS[7], COLORS[3], COLORS[6])
_LEAF_NAMES = ("kernel", "embedding", "scale")
_COLORS = {WHOLE: "#8A8A8A", COPIES: "#C9C9C9", SUMMANDS: COLORS[5]}
# Places across a panel, in inches.
_ARRAY, _SHAPE, _LEAF, _LEAF_SHAPE, _WIDTH = 1.75, 3.35, 5.55, 6.4, 8.4
_ARRAY_WIDTH, _LEAF_WIDTH = 1.5, 0.75
_ROW, _MOVE, _HEIGHT = 0.29, 0.25, 0.17


def plot_axes(reports: Any, *, path: str | os.PathLike | None = None) -> Figure:
    """Draw how each axis splits a model: the arrays of its modules in order, and what travels.

    A box is a whole array, and its filled part is what each device holds; the colour says how. To
    its right stands the leaf that is read to compute it. An arrow is a conversion, with the bytes
    that a device receives in forward and in backward each time. A shaded region runs several times:
    it is the body of a loop, or blocks that are alike.

    Args:
      reports: a step that has been given the shapes of its batches (`step.init`,
        `step.abstract_state`), what its `describe()` returns, an `AxisReport`, or several, as
        `zeroxla.plan(...).axes.reports`.
      path: file to save to (the suffix names the format), or None.

    Returns:
      The figure, with one panel for each axis. Small arrays, and conversions of less than 1% of all
      bytes, are not drawn.

    Raises:
      ValueError: no axis splits the work on one row.
    """
    found = _reports_of(reports)
    if not found:
        raise ValueError(
            "no axis splits the work on one row here; give a step on a mesh with one, as "
            "zeroxla.make_mesh(tensor=2)"
        )
    heights = [_height(report.scopes[:MOST_ROWS]) for report in found]
    most = max(heights)
    figure = new_figure(width=0.3 + _WIDTH * len(found), height=1.0 + most)
    for i, report in enumerate(found):
        axes = figure.add_subplot(1, len(found), i + 1)
        axes.set_xlim(0, _WIDTH)
        axes.set_ylim(most, -0.3)
        axes.axis("off")
        _panel(axes, report)
    _legend(figure, found)
    return finish(figure, path)


def _reports_of(given: Any) -> tuple[AxisReport, ...]:
    if isinstance(given, AxisReport):
        return (given,)
    if isinstance(given, Sequence):
        return tuple(given)
    described = given.describe() if hasattr(given, "describe") else given
    return tuple(getattr(described, "axes", ()))


def _height(rows: Sequence[ScopeRow]) -> float:
    moves = (_counted(each) for row in rows for each in (row.before, row.after))
    return _ROW * len(rows) + _MOVE * sum(map(len, moves))


def _counted(moves: Iterable[AxisMove]) -> list[tuple[AxisMove, int]]:
    """Return the moves, each with the number of those that stand together and are alike."""
    return [(move, len(list(alike))) for move, alike in itertools.groupby(moves)]


def _panel(axes: Axes, report: AxisReport) -> None:
    shown = report.scopes[:MOST_ROWS]
    title = f"{report.axis}={report.length}: a device receives {format_bytes(report.received)}"
    axes.set_title(f"{title} in a micro-batch", fontsize=10.5, color=INK, loc="left", weight="bold")
    for x, name in ((_ARRAY, "array, and the part of a device"), (_LEAF, "leaf")):
        axes.text(x, -0.12, name, fontsize=8, color=INK, va="center", style="italic")
    top = 0.0
    for times, group in itertools.groupby(shown, key=lambda row: row.times):
        rows = tuple(group)
        if times > 1:
            outside = _MOVE * len(_counted(move for move in rows[0].before if move.outside))
            _region(axes, top + outside, _height(rows) - outside, times)
        for row in rows:
            top = _draw_row(axes, row, report.length, top)
    if hidden := len(report.scopes) - len(shown):
        text = f"{hidden} later rows are not drawn"
        axes.text(0.1, top + 0.1, text, fontsize=8, color=INK, va="center")


def _region(axes: Axes, top: float, height: float, times: int) -> None:
    from matplotlib.patches import Rectangle

    box = Rectangle((0, top), _WIDTH, height, facecolor="#F3F5F8", edgecolor="none", zorder=0)
    axes.add_patch(box)
    right = _WIDTH - 0.08
    axes.text(right, top + _ROW / 2, f"{times} times", fontsize=8.5, color=INK, ha="right",
              va="center", weight="bold")  # fmt: skip


def _draw_row(axes: Axes, row: ScopeRow, length: int, top: float) -> float:
    """Draw a row and its conversions; return where the next one begins."""
    for move, count in _counted(row.before):
        _draw_move(axes, move, count, top)
        top += _MOVE
    middle = top + _ROW / 2
    axes.text(0.1, middle, _short(row.name), fontsize=8.5, color=INK, va="center")
    _box(axes, _ARRAY, middle, _ARRAY_WIDTH, row.held, length)
    shape = _shape_in_words(row.shape, row.held, length)
    axes.text(_SHAPE, middle, shape, fontsize=8, color=INK, va="center")
    if row.leaf is not None:
        _box(axes, _LEAF, middle, _LEAF_WIDTH, row.leaf.held, length)
        shape = _shape_in_words(row.leaf.shape, row.leaf.held, length)
        axes.text(_LEAF_SHAPE, middle, shape, fontsize=8, color=INK, va="center")
    top += _ROW
    for move, count in _counted(row.after):
        _draw_move(axes, move, count, top)
        top += _MOVE
    return top


def _box(axes: Axes, x: float, middle: float, width: float, held: Holding, length: int) -> None:
    """Draw a frame for the whole array, and fill what a device holds."""
    from matplotlib.patches import Rectangle

    bottom = middle - _HEIGHT / 2
    share = 1 / length if held.kind is Kind.PART else 1.0
    axes.add_patch(
        Rectangle((x, bottom), width, _HEIGHT, facecolor="white", edgecolor=FRAME, linewidth=0.8)
    )
    axes.add_patch(
        Rectangle(
            (x, bottom), width * share, _HEIGHT,
            facecolor=_color(held), edgecolor="white", linewidth=0,
            hatch="////" if held.adds_up else None, label=in_words(held),
        )
    )  # fmt: skip


def _draw_move(axes: Axes, move: AxisMove, count: int, top: float) -> None:
    middle, x = top + _MOVE / 2, _ARRAY + 0.12
    axes.annotate(
        "",
        (x, top + _MOVE - 0.02),
        xytext=(x, top + 0.02),
        arrowprops={
            "arrowstyle": "-|>",
            "color": INK,
            "linewidth": 1.3,
            "shrinkA": 0,
            "shrinkB": 0,
        },
    )
    axes.text(x + 0.18, middle, _move_in_words(move, count), fontsize=8, color=INK, va="center",
              weight="bold")  # fmt: skip


def _move_in_words(move: AxisMove, count: int) -> str:
    found = []
    times = f"{count} x " if count > 1 else ""
    if move.forward:
        where = " in backward" if move.in_backward else ""
        found.append(f"{move.forward} {format_bytes(move.forward_bytes)}{where}")
    if move.backward:
        found.append(f"backward {move.backward} {format_bytes(move.backward_bytes)}")
    return times + "; ".join(found)


def _color(held: Holding) -> str:
    if held.dim is not None:
        return _DIM_COLORS[held.dim % len(_DIM_COLORS)]
    return _COLORS[held]


def _shape_in_words(shape: tuple[int, ...], held: Holding, length: int) -> str:
    parts = {held.dim: length} if held.kind is Kind.PART else {}
    sizes = [f"{n}/{parts[d]}" if d in parts else str(n) for d, n in enumerate(shape)]
    words = " x ".join(sizes) or "scalar"
    return f"sum of {length}: {words}" if held == SUMMANDS else words


def _short(name: str) -> str:
    """Return the last two parts of a path, without methods and the names of leaves."""
    parts = [part for part in name.split("/") if part not in _LEAF_NAMES and "." not in part]
    parts = [part for part, _ in itertools.groupby(parts)]
    return "/".join(parts[-2:]) or name


def _legend(figure: Figure, reports: Iterable[AxisReport]) -> None:
    from matplotlib.patches import Patch

    rows = [row for report in reports for row in report.scopes[:MOST_ROWS]]
    used = [row.held for row in rows] + [row.leaf.held for row in rows if row.leaf]
    order = sorted(set(used), key=lambda held: (held.dim is None, held.dim or 0, held.kind.value))
    handles = [
        Patch(
            facecolor=_color(held), edgecolor="white", linewidth=0, label=in_words(held),
            hatch="////" if held.adds_up else None,
        )
        for held in order
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower left", ncols=6, frameon=False, fontsize=8.5)
