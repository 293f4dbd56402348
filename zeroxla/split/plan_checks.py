"""Checks that a plan splits some work: otherwise devices along the axis only repeat each other."""

from __future__ import annotations

from collections.abc import Iterator

from zeroxla.program.primitives import READS_OF_LEAVES
from zeroxla.program.trace import Equation
from zeroxla.split.axis_roles import is_matrix
from zeroxla.split.ways import AxisPlan

_ALONG = {
    "tensor": "a dim of their leaf, whose size must divide by {length}",
    "context": "a dim of the sequence, which an array of the batch must bring, with more than "
    "{length} positions (no size helps a dim that the model makes itself, as by linspace)",
    "expert": "the rows or a bank of experts, whose number must divide by {length}",
}
_MOST_NAMED = 4


def check_splits(plan: AxisPlan, axis: str, length: int) -> None:
    """Check that some product with a leaf is split; programs without any pass.

    Raises:
      ValueError: every device along the axis would compute all of them.
    """
    found = list(_products(plan))
    if not found or any(is_split for _, is_split in found):
        return
    words = list(dict.fromkeys(_in_words(eq) for eq, _ in found))
    more = f" and {len(words) - _MOST_NAMED} more" if len(words) > _MOST_NAMED else ""
    raise ValueError(
        f"{axis}={length} splits none of the model's products: {length} devices would each compute "
        f"all of it. It splits products along {_ALONG[axis].format(length=length)}; "
        f"there are {'; '.join(words[:_MOST_NAMED])}{more}. Use other sizes (of a dim that is read "
        f"in chunks, the axis must divide their number or their length), or {axis}=1"
    )


def _products(plan: AxisPlan) -> Iterator[tuple[Equation, bool]]:
    """Yield the equations that read matrices of leaves, and whether each is split."""
    for eq, way in plan.steps:
        if way.body is not None and way.backward is None:
            yield from _products(way.body)
        elif eq.name in READS_OF_LEAVES:
            of_leaves = (v for v in eq.values if plan.flow.made_of_leaves(v))
            if any(is_matrix(v.aval.shape) for v in of_leaves):
                yield eq, way.is_split


def _in_words(eq: Equation) -> str:
    return f"{eq.name} of {' and '.join(v.aval.str_short() for v in eq.values)}"
