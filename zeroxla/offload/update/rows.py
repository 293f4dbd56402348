"""`Rows`: computes a few layers of an update at a time, if layers are independent.

An update is a program over whole arrays. A row is a slice along one dim: a layer of a stacked leaf.
If each equation computes a row from the same row of its operands, the program can run on any rows
alone and gives the same bits. A program that reduces over rows, or draws random numbers for all of
them, cannot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
from jax import lax

from zeroxla.program.primitives import ELEMENTWISE
from zeroxla.program.trace import Constant, Equation, Value, read, run


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """A run of consecutive rows.

    Attributes:
      dim: the dim along which rows are counted.
      start, stop: the first row, and the row after the last one.
    """

    dim: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.stop - self.start

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of these rows of an array with the shape `shape`."""
        return tuple(self.count if d == self.dim else n for d, n in enumerate(shape))

    def cut(self, x: jax.Array) -> jax.Array:
        """Return these rows of an array. They stay in the array's memory."""
        return lax.slice_in_dim(x, self.start, self.stop, axis=self.dim)


def runs_of_rows(length: int, count: int, dim: int) -> list[Rows]:
    """Cut `length` rows into runs of at most `count`.

    >>> [(rows.start, rows.stop) for rows in runs_of_rows(5, 2, 0)]
    [(0, 2), (2, 4), (4, 5)]
    """
    return [Rows(dim, i, min(i + count, length)) for i in range(0, length, count)]


def values_with_rows(
    equations: Iterable[Equation], inputs: Collection[Value], dim: int, length: int
) -> frozenset[Value] | None:
    """Return the values that have rows, if each row follows from the same rows of other values.

    Args:
      equations: the program's equations, in order.
      inputs: the values that they read and do not make.
      dim: the dim along which rows are counted.
      length: the number of rows.

    Returns:
      The values with rows among `inputs` and results; all others are scalars. None if a row depends
      on other rows, or if that is not known.
    """
    found: set[Value] = set()
    for value in inputs:
        if value.aval.shape:
            if value.aval.ndim <= dim or value.aval.shape[dim] != length:
                return None
            found.add(value)
    for eq in equations:
        if any(isinstance(a, Constant) and getattr(a.value, "shape", ()) for a in eq.inputs):
            return None
        shaped = [v for v in eq.values if v.aval.shape]
        if not all(v in found for v in shaped):
            return None
        if not any(v.aval.shape for v in eq.outputs):
            if shaped:
                return None  # a reduction
            continue
        if not (
            eq.name in ELEMENTWISE
            or (eq.name == "broadcast_in_dim" and not shaped and _has_rows(eq, dim, length))
            or (eq.name == "slice" and _keeps_rows(eq, dim, length))
            or (eq.name == "pad" and tuple(eq.params["padding_config"][dim]) == (0, 0, 0))
        ):
            return None
        found.update(eq.outputs)
    return frozenset(found)


def run_rows(
    equations: Iterable[Equation], env: dict[Value, Any], rows: Rows, row_values: Collection[Value]
) -> None:
    """Run equations on some rows, and add their results to `env`.

    Args:
      equations: the equations, in order.
      env: the values that they read; of values with rows, these rows alone.
      rows: the rows.
      row_values: the values that have rows, from `values_with_rows`.
    """
    for eq in equations:
        if eq.outputs[0] not in row_values or eq.name not in ("broadcast_in_dim", "slice"):
            run([eq], env)
            continue
        (out,) = eq.outputs
        x, shape = read(env, eq.inputs[0]), rows.of(out.aval.shape)
        if eq.name == "slice":
            env[out] = lax.slice(
                x,
                eq.params["start_indices"],
                [n if d == rows.dim else m for d, (n, m) in _limits(eq, shape)],
                eq.params["strides"],
            )
        else:
            env[out] = lax.broadcast_in_dim(x, shape, ())


def _limits(eq: Equation, shape: Sequence[int]) -> Iterable[tuple[int, tuple[int, int]]]:
    return enumerate(zip(shape, eq.params["limit_indices"], strict=True))


def _has_rows(eq: Equation, dim: int, length: int) -> bool:
    shape = eq.outputs[0].aval.shape
    return len(shape) > dim and shape[dim] == length


def _keeps_rows(eq: Equation, dim: int, length: int) -> bool:
    strides = eq.params["strides"]
    return (
        eq.params["start_indices"][dim] == 0
        and eq.params["limit_indices"][dim] == length
        and (strides is None or strides[dim] == 1)
    )
