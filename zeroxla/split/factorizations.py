"""Rules of factorizations and solves: each matrix of a batch is needed whole, the batch is not."""

from __future__ import annotations

from zeroxla.program.primitives import FACTORIZATION_FLOPS
from zeroxla.program.trace import Equation
from zeroxla.split.atoms import Dims, block
from zeroxla.split.rules import Rule, fresh, same


def _connect(eq: Equation, ins: list[Dims]) -> list[Dims]:
    outs = [fresh(v) for v in eq.outputs]
    batch = len(ins[0]) - 2
    for dims in (*ins, *outs):
        for dim, first in zip(dims[:batch], ins[0], strict=False):
            same(eq, dim, first)
        for dim in dims[batch:]:
            block(dim, f"{eq.name} needs it whole")
    return outs


FACTORIZATION_RULES = dict.fromkeys(FACTORIZATION_FLOPS, Rule(_connect))
