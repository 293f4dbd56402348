"""The rules of windows: of convolutions, be they full, depthwise or in groups of features, and of
poolings."""

from __future__ import annotations

import jax

from zeroxla.program.primitives import WINDOWS
from zeroxla.program.trace import Equation
from zeroxla.split.atoms import Dims, block, dim_of, is_split
from zeroxla.split.rules import (
    Args,
    DimsOf,
    Rule,
    connect_unknown,
    fresh,
    note_sum,
    run_sum,
    same,
    shape_of,
)
from zeroxla.split.split_axis import SplitAxis


def _connect(eq: Equation, ins: list[Dims]) -> list[Dims]:
    """Join features; each group of outputs is made of one group of inputs.

    Dims along which a window moves are needed whole.
    """
    params = eq.params
    if params["batch_group_count"] != 1:
        return connect_unknown(eq, ins)
    (lhs, rhs), numbers = ins, params["dimension_numbers"]
    of_lhs, of_rhs, of_out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    out, num_groups = list(fresh(eq.outputs[0])), params["feature_group_count"]
    groups = dim_of(num_groups)
    same(eq, out[of_out[0]], lhs[of_lhs[0]])
    same(eq, lhs[of_lhs[1]], (*groups, *rhs[of_rhs[1]]))
    num_made = shape_of(eq.inputs[1])[of_rhs[0]] // num_groups
    same(eq, rhs[of_rhs[0]], (*groups, *dim_of(num_made)))
    same(eq, out[of_out[1]], rhs[of_rhs[0]])
    note_sum(rhs[of_rhs[1]], eq)
    for k, (i, j, o) in enumerate(zip(of_lhs[2:], of_rhs[2:], of_out[2:], strict=True)):
        stays = shape_of(eq.inputs[1])[j] == 1 and params["padding"][k] == (0, 0)
        if stays and params["window_strides"][k] == params["lhs_dilation"][k] == 1:
            same(eq, out[o], lhs[i])
        else:
            block((*lhs[i], *rhs[j], *out[o]), "a window moves along it")
    return [tuple(out)]


def _run(axis: SplitAxis, dims: DimsOf, eq: Equation, args: Args) -> list[jax.Array]:
    numbers = eq.params["dimension_numbers"]
    i, j = numbers.lhs_spec[1], numbers.rhs_spec[1]
    lhs, rhs = (dims[x] for x in eq.inputs)
    summed = {i: lhs[i]} if is_split(rhs[j]) else {}
    groups = args[0].shape[i] // args[1].shape[j]
    return run_sum(axis, eq, args, summed, feature_group_count=groups)


def _connect_pooling(eq: Equation, ins: list[Dims]) -> list[Dims]:
    """Join dims along which no window moves."""
    params, out = eq.params, list(fresh(eq.outputs[0]))
    for d, size in enumerate(params["window_dimensions"]):
        moves = size > 1 or params["padding"][d] != (0, 0)
        if moves or max(params["window_strides"][d], params["base_dilation"][d]) > 1:
            block((*ins[0][d], *out[d]), "a window moves along it")
        else:
            same(eq, out[d], ins[0][d])
    return [tuple(out)]


CONVOLUTION_RULES = {
    "conv_general_dilated": Rule(_connect, _run),
    **dict.fromkeys(WINDOWS.keys() - {"conv_general_dilated"}, Rule(_connect_pooling)),
}
