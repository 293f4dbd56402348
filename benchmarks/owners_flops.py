"""FLOPs of an update with owners, on each device, from its compiled program."""

from __future__ import annotations

import re

import numpy as np
from common import NUM_DEVICES

from zeroxla.program import hlo
from zeroxla.program.hlo.flops import product_flops
from zeroxla.program.hlo.text import Instruction, Module
from zeroxla.program.hlo.trip_counts import trip_count
from zeroxla.step.owners.owners_plan import OwnersPlan


def flops_by_device(text: str, plan: OwnersPlan | None) -> list[float]:
    """Return the FLOPs of products and factorizations of each device, from a compiled program.

    Args:
      text: the program's HLO.
      plan: who owns what; None for a program without owners.
    """
    module = hlo.parse(text)
    counts = {}
    if plan is not None:
        (turn,) = (turn for turns in plan.turns for turn in turns)
        counts = {f"rest_{g}": [*map(len, s.rest)] for g, s in enumerate(turn.shares)}

    def visit(name: str, times: np.ndarray) -> np.ndarray:
        total = np.zeros(NUM_DEVICES)
        scope = module.computations[name]
        for instruction in scope.values():
            total += times * product_flops(instruction, scope)
            runs = times
            if instruction.opcode == "while":
                runs = times * _trips(instruction, scope, module, counts)
            for called in instruction.called:
                total += visit(called, runs)
        return total

    return visit(module.entry, np.ones(NUM_DEVICES)).tolist()


def _trips(
    loop: Instruction, scope: dict[str, Instruction], module: Module, counts: dict[str, list[int]]
) -> np.ndarray:
    """Return the number of a loop's turns on each device."""
    known = trip_count(loop, scope, module)
    if known is not None:
        return np.full(NUM_DEVICES, known)
    group = re.search(r"\brest_\d+\b", loop.op_name)
    assert group is not None, loop.op_name
    return np.array(counts[group[0]])
