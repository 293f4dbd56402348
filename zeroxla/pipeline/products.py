"""Which products of a program are the last ones on the way to its results.

Of a backward these are the products whose results are gradients of leaves. All others belong to the
way of the gradient through the layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from zeroxla.pipeline.needs import BARRIER, LIGHT, body_of, operands_of
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Program, Value


def before_last_products(program: Program, wanted: Iterable[int]) -> set[Value]:
    """Return what the last products of a program read, and the carries of loops that lead to other
    products.

    Args:
      program: the program.
      wanted: the numbers of the results whose products do not count as last ones.
    """
    return _analyse(program, {program.outputs[i] for i in wanted})[1]


def _analyse(program: Program, wanted: Collection[object]) -> tuple[set[Value], set[Value]]:
    """Return the values that lead to a product, or are wanted; and what the last products read."""
    busy = {v for v in wanted if isinstance(v, Value)}
    read: set[Value] = set()
    for eq in reversed(program.equations):
        used = [i for i, v in enumerate(eq.outputs) if v in busy]
        if eq.name in LIGHT or eq.name == BARRIER:
            busy.update(operands_of(eq, used) if used else ())
            continue
        busy.update(eq.values)
        if eq.name == "scan" and not eq.has_effects:
            carries = _busy_carries(eq, used)
            read.update(eq.outputs[i] for i in carries)
            used += carries
        if not used:
            read.update(eq.values)
    return busy, read


def _busy_carries(eq: Equation, used: Collection[int]) -> list[int]:
    """Return the carries of a loop, by number, that lead to a product in a later turn or after it.
    Others, such as sums of gradients, are only added to.

    Args:
      eq: the loop.
      used: the numbers of its results that lead to a product.
    """
    scan = Scan(eq)
    body = body_of(scan)
    carried = scan.split_inputs(body.inputs)[1]
    found = {i for i in used if i < scan.num_carry}
    while True:
        busy, _ = _analyse(body, {body.outputs[i] for i in {*found, *used}})
        more = {i for i, v in enumerate(carried) if v in busy} - found
        if not more:
            return sorted(found)
        found |= more
