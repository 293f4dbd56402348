"""Rolls a program: each row of equal blocks becomes one `scan` over the blocks' leaves, stacked.

The rolled program computes the same. It is as long as one block, however many there are, so tracing
and compiling it do not grow with the depth of the model.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.program.block_match import BlockRow
from zeroxla.program.block_rows import find_rows
from zeroxla.program.origins import activation_equations
from zeroxla.program.trace import Equation, Operand, Program, Value, read, run, trace


def roll(program: Program, model: Mapping[Value, Hashable]) -> Program:
    """Return a program in which rows of equal blocks are loops.

    Args:
      program: any program.
      model: the inputs that are the model's leaves and state, each with a key. Those of one shape
        and one key may be stacked.

    Returns:
      The program, with inputs and outputs in the same order; `program` itself if nothing repeats.
      `stacked_values` tells which leaves an operand of a loop stacks.

    Cost: one more trace.
    """
    rows = find_rows(program, model)
    if not rows:
        return program
    row_at = {row.equations[0][0]: row for row in rows}
    in_rows = {eq for row in rows for block in row.equations for eq in block}
    activations = activation_equations(program, model)
    # Values of the model or of the batch alone come first: a loop may read them before the place
    # where one of its blocks has made them.
    order = [*(eq for eq in program.equations if eq not in set(activations)), *activations]

    def rolled(*args: Any) -> list[Any]:
        env = dict(zip(program.inputs, args, strict=True))
        for eq in order:
            if eq in row_at:
                _run_row(row_at[eq], env)
            elif eq not in in_rows:
                run([eq], env)
        return [jnp.asarray(read(env, a)) for a in program.outputs]

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.inputs]
    return trace(rolled, *shapes)[0]


def stacked_values(
    operand: Operand, producers: Mapping[Value, Equation]
) -> tuple[Value, ...] | None:
    """Return the values that an operand of a loop stacks along dim 0, as `roll` stacks leaves.

    Args:
      operand: one of the `xs` of a loop.
      producers: the equation that makes each value.

    Returns:
      The values; None if the operand is made in another way.
    """
    eq = producers.get(operand) if isinstance(operand, Value) else None
    if eq is None or eq.name != "concatenate" or eq.params["dimension"] != 0:
        return None
    found = []
    for row in eq.inputs:
        widened = producers.get(row) if isinstance(row, Value) else None
        if widened is None or widened.name != "broadcast_in_dim":
            return None
        row = widened.outputs[0]
        (value,) = widened.inputs
        if not isinstance(value, Value) or row.aval.shape != (1, *value.aval.shape):
            return None
        found.append(value)
    return tuple(found)


def block_of(value: Operand, producers: Mapping[Value, Equation]) -> tuple[Value, int] | None:
    """Return the result of a loop of which a value is one block's part, and the block's number.

    Args:
      value: any operand.
      producers: the equation that makes each value.

    Returns:
      None if the value is made in another way than `roll` takes such parts.
    """
    squeeze = producers.get(value) if isinstance(value, Value) else None
    if squeeze is None or squeeze.name != "squeeze" or squeeze.params["dimensions"] != (0,):
        return None
    (row,) = squeeze.inputs
    cut = producers.get(row) if isinstance(row, Value) else None
    if cut is None or cut.name != "slice":
        return None
    (stacked,), row = cut.inputs, cut.outputs[0]
    if not isinstance(stacked, Value) or row.aval.shape != (1, *stacked.aval.shape[1:]):
        return None
    return stacked, cut.params["start_indices"][0]


def _run_row(row: BlockRow, env: dict[Value, Any]) -> None:
    """Run a row of blocks as a loop, reading its operands from `env` and writing results to it."""
    num_carry = len(row.carry)

    def turn(carry: list[jax.Array], x: list[jax.Array]) -> tuple[list[jax.Array], list[Any]]:
        inside = {**env, **dict(zip(row.body.inputs, (*carry, *x), strict=True))}
        run(row.body.equations, inside)
        results = [read(inside, a) for a in row.body.outputs]
        return _strong(results[:num_carry]), results[num_carry:]

    xs = [_stack([read(env, a) for a in operands]) for operands in row.xs]
    first = _strong([read(env, a) for a in row.carry])
    carry, ys = lax.scan(turn, first, xs, length=len(row.equations))
    for values, stacked in zip(row.ys, ys, strict=True):
        env.update(
            (v, lax.squeeze(lax.slice_in_dim(stacked, b, b + 1), (0,)))
            for b, v in enumerate(values)
        )
    env.update(zip(row.last, carry, strict=True))


def _stack(arrays: Sequence[Any]) -> jax.Array:
    """Stack arrays along a new dim 0, in two kinds of equations that `stacked_values` knows."""
    return lax.concatenate([lax.broadcast(jnp.asarray(x), (1,)) for x in arrays], 0)


def _strong(arrays: Sequence[Any]) -> list[jax.Array]:
    """Return arrays without weak types, which differ between the first block and the others."""
    return [lax.convert_element_type(x, jax.dtypes.result_type(x)) for x in arrays]
