"""Which inputs of a loop's body are known a turn before it runs."""

from __future__ import annotations

from zeroxla.program.scan import Scan
from zeroxla.program.trace import Program, Value


def early_inputs(scan: Scan, body: Program) -> set[Value]:
    """Return the inputs of a loop's body that are known a turn before.

    Those are the inputs that are not carried, and carried counters: integers that follow from
    constants and other counters.
    """
    consts, carried, _ = scan.split_inputs(body.inputs)
    counters = {v for v in carried if v.aval.ndim == 0 and not v.is_float}
    known: set[Value] = {*consts, *counters}
    for eq in body.equations:
        if known.issuperset(eq.values):
            known.update(eq.outputs)
    follows = {v for v, out in zip(carried, body.outputs, strict=False) if out in known}
    return set(body.inputs).difference(carried) | (counters & follows)
