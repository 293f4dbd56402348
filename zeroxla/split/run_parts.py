"""Runs a program on parts: each device computes with its part of every split dim.

The arrays are those of the program with the split dims shorter, so that no equation knows of the
others; what must be summed is summed over one mesh axis. Run under `shard_map`, or under `vmap`
with an axis name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.program import compat
from zeroxla.program.trace import Atom as Operand
from zeroxla.program.trace import Constant, Equation
from zeroxla.split.atoms import Atom, Dim, Dims, expand, size_of, splits
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.products import rule_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """How the chosen atoms are shared out: in equal parts, the last ones padded where the size does
    not divide.

    Attributes:
      parts: how many; 1 where every device has everything.
      axis: the name of the axis over which they are.
      small: of a small instance of the program, the parts that it is to have: chosen atoms are as
        small as shows how they divide, and loops have one turn.
    """

    parts: int
    axis: str | None = None
    small: int | None = None

    @property
    def index(self) -> jax.Array | int:
        return 0 if self.axis is None else lax.axis_index(self.axis)

    def sum(self, part: jax.Array) -> jax.Array:
        return part if self.axis is None else lax.psum(part, self.axis)

    def part(self, dim: Dim) -> int:
        """Return the size of a part of a dim."""
        return math.prod(map(self.size, expand(dim)))

    def size(self, atom: Atom) -> int:
        """Return how many of an atom a part has; of a small instance one turn of a loop."""
        if atom.chosen:
            return part_size(self._whole(atom.size), self.parts)
        return self.turns(atom.size) if atom.is_turns else atom.size

    def turns(self, length: int) -> int:
        """Return how many turns a loop has."""
        return length if self.small is None else 1

    def _whole(self, size: int) -> int:
        """Return how many of a chosen atom there are."""
        if self.small is None:
            return size
        return self.small if size % self.small == 0 else 2 * self.small - 1

    def take(self, whole: jax.Array, dims: Dims) -> jax.Array:
        """Return this device's part of an array that it has whole."""
        for d, dim in enumerate(dims):
            atoms = expand(dim)
            for k, atom in enumerate(atoms):
                if self.size(atom) != atom.size:
                    # Of the atoms before it parts have been taken already.
                    outer, inner = self.part(atoms[:k]), size_of(atoms[k + 1 :])
                    factors, mine = (outer, atom.size, inner), self.size(atom)
                    parts, index = (self.parts, self.index) if atom.chosen else (1, 0)
                    whole = take_part(whole, d, factors, mine, parts, index)
        return whole

    def collect(self, part: jax.Array, dims: Dims) -> jax.Array:
        """Return the whole array of its parts."""
        for d, dim in enumerate(dims):
            if self.axis is not None and (factors := splits(dim)) is not None:
                outer, size, inner = factors
                whole = self._whole(size)
                shape = (*part.shape[:d], outer, -1, inner, *part.shape[d + 1 :])
                part = lax.all_gather(part.reshape(shape), self.axis, axis=d + 1, tiled=True)
                part = lax.slice_in_dim(part, 0, whole, axis=d + 1)
                part = part.reshape(*part.shape[:d], -1, *part.shape[d + 3 :])
        return part


