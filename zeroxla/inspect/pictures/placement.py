"""Draws a placement: bars of bytes per device, and a grid of each leaf's pieces."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.inspect.pictures.figures import COLORS, FRAME, INK, finish, new_figure, quiet
from zeroxla.program.report import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_REST = "#9A9A9A"
_MAX_DEVICES = 32


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    """One array: its place in the tree, and the part of it that each device holds.

    `held` maps a device to (left, width, bottom, height) in the unit square. The first split dim
    goes across, the second down. A whole array is (0, 1, 0, 1).
    """

    group: str
    name: str
    shape: tuple[int, ...]
    num_bytes: int
    held: dict[Any, tuple[float, float, float, float]]

    def bytes_on(self, device: Any) -> float:
        _, width, _, height = self.held.get(device, (0, 0, 0, 0))
        return self.num_bytes * width * height


def plot_placement(
    tree: Any,
    mesh: jax.sharding.Mesh,
    *,
    max_leaves: int = 20,
    path: str | os.PathLike | None = None,
) -> Figure:
    """Draw the placement of arrays: the bytes on each device, and each leaf's piece on each device.

    Args:
      tree: a `TrainState`, or any pytree of arrays or of `jax.ShapeDtypeStruct`s with shardings.
        The bars of a state are split by its fields, and the pieces are those of its `params`. Bars
        and pieces of another tree go by its top-level names.
      mesh: the arrays' mesh. Each of its first 32 devices has a column.
      max_leaves: the number of leaves that are drawn, the largest ones. The bars count all leaves.
      path: file to save to (the suffix names the format), or None.

    Returns:
      The figure. In the grid a box is a whole leaf, and its filled part is the device's piece.

    Raises:
      ValueError: the tree holds no arrays with shardings.
    """
    leaves = _leaves(tree)
    if not leaves:
        raise ValueError("the tree holds no arrays with a sharding, so there is nothing to draw")
    devices = list(mesh.devices.flat)[:_MAX_DEVICES]
    columns = _columns(mesh, len(devices))
    leaves, colors = _colored(leaves)
    drawn = [leaf for leaf in leaves if leaf.group == "params"] if _is_state(tree) else leaves
    shown = sorted(drawn, key=lambda leaf: -leaf.num_bytes)[:max_leaves]
    shown = [leaf for leaf in drawn if any(leaf is other for other in shown)]

    figure = new_figure(width=5.2 + 0.62 * len(devices), height=3.4 + 0.24 * len(shown))
    bars, grid = figure.subplots(2, 1, sharex=True, height_ratios=[1.0, 0.12 + 0.1 * len(shown)])
    _bars(bars, leaves, devices, columns, colors)
    _grid(grid, shown, devices, columns, colors)
    for axes in (bars, grid):
        axes.set_xlim(columns[0] - 0.7, columns[-1] + 0.7)
    _device_labels(grid, mesh, columns)
    title = "Which device holds what"
    if mesh.size > len(devices):
        title += f" (the first {len(devices)} of {mesh.size} devices)"
    figure.suptitle(title, x=0.02, ha="left", fontsize=12, color=INK, weight="bold")
    hidden = len(drawn) - len(shown)
    note = f"; {hidden} smaller leaves are not drawn" if hidden else ""
    figure.supxlabel(
        f"a box is one whole leaf, the filled part is what that device holds{note}",
        fontsize=8,
        color=INK,
    )
    return finish(figure, path)


def _is_state(tree: Any) -> bool:
    return hasattr(tree, "params") and hasattr(tree, "opt_state")


def _leaves(tree: Any) -> list[_Leaf]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = [
        (tuple(jax.tree_util.keystr((key,), simple=True) for key in path), leaf)
        for path, leaf in flat
        if getattr(leaf, "sharding", None) is not None and not _is_key(leaf)
    ]
    # A lone wrapper ({"params": ...}) names nothing, so group by the first level that branches.
    depth = 0
    while named and all(len(p) > depth + 1 for p, _ in named):
        if len({path[depth] for path, _ in named}) > 1:
            break
        depth += 1
    leaves = []
    for path, leaf in named:
        held = {
            device: _piece(index, leaf.shape)
            for device, index in leaf.sharding.devices_indices_map(leaf.shape).items()
        }
        group = path[depth] if len(path) > depth else "array"
        name = "/".join(path[1:] if _is_state(tree) else path[depth:]) or "array"
        leaves.append(
            _Leaf(
                group=group,
                name=name,
                shape=tuple(leaf.shape),
                num_bytes=leaf.size * leaf.dtype.itemsize,
                held=held,
            )
        )
    return leaves


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _piece(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[float, float, float, float]:
    spans = []
    for part, size in zip(index, shape, strict=True):
        start, stop, _ = part.indices(size)
        if stop - start < size:
            spans.append((start / size, (stop - start) / size))
    (left, width), (bottom, height), *deeper = [*spans, (0.0, 1.0), (0.0, 1.0)]
    # Only two dims can be drawn. If more are split, they reduce the height.
    for _, share in deeper[: len(spans) - 2] if len(spans) > 2 else []:
        height *= share
    return left, width, bottom, height


def _colored(leaves: list[_Leaf]) -> tuple[list[_Leaf], dict[str, str]]:
    """Give each group a colour, `params` first, then by size. Small and surplus groups are merged
    into one, "others"."""
    sizes: dict[str, int] = {}
    for leaf in leaves:
        sizes[leaf.group] = sizes.get(leaf.group, 0) + leaf.num_bytes
    smallest = sum(sizes.values()) / 1000
    ranked = sorted(sizes, key=lambda group: (group != "params", -sizes[group]))
    named = [group for group in ranked if sizes[group] >= smallest][: len(COLORS)]
    colors = dict(zip(named, COLORS, strict=False))
    if len(named) < len(ranked):
        colors["others"] = _REST
    leaves = [
        leaf if leaf.group in colors else dataclasses.replace(leaf, group="others")
        for leaf in leaves
    ]
    return leaves, colors


def _columns(mesh: jax.sharding.Mesh, num_devices: int) -> list[float]:
    """Return each device's place: neighbours on the innermost axis together, then a gap."""
    inner = mesh.devices.shape[-1]
    return [i + 0.6 * (i // inner) for i in range(num_devices)]


def _bars(
    axes: Axes,
    leaves: list[_Leaf],
    devices: list[Any],
    columns: list[float],
    colors: dict[str, str],
) -> None:
    from matplotlib.ticker import FuncFormatter

    tops = [0.0] * len(devices)
    for group, color in colors.items():
        heights = [
            sum(leaf.bytes_on(device) for leaf in leaves if leaf.group == group)
            for device in devices
        ]
        axes.bar(columns, heights, bottom=tops, width=0.8, color=color, label=group)
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    for x, top in zip(columns, tops, strict=True):
        axes.annotate(
            format_bytes(top),
            (x, top),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=7,
            color=INK,
        )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.tick_params(axis="y", labelsize=8)
    axes.tick_params(axis="x", length=0, labelbottom=False)
    axes.set_ylim(0, 1.15 * max(tops) or 1.0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    whole = format_bytes(sum(leaf.num_bytes for leaf in leaves))
    axes.set_title(
        f"bytes held by each device, of {whole} in all", fontsize=10, color=INK, loc="left"
    )
    quiet(axes)


def _grid(
    axes: Axes,
    leaves: list[_Leaf],
    devices: list[Any],
    columns: list[float],
    colors: dict[str, str],
) -> None:
    from matplotlib.patches import Rectangle

    box = 0.8
    for row, leaf in enumerate(leaves):
        for x, device in zip(columns, devices, strict=True):
            corner = (x - box / 2, row - box / 2)
            axes.add_patch(
                Rectangle(corner, box, box, facecolor="#F6F6F6", edgecolor=FRAME, linewidth=0.6)
            )
            if device in leaf.held:
                left, width, bottom, height = leaf.held[device]
                axes.add_patch(
                    Rectangle(
                        (corner[0] + box * left, corner[1] + box * bottom),
                        box * width,
                        box * height,
                        facecolor=colors[leaf.group],
                        edgecolor="none",
                        label=f"{leaf.name} on {device.id}",
                    )
                )
        shares = {round(w * h, 6) for _, w, _, h in leaf.held.values()}
        if shares == {1.0}:
            share = "whole on each device"
        elif len(shares) == 1 and (parts := 1 / next(iter(shares))) == round(parts):
            share = f"1/{round(parts)} on each device"
        else:
            share = "unequal pieces"
        axes.text(
            columns[-1] + 0.8,
            row,
            f"{format_bytes(leaf.num_bytes)}, {share}",
            va="center",
            fontsize=8,
            color=INK,
        )
    labels = [f"{leaf.name}  {'x'.join(map(str, leaf.shape)) or 'scalar'}" for leaf in leaves]
    axes.set_yticks(range(len(leaves)), labels, fontsize=8)
    axes.set_ylim(len(leaves) - 0.4, -0.6)
    axes.tick_params(axis="both", length=0)
    axes.set_title("pieces of each leaf", fontsize=10, color=INK, loc="left")
    for spine in axes.spines.values():
        spine.set_visible(False)


def _device_labels(axes: Axes, mesh: jax.sharding.Mesh, columns: list[float]) -> None:
    inner = mesh.devices.shape[-1]
    axes.set_xticks(columns, [f"{mesh.axis_names[-1]} {i % inner}" for i in range(len(columns))])
    axes.tick_params(axis="x", labelsize=7, labelrotation=0)
    outer = mesh.axis_names[:-1]
    for first in range(0, len(columns), inner):
        place = np.unravel_index(first, mesh.devices.shape)[:-1]
        label = ", ".join(f"{name} {i}" for name, i in zip(outer, place, strict=True))
        last = min(first + inner, len(columns)) - 1
        axes.annotate(
            label,
            ((columns[first] + columns[last]) / 2, 0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, -24),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            weight="bold",
            color=INK,
        )
