"""The inputs of a program of which a plan reads one part alone: a device need not be given the
rest."""

from __future__ import annotations

from zeroxla.program.trace import Operand, Value
from zeroxla.split.atoms import expand, pieces_of
from zeroxla.split.holdings import Holding, Kind
from zeroxla.split.ways import AxisPlan


def parts_read(plan: AxisPlan, parts: int) -> dict[Value, Holding]:
    """Return the part in which each input is read, for the inputs that are read in one part alone.

    Such a part is a run of a dim, so that a sharding can say which elements it has.

    Args:
      plan: the plan.
      parts: the length of the axis.
    """
    found: dict[Value, set[Holding]] = {v: set() for v in plan.program.inputs}
    source = {v: v for v in plan.program.inputs}

    def read(operand: Operand, *wants: Holding) -> None:
        if isinstance(operand, Value) and operand in source:
            found[source[operand]].update(wants)

    for eq, way in plan.steps:
        if eq.name == "optimization_barrier":  # It passes on every holding.
            pairs = zip(eq.inputs, eq.outputs, strict=True)
            source.update((v, source[x]) for x, v in pairs if isinstance(x, Value) and x in source)
            continue
        for operand, wants in zip(eq.inputs, way.needs, strict=True):
            read(operand, *wants)
    for operand, want in zip(plan.program.outputs, plan.outputs, strict=True):
        read(operand, want)
    alone = {v: next(iter(wants)) for v, wants in found.items() if len(wants) == 1}
    return {v: held for v, held in alone.items() if _is_run(plan, v, held, parts)}


def _is_run(plan: AxisPlan, value: Value, held: Holding, parts: int) -> bool:
    """Return whether a holding is a part, and the parts are equal runs that follow each other."""
    if held.kind is not Kind.PART or held.dim is None:
        return False
    first = expand(plan.flow.dims[value][held.dim])[0]
    return first is held.atom and not pieces_of(first) and first.size % parts == 0
