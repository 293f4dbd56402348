"""Checks that a plan splits some work: otherwise devices along the axis only repeat each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from zeroxla.mesh.axes import EXPERT
from zeroxla.program.flops import all_product_flops
from zeroxla.program.primitives import READS_OF_LEAVES
from zeroxla.program.trace import Equation
from zeroxla.split.axis_roles import is_matrix
from zeroxla.split.conversions import RanEquation, events_of
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.ways import AxisPlan, Way

_ALONG = {
    "tensor": "a dim of their leaf, whose size must divide by {length}",
    "context": "a dim of the sequence, which an array of the batch must bring, with more than "
    "{length} positions (no size helps a dim that the model makes itself, as by linspace)",
    "expert": "the rows or a bank of experts, whose number must divide by {length}",
}
_MOST_NAMED = 4

MOST_REPEATED = 1.3
"""How many times as many FLOPs a device may do as with `device` in the axis' place, before a
warning says so."""


def check_splits(plan: AxisPlan, axis: str, length: int) -> None:
    """Check that some product with a leaf is split, and with a bank of experts if the model has one
    and the axis is theirs; programs without any pass.

    Args:
      plan: the plan.
      axis, length: the axis.

    Raises:
      ValueError: every device along the axis would compute all of them.
    """
    found = list(_products(plan))
    along = _ALONG[axis].format(length=length)
    if found and not any(way.is_split for _, _, way in found):
        raise ValueError(
            f"{axis}={length} splits none of the model's products: {length} devices would each "
            f"compute all of it. It splits products along {along}; "
            f"there are {_in_words(eq for eq, _, _ in found)}. Use other sizes (of a dim that is "
            "read in chunks, the axis must divide their number or their length), or "
            f"{axis}=1"
        )
    banks = [(eq, way) for eq, flow, way in found if _has_bank(eq, flow)]
    if axis == EXPERT and banks and not any(way.is_split for _, way in banks):
        raise ValueError(
            f"{axis}={length} splits no product with a bank of experts: {length} devices would "
            "each hold and compute all experts. The number of experts must divide by "
            f"{length}, and the rows of `ragged_dot` must have no batch dims; there are "
            f"{_in_words(eq for eq, _ in banks)}. Use another {axis}=, or {axis}=1"
        )


def repeated_work(plan: AxisPlan, axis: str, length: int) -> str | None:
    """Return a warning if devices along the axis do much more work together than is to be done;
    None if they do not."""
    with_axis, whole, repeated = 0.0, 0.0, Counter[str]()
    for event in events_of(plan, length):
        if isinstance(event, RanEquation) and event.way.body is None:
            flops = event.times * all_product_flops(event.equation)
            whole += flops
            with_axis += flops / (length if event.way.is_split else 1)
            if not event.way.is_split and flops:
                repeated[_of_arrays(event.equation)] += int(flops)
    without = whole / length
    if with_axis <= MOST_REPEATED * without:
        return None
    named = "; ".join(words for words, _ in repeated.most_common(_MOST_NAMED))
    return (
        f"{axis}={length}: a device computes {with_axis:,.0f} FLOPs of products in a micro-batch's "
        f"forward, {with_axis / without:.2f} times the {without:,.0f} that it would with the same "
        f"devices along `device`. Devices along {axis!r} repeat {named}. It pays only if one "
        f"device has no room for a row; else use {axis}=1"
    )


def _products(plan: AxisPlan) -> Iterator[tuple[Equation, DimsFlow, Way]]:
    """Yield the equations that read matrices of leaves, with their flow and their way."""
    for eq, way in plan.steps:
        if way.body is not None and way.backward is None:
            yield from _products(way.body)
        elif eq.name in READS_OF_LEAVES:
            of_leaves = (v for v in eq.values if plan.flow.made_of_leaves(v))
            if any(is_matrix(v.aval.shape) for v in of_leaves):
                yield eq, plan.flow, way


def _has_bank(eq: Equation, flow: DimsFlow) -> bool:
    """Return whether an equation multiplies with a bank of experts."""
    if eq.name == "ragged_dot_general":
        return flow.made_of_leaves(eq.inputs[1])
    if eq.name != "dot_general":
        return False
    _, batch = eq.params["dimension_numbers"]
    return any(batch) and any(map(flow.made_of_leaves, eq.inputs))


def _in_words(equations: Iterator[Equation]) -> str:
    words = list(dict.fromkeys(map(_of_arrays, equations)))
    more = f" and {len(words) - _MOST_NAMED} more" if len(words) > _MOST_NAMED else ""
    return f"{'; '.join(words[:_MOST_NAMED])}{more}"


def _of_arrays(eq: Equation) -> str:
    return f"{eq.name} of {' and '.join(v.aval.str_short() for v in eq.values)}"
