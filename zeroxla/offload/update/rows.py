"""Rows of stacked arrays: computes a few layers of an update at a time, where layers are
independent.

An update is a program over whole arrays. Where each of its equations computes a row (a slice along
one dim, a layer of a stacked leaf) from the same row of what it reads, it can be run on any rows of
its arrays alone, and gives the same bits. What reduces over rows, or draws random numbers for all
of them, cannot.
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
    """Some of the rows of arrays.

    Attributes:
      dim: along which they are counted.
      start, stop: the first one, and that after the last one.
    """

    dim: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of these rows of an array."""
        return tuple(self.count if d == self.dim else n for d, n in enumerate(shape))

    def cut(self, x: jax.Array) -> jax.Array:
        """Return these rows of an array, in its memory."""
        return lax.slice_in_dim(x, self.start, self.stop, axis=self.dim)


def in_rows(length: int, count: int, dim: int) -> list[Rows]:
    """Cut so many rows into runs of at most `count`.

    >>> [(rows.start, rows.stop) for rows in in_rows(5, 2, 0)]
    [(0, 2), (2, 4), (4, 5)]
    """
    return [Rows(dim, i, min(i + count, length)) for i in range(0, length, count)]


def with_rows(
    equations: Iterable[Equation], inputs: Collection[Value], dim: int, length: int
) -> frozenset[Value] | None:
    """Return the values that have rows, if each of these follows from the same rows of others.

    Args:
      equations: in order.
      inputs: what they read.
      dim: along which rows are counted.
      length: how many there are.

    Returns:
      The values among `inputs` and results; the others are scalars. None if a row follows from
      others, or that is not known.
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
            or (eq.name == "broadcast_in_dim" and not shaped and _has(eq, dim, length))
            or (eq.name == "slice" and _keeps(eq, dim, length))
            or (eq.name == "pad" and tuple(eq.params["padding_config"][dim]) == (0, 0, 0))
        ):
            return None
        found.update(eq.outputs)
    return frozenset(found)


def run_rows(
    equations: Iterable[Equation], env: dict[Value, Any], rows: Rows, having: Collection[Value]
) -> None:
    """As `run`, on rows of the values that have them."""
    for eq in equations:
        if eq.outputs[0] not in having or eq.name not in ("broadcast_in_dim", "slice"):
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


def _has(eq: Equation, dim: int, length: int) -> bool:
    shape = eq.outputs[0].aval.shape
    return len(shape) > dim and shape[dim] == length


def _keeps(eq: Equation, dim: int, length: int) -> bool:
    strides = eq.params["strides"]
    return (
        eq.params["start_indices"][dim] == 0
        and eq.params["limit_indices"][dim] == length
        and (strides is None or strides[dim] == 1)
    )
