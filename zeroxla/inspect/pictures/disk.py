"""Draws a step whose state is on disk: a time line of reads, updates and writes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import jax

from zeroxla.inspect.pictures.figures import COLORS, INK, finish, new_figure, quiet
from zeroxla.offload.disk.disk_array import DiskArray
from zeroxla.program.report import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KINDS = ("read", "update", "write")


def plot_disk(state: Any, *, path: str | os.PathLike | None = None) -> Figure:
    """Draw how a step used the disk.

    Args:
      state: the `TrainState` that the step returned, with parameters or optimizer state on disk.
      path: file to save to (the suffix names the format), or None.

    Returns:
      The figure, for this process: the blocks read and written, and the sub-groups updated, over
      the step's seconds.

    Raises:
      ValueError: nothing of the state is on disk, or no step has been taken.
    """
    arrays = [x for x in jax.tree.leaves((state.params, state.opt_state)) if _is_on_disk(x)]
    if not arrays:
        raise ValueError(
            "nothing of this state is on disk; set ZeroConfig(offload=Offload(optimizer='disk'))"
        )
    accesses = list(arrays[0].file.blocks.accesses)
    if not any(x.kind == "update" for x in accesses):
        raise ValueError("no step has been taken with this state on disk; draw what one returned")
    figure = new_figure(width=9, height=2.4)
    axes = figure.add_subplot()
    start = min(x.begun for x in accesses)
    labels = []
    for row, (kind, color) in enumerate(zip(_KINDS, COLORS, strict=False)):
        mine = [x for x in accesses if x.kind == kind]
        spans = [(x.begun - start, x.ended - x.begun) for x in mine]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=color, alpha=0.5)
        moved = sum(x.nbytes for x in mine)
        labels.append(f"{kind}, {format_bytes(moved)}" if moved else kind)
    quiet(axes)
    axes.grid(axis="y", visible=False)
    axes.set_yticks(range(len(_KINDS)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of the step", color=INK)
    return finish(figure, path)


def _is_on_disk(x: Any) -> bool:
    return isinstance(x, DiskArray)
