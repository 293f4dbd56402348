"""Reads `replica_groups`, in every form that XLA prints: which devices exchange with each other."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

import numpy as np

_GROUPS = re.compile(
    r"replica_groups=(?:"
    r"\{(?P<lists>(?:\{[\d,]*\},?)*)\}"
    r"|\[(?P<tile>[\d,]+)\]<=\[(?P<reshape>[\d,]+)\](?:T\((?P<permute>[\d,]+)\))?"
    r"|mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?P<ids>(?:[^()]|\([^()]*\))*)\))? "
    r"\{(?P<axes>[^}]*)\})"
)
_MESH_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")
_GROUP_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")


def replica_groups(attributes: str) -> tuple[tuple[int, ...], ...]:
    """Expand a `replica_groups=` attribute into lists of device positions.

    Args:
      attributes: an instruction's attributes. XLA prints groups in three forms: lists
        `{{0,1},{2,3}}`, a tiled iota `[4,2]<=[2,4]T(1,0)`, or axes of a mesh
        `mesh['a'=2,'b'=4] {'b'}`. The third form may have `device_ids=(...)` for a permuted mesh,
        and sub-axes `'b':(1)2` (size 2 after a major part of size 1).

    Returns:
      The groups, in order; () if the attribute is missing or is `{}`, which means all devices.

    Raises:
      ValueError: the groups are in another form.

    Example:
      >>> replica_groups("replica_groups=[4,2]<=[2,4]T(1,0)")
      ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    match = _GROUPS.search(attributes)
    if match is None:
        if "replica_groups=" in attributes:
            raise ValueError(f"replica_groups in a form this reader does not know: {attributes}")
        return ()
    if match["tile"]:
        dims, reshape = _ints(match["tile"]), _ints(match["reshape"])
        ids = _iota(reshape, _ints(match["permute"] or "")).reshape(dims)
    elif match["mesh"]:
        ids = _mesh_groups(match["mesh"], match["ids"], match["axes"])
    else:
        return tuple(lists(match["lists"]))
    return tuple(tuple(int(i) for i in group) for group in ids)


def lists(text: str) -> Iterator[tuple[int, ...]]:
    """Yield the lists of integers in a text such as `{0,1},{2,3}`."""
    for group in re.findall(r"\{([\d,]*)\}", text):
        yield _ints(group)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _iota(reshape: tuple[int, ...], permute: tuple[int, ...]) -> np.ndarray:
    array = np.arange(math.prod(reshape)).reshape(reshape)
    return array.transpose(permute or range(len(reshape)))


def _mesh_groups(mesh: str, device_ids: str | None, axes: str) -> np.ndarray:
    """Return device positions as [groups, members].

    Args:
      mesh: the mesh's axes and sizes, `'a'=2,'b'=4`.
      device_ids: the devices in the mesh's order; None for 0, 1, 2, ...
      axes: the axes or sub-axes whose devices exchange. They vary fastest, in their order.
    """
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(mesh)}
    parts = [
        (name, int(pre or 1), int(size or sizes[name]))
        for name, pre, size in _GROUP_AXIS.findall(axes)
    ]
    if device_ids is None:
        ids = np.arange(math.prod(sizes.values()))
    elif iota := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", device_ids):
        ids = _iota(_ints(iota[1]), _ints(iota[2] or ""))
    else:
        ids = np.array(_ints(device_ids))
    # Cut every mesh axis at the borders of its sub-axes: each part becomes a dim.
    dims, position = [], {}
    for name, size in sizes.items():
        cuts = {1, size}
        for part, pre, length in parts:
            if part == name:
                cuts |= {pre, pre * length}
        borders = sorted(cuts)
        for low, high in itertools.pairwise(borders):
            position[name, low] = len(dims)
            dims.append(high // low)
        if size == 1:
            position[name, 1] = len(dims)
            dims.append(1)
    grouped = [position[name, pre] for name, pre, _ in parts]
    others = [dim for dim in range(len(dims)) if dim not in grouped]
    members = math.prod(dims[dim] for dim in grouped)
    return ids.reshape(dims).transpose(others + grouped).reshape(-1, members)
