"""Padding that a convolution can do itself.

Flax pads the operand of a causal convolution in an equation of its own. The padded dim is a little
longer, and no axis divides it. Folded into the convolution, it does not exist.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np

from zeroxla.program.trace import Constant, Equation, Operand, Program


def with_folded_padding(program: Program) -> Program:
    """Return the program with zero padding folded into the convolutions that alone read it."""
    readers = Counter(x for eq in program.equations for x in eq.values)
    readers.update(x for x in program.outputs if not isinstance(x, Constant))
    # A Python number is converted before it pads.
    converted: dict[Operand, Operand] = {
        eq.outputs[0]: eq.inputs[0] for eq in program.equations if eq.name == "convert_element_type"
    }
    pads: dict[Operand, Equation] = {
        eq.outputs[0]: eq
        for eq in program.equations
        if eq.name == "pad"
        and readers[eq.outputs[0]] == 1
        and _is_zero(converted.get(eq.inputs[1], eq.inputs[1]))
        and all(low >= 0 and high >= 0 and not inside for low, high, inside in _edges(eq))
    }
    equations: list[Equation] = []
    folded: set[Equation] = set()
    for eq in program.equations:
        pad = pads.get(eq.inputs[0]) if eq.name == "conv_general_dilated" else None
        padding = None if pad is None else _padding(eq, pad)
        if pad is not None and padding is not None:
            folded.add(pad)
            equations.append(_convolution(eq, pad.inputs[0], padding))
        else:
            equations.append(eq)
    if not folded:
        return program
    kept = tuple(eq for eq in equations if eq not in folded)
    return dataclasses.replace(program, equations=kept)


def _edges(eq: Equation) -> tuple[tuple[int, int, int], ...]:
    return eq.params["padding_config"]


def _is_zero(operand: Operand) -> bool:
    return isinstance(operand, Constant) and not np.any(np.asarray(operand.value))


def _padding(eq: Equation, pad: Equation) -> tuple[tuple[int, int], ...] | None:
    """Return a convolution's padding with that of its operand; None if it pads rows or features."""
    params, edges = eq.params, _edges(pad)
    rows, features, *spatial = params["dimension_numbers"].lhs_spec
    dilated = max(params["lhs_dilation"], default=1) > 1
    if dilated or any(edges[d] != (0, 0, 0) for d in (rows, features)):
        return None
    pairs = zip(params["padding"], (edges[d] for d in spatial), strict=True)
    return tuple((int(low + more[0]), int(high + more[1])) for (low, high), more in pairs)


def _convolution(eq: Equation, operand: Operand, padding: Any) -> Equation:
    source = eq.source.replace(params={**eq.params, "padding": padding})
    return dataclasses.replace(eq, source=source, inputs=(operand, *eq.inputs[1:]))