def part_size(size: int, parts: int) -> int:
    """Return the size of each of so many equal parts, padding included."""
    return -(-size // parts)


def padded(array: jax.Array, dim: int, size: int) -> jax.Array:
    """Return an array with zeros after a dim that is shorter than that."""
    missing = size - array.shape[dim]
    if missing <= 0:
        return array
    return jnp.pad(array, [(0, missing if d == dim else 0) for d in range(array.ndim)])


def take_part(
    whole: jax.Array,
    dim: int,
    factors: tuple[int, int, int],
    mine: int,
    parts: int,
    index: jax.Array | int,
) -> jax.Array:
    """Return the part `index`, of length `mine`, of the middle factor of a dim; zeros where the
    last of so many parts reach beyond it."""
    outer, size, inner = factors
    rest = whole.shape[dim + 1 :]
    apart = whole.reshape(*whole.shape[:dim], outer, size, inner, *rest)
    apart = padded(apart, dim + 1, parts * mine)
    found = lax.dynamic_slice_in_dim(apart, index * mine, mine, axis=dim + 1)
    return found.reshape(*whole.shape[:dim], outer * mine * inner, *rest)


@dataclasses.dataclass(frozen=True, slots=True)
class PartsRunner:
    """Runs the program of a flow. What `rules.Parts` asks for.

    Attributes:
      flow: the program.
      sharing: what each device has.
      in_place: results that take the place of inputs, as a cache's next state does. A loop that
        slices such an input, layer by layer, and stacks such a result works on one array.
    """

    flow: DimsFlow
    sharing: Sharing
    in_place: Mapping[Operand, Operand] = dataclasses.field(default_factory=dict)

    def dims(self, operand: Operand) -> Dims:
        return self.flow.dims[operand]

    def part(self, dim: Dim) -> int:
        return self.sharing.part(dim)

    def take(self, whole: jax.Array, dims: Dims) -> jax.Array:
        return self.sharing.take(whole, dims)

    def sum(self, part: jax.Array) -> jax.Array:
        return self.sharing.sum(part)

    @property
    def index(self) -> jax.Array | int:
        return self.sharing.index

    def __call__(self, args: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the parts of the program's results, of the parts of its inputs."""
        env: dict[Operand, jax.Array] = dict(zip(self.flow.program.inputs, args, strict=True))

        def read(operand: Operand) -> jax.Array:
            if not isinstance(operand, Constant):
                return env[operand]
            dims = self.flow.dims[operand]
            if tuple(map(self.part, dims)) == jnp.shape(operand.value):
                return operand.value  # A literal stays one.
            return self.take(jnp.asarray(operand.value), dims)

        for eq in self.flow.program.equations:
            ins = [read(x) for x in eq.inputs]
            with compat.context_of(eq.source, eq.name_stack):
                outs = self._loop(eq, ins) if eq.name == "scan" else rule_of(eq).run(self, eq, ins)
            env.update(zip(eq.outputs, outs, strict=True))
        return [read(x) for x in self.flow.program.outputs]

    def _loop(self, eq: Equation, ins: Sequence[jax.Array]) -> list[jax.Array]:
        num_consts, num_carry = compat.scan_counts(eq.params)
        first_x = num_consts + num_carry
        body = PartsRunner(self.flow.bodies[eq], self.sharing)
        consts, carry, xs = ins[:num_consts], ins[num_consts:first_x], ins[first_x:]
        x_of = {x: i for i, x in enumerate(eq.inputs[first_x:])}
        held = {  # y -> x
            i: x_of[self.in_place[y]]
            for i, y in enumerate(eq.outputs[num_carry:])
            if self.in_place.get(y) in x_of
        }
        read = [i for i in range(len(xs)) if i not in held.values()]

        def turn(state: tuple[list, dict], now: tuple[Any, list]) -> tuple[tuple, list]:
            (carry, arrays), (i, slices) = state, now
            layer = dict(zip(read, slices, strict=True))
            for x in held.values():
                layer[x] = lax.dynamic_index_in_dim(arrays[x], i, keepdims=False)
            outs = body([*consts, *carry, *(layer[x] for x in range(len(xs)))])
            ys = outs[num_carry:]
            for y, x in held.items():
                arrays = {**arrays, x: lax.dynamic_update_index_in_dim(arrays[x], ys[y], i, 0)}
            return (outs[:num_carry], arrays), [y for k, y in enumerate(ys) if k not in held]

        length = self.sharing.turns(eq.params["length"])
        (carry, arrays), stacked = lax.scan(
            turn,
            (list(carry), {x: xs[x] for x in held.values()}),
            (jnp.arange(length), [xs[i] for i in read]),
            length=length,
            reverse=eq.params["reverse"],
            unroll=eq.params["unroll"],
        )
        rest = iter(stacked)
        num_ys = len(eq.outputs) - num_carry
        return [*carry, *(arrays[held[y]] if y in held else next(rest) for y in range(num_ys))]
