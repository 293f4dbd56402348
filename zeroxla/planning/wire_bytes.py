"""What a traced program sends: collectives as they were written, without compiling anything."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from zeroxla.inspect.comms import CommsReport, Row
from zeroxla.inspect.phases import phase_of
from zeroxla.inspect.traffic import received_bytes
from zeroxla.mesh.axes import NODE, PIPE
from zeroxla.program import compat
from zeroxla.program.trace import Equation, Program, flatten

KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "bool": "pred"}

Branches = tuple[tuple[int, int], ...]


def comms_of(program: Program, mesh_shape: dict[str, int], platform: str) -> CommsReport:
    """Report the collectives of a program, as `zeroxla.inspect.comms` does of a compiled one.

    What the compiler adds outside of `shard_map` (for an optimizer that needs it) is not there.

    Args:
      program: traced.
      mesh_shape: axis lengths, outermost first.
      platform: for which it is.
    """
    conditionals = itertools.count()

    def visit(program: Program, path: str, count: int, branches: Branches) -> Iterator[Row]:
        for eq in program.equations:
            here = "/".join(filter(None, (path, str(eq.name_stack), eq.name)))
            if eq.name in KINDS:
                if (row := _row(eq, here, mesh_shape, count, branches)) is not None:
                    yield row
            elif eq.name == "cond":
                which = next(conditionals)
                for i, branch in enumerate(compat.branches_for(eq.params, platform)):
                    yield from visit(body_of(branch), here, count, (*branches, (which, i)))
            else:
                for body, turns in bodies(eq):
                    yield from visit(body, here, count * turns, branches)

    return CommsReport(mesh_shape=mesh_shape, collectives=tuple(visit(program, "", 1, ())))


def bodies(eq: Equation) -> list[tuple[Program, int]]:
    """Return the programs inside of an equation, branches aside, and how often each runs; loops
    whose number of turns depends on data run once."""
    if eq.name == "scan":
        return [(body_of(eq.params["jaxpr"]), eq.params["length"])]
    if eq.name == "while":
        return [(body_of(eq.params["body_jaxpr"]), 1)]
    if eq.name == "shard_map":
        return [(body_of(eq.params["jaxpr"]), 1)]
    return []


def body_of(jaxpr: Any) -> Program:
    """Return the flat program of a body; what is only recomputed or differentiated is inlined."""
    return flatten(jaxpr, compat.forward_jaxpr)


def local_of(program: Program) -> Program:
    """Return what each device runs, of a program with one `shard_map`."""
    (mapped,) = (eq for eq in program.equations if eq.name == "shard_map")
    return body_of(mapped.params["jaxpr"])


def axes_of(eq: Equation) -> tuple[str, ...]:
    """Return the mesh axes of a collective."""
    names = eq.params.get("axis_name", eq.params.get("axes", ()))
    names = (names,) if isinstance(names, str) else names
    return tuple(name for name in names if isinstance(name, str))


def _row(
    eq: Equation, path: str, mesh_shape: dict[str, int], count: int, branches: Branches
) -> Row | None:
    axes = [axis for axis in mesh_shape if axis in axes_of(eq) and mesh_shape[axis] > 1]
    if not axes:
        return None
    kind, size = KINDS[eq.name], math.prod(mesh_shape[axis] for axis in axes)
    arrays = [v.aval for v in (eq.outputs if kind == "all-gather" else eq.values)]
    num_bytes = sum(x.size * x.dtype.itemsize for x in arrays)
    received = received_bytes(kind, num_bytes, size)
    if kind == "collective-permute":
        size = 2
    return Row(
        axis="+".join(axes),
        kind=kind,
        phase=phase_of(path, kind),
        dtype="+".join(dict.fromkeys(_dtype(x.dtype) for x in arrays)),
        group_size=size,
        count=count,
        elements=sum(x.size for x in arrays),
        received_bytes=received * count,
        cross_host_bytes=_between_hosts(axes, mesh_shape, received) * count,
        branches=branches,
        conditional=bool(branches),
        op_name=path,
    )


def _between_hosts(axes: Sequence[str], mesh_shape: dict[str, int], received: float) -> float:
    """Return what one host sends to others while each device receives so much: all of it where
    groups have one device in a host, else, around a ring, what its last device passes on."""
    outer = [axis for axis in axes if axis in (NODE, PIPE)]
    if not outer:
        return 0.0
    inner = [n for axis, n in mesh_shape.items() if axis not in (*axes, NODE, PIPE)]
    return received * math.prod(inner)


def _dtype(dtype: Any) -> str:
    """Return HLO's name of a dtype."""
    name = str(dtype)
    if name in _DTYPES:
        return _DTYPES[name]
    return name.replace("uint", "u").replace("int", "s") if "int" in name else name
