"""The collectives that a traced program was written with, and the bytes that they move.

Nothing is compiled: a collective that the compiler adds is not here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from zeroxla.inspect.comms_report import CommsReport, Row
from zeroxla.inspect.traffic import received_bytes
from zeroxla.mesh.axes import NODE, PIPE, nodes_along
from zeroxla.program.phases import phase_of
from zeroxla.program.primitives import HLO_KINDS
from zeroxla.program.trace import Equation, Program
from zeroxla.program.walk import Visit, walk

_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "bool": "pred"}


def comms_of(
    program: Program,
    mesh_shape: dict[str, int],
    platform: str,
    devices_per_node: int | None = None,
) -> CommsReport:
    """Report a traced program's collectives, as `zeroxla.inspect.comms` does for a compiled one.

    Collectives that the compiler adds outside of `shard_map` (some optimizers need them) are
    missing.

    Args:
      program: a traced program.
      mesh_shape: axis lengths, outermost first.
      platform: the platform that the program is compiled for.
      devices_per_node: the number of devices of a node. None means that the axes after `node` are
        a node.
    """
    inside = math.prod(n for axis, n in mesh_shape.items() if axis not in (NODE, PIPE))
    node_size = devices_per_node or inside
    collectives = (visit for visit in walk(program, platform) if visit.equation.name in HLO_KINDS)
    rows = (_row(visit, mesh_shape, node_size) for visit in collectives)
    return CommsReport(
        mesh_shape=mesh_shape, collectives=tuple(row for row in rows if row is not None)
    )


def axes_of(eq: Equation) -> tuple[str, ...]:
    """Return the mesh axes of a collective."""
    names = eq.params.get("axis_name", eq.params.get("axes", ()))
    names = (names,) if isinstance(names, str) else names
    return tuple(name for name in names if isinstance(name, str))


def _row(visit: Visit, mesh_shape: dict[str, int], node_size: int) -> Row | None:
    """Return a collective's row; None if it is over axes of one device."""
    eq, count = visit.equation, visit.count
    axes = [axis for axis in mesh_shape if axis in axes_of(eq) and mesh_shape[axis] > 1]
    if not axes:
        return None
    kind, size = HLO_KINDS[eq.name], math.prod(mesh_shape[axis] for axis in axes)
    arrays = [v.aval for v in (eq.outputs if kind == "all-gather" else eq.values)]
    num_bytes = sum(x.size * x.dtype.itemsize for x in arrays)
    received = received_bytes(kind, num_bytes, size)
    if kind == "collective-permute":
        size = 2
    return Row(
        axis="+".join(axes),
        kind=kind,
        phase=phase_of(visit.path, kind),
        dtype="+".join(dict.fromkeys(_dtype(x.dtype) for x in arrays)),
        group_size=size,
        count=count,
        elements=sum(x.size for x in arrays),
        received_bytes=received * count,
        cross_host_bytes=leaving_share(axes, mesh_shape, node_size, kind) * received * count,
        branches=visit.branches,
        conditional=bool(visit.branches),
        op_name=visit.path,
    )


def leaving_share(
    axes: Sequence[str], mesh_shape: Mapping[str, int], node_size: int, kind: str
) -> float:
    """Return the bytes that one host sends to others, for each byte that a device receives.

    A group with one device in each host sends all of it between hosts. In a ring over several
    devices of each host, only the bytes cross that a host's last device passes on. In an all-to-all
    each device sends to every device of the other hosts.
    """
    size = math.prod(mesh_shape[axis] for axis in axes)
    over = math.prod(nodes_along(mesh_shape, node_size, axis) for axis in axes)
    if over == 1:
        return 0.0
    inside = size // over
    if kind == "all-to-all":
        return node_size * (size - inside) / (size - 1)
    return node_size / inside


def _dtype(dtype: Any) -> str:
    """Return HLO's name of a dtype, such as "bf16" or "s32"."""
    name = str(dtype)
    if name in _DTYPES:
        return _DTYPES[name]
    return name.replace("uint", "u").replace("int", "s") if "int" in name else name
