"""Holdings: how the devices along a mesh axis hold one array of a program.

    whole      every device has the array, and computes the same with it
    copies     every device has the array, and computes something else with it
    part       every device has its part of one dim
    summands   every device has an array of this shape; the array is their sum
    ragged     every device has the rows of its own groups, in front, and zeros behind them

A cotangent has the dual holding of its array: where devices compute different things with copies,
the cotangent is the sum of what they find. So the dual of `copies` is `summands`, and the other way
round; `whole` and `part` are their own duals. What turns one holding into another is linear, and
its transpose turns the dual of the second into the dual of the first. That is all that training
needs to know of gradients along an axis: Megatron's conjugate operators are two of these pairs.

    have \\ want   whole                 copies                part
    whole          -                     nothing / sum         slice / gather
    copies         nothing / first's     -                     slice / spread
    part           gather / slice        gather / reduce       exchange / exchange
    summands       sum / nothing         sum / sum             reduce / gather

Each entry is what happens forward, and in backward.

Rows that are sorted by group, as tokens are by expert, are ragged: how many of them belong to a
device's groups is known when the program runs, so each device has room for all of them. A ragged
array is a sum of summands whose rows moved to the front: to and from copies and summands rows only
move, and everything else goes through these. It is its own dual. `ragged` has the groups.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.program.trace import Operand, is_float
from zeroxla.split.atoms import Atom, Dims, choosing, expand, pieces_of
from zeroxla.split.split_axis import SplitAxis


class Kind(enum.Enum):
    """The kinds of holdings; see the head of this file."""

    WHOLE = "whole"
    COPIES = "copies"
    PART = "part"
    SUMMANDS = "summands"
    RAGGED = "ragged"


@dataclasses.dataclass(frozen=True, slots=True)
class Holding:
    """How devices hold an array.

    Attributes:
      kind: its kind.
      dim: the dim that is split; None unless it is a part or ragged.
      atom: the class along which that dim is split; None unless it is a part.
      sizes: the sizes of the groups of rows; None unless it is ragged.
    """

    kind: Kind
    dim: int | None = None
    atom: Atom | None = None
    sizes: Operand | None = None
    _hash: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Searches look holdings up millions of times, and an enum's own hash is slow.
        object.__setattr__(self, "_hash", hash((self.kind.value, self.dim, self.atom, self.sizes)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def dual(self) -> Holding:
        """The holding of the array's cotangent."""
        return _DUALS.get(self, self)

    @property
    def is_full(self) -> bool:
        """Whether every device has the array itself."""
        return self.kind in (Kind.WHOLE, Kind.COPIES)

    @property
    def adds_up(self) -> bool:
        """Whether the array is the sum of what devices have, their rows moved back to their places
        if it is ragged."""
        return self.kind in (Kind.SUMMANDS, Kind.RAGGED)

    def moved(self, by: int) -> Holding:
        """Return the same holding of an array with so many more dims in front, or fewer."""
        return self if self.dim is None else dataclasses.replace(self, dim=self.dim + by)

    def __repr__(self) -> str:
        return f"part({self.dim}, {self.atom})" if self.atom else self.kind.value


WHOLE, COPIES, SUMMANDS = map(Holding, (Kind.WHOLE, Kind.COPIES, Kind.SUMMANDS))
_DUALS = {COPIES: SUMMANDS, SUMMANDS: COPIES}


def part(dim: int, atom: Atom) -> Holding:
    """Return the holding of an array whose dim is split along a class."""
    return Holding(Kind.PART, dim, atom.root)


def ragged(dim: int, sizes: Operand) -> Holding:
    """Return the holding of an array of which devices have the rows of their own groups."""
    return Holding(Kind.RAGGED, dim, sizes=sizes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowWindow:
    """The rows of a ragged array that belong to a device's own groups.

    Rows that belong to no group, behind those of the last one, are the last device's.

    Attributes:
      start: the place of the first of them among all rows, an integer scalar.
      num: their number, an integer scalar.
    """

    start: jax.Array
    num: jax.Array

    @staticmethod
    def of(sizes: jax.Array, axis: SplitAxis) -> RowWindow:
        """Return a device's rows.

        Args:
          sizes: the sizes of all groups; the axis divides their number.
          axis: the axis, over which the groups lie in order.
        """
        per, most = sizes.shape[0] // axis.parts, jnp.iinfo(jnp.int32).max
        groups, sizes = jnp.arange(sizes.shape[0]) // per, sizes.astype(jnp.int32)
        start = jnp.where(groups < axis.index, sizes, 0).sum()
        num = jnp.where(groups == axis.index, sizes, 0).sum()
        return RowWindow(start=start, num=jnp.where(axis.index == axis.parts - 1, most, num))

    def own(self, x: jax.Array, held: Holding) -> jax.Array:
        """Return a ragged array with zeros behind the device's rows. So has its cotangent then,
        which may be anything there where a derivative at zero is infinite."""
        assert held.dim is not None
        here = lax.broadcasted_iota(self.num.dtype, x.shape, held.dim) < self.num
        return jnp.where(here, x, jnp.zeros_like(x))

    def taken(self, whole: jax.Array, held: Holding) -> jax.Array:
        """Return the device's rows of an array that it has, as a ragged array."""
        assert held.dim is not None
        size = whole.shape[held.dim]
        return self.own(_run_of(whole, held.dim, (0, size), self.start), held)

    def put_back(self, x: jax.Array, held: Holding) -> jax.Array:
        """Return a ragged array with the device's rows at their places, zeros elsewhere."""
        assert held.dim is not None
        size = x.shape[held.dim]
        return _run_of(self.own(x, held), held.dim, (size, 0), size - self.start)


def _run_of(x: jax.Array, d: int, padding: tuple[int, int], start: jax.Array) -> jax.Array:
    """Return as many rows of an array with some rows of zeros before or after it as it has, from a
    place on. (A gather of rows would do as well, but its transpose is a scatter.)"""
    padded = jnp.pad(x, [padding if i == d else (0, 0) for i in range(x.ndim)])
    return lax.dynamic_slice_in_dim(padded, start, x.shape[d], axis=d)


def moved_share(have: Holding, want: Holding, parts: int) -> float:
    """Return the bytes that a device receives to turn a holding into another, forward only, as a
    share of the whole array's bytes."""
    rest = (parts - 1) / parts
    if have == want or have.is_full or want.kind is Kind.SUMMANDS:
        return 0.0
    if have.adds_up:
        return rest if want.kind is Kind.PART else 2 * rest
    return rest / parts if want.kind is Kind.PART and want.dim != have.dim else rest


def conversion_share(have: Holding, want: Holding, parts: int, *, has_gradient: bool) -> float:
    """Return `moved_share` of a conversion, that of its transpose included."""
    share = moved_share(have, want, parts)
    return share + moved_share(want.dual, have.dual, parts) if has_gradient else share


def num_moves(have: Holding, want: Holding, *, has_gradient: bool) -> int:
    """Return the number of collectives of a conversion, those of its transpose included. A sum
    counts as two, a reduce and a gather."""
    found = _num_passes(have, want)
    return found + _num_passes(want.dual, have.dual) if has_gradient else found


def _num_passes(have: Holding, want: Holding) -> int:
    if moved_share(have, want, 2) == 0:
        return 0
    return 2 if have.adds_up and want.kind is not Kind.PART else 1


def can_convert(have: Holding, want: Holding) -> bool:
    """Return whether there is a conversion. Parts do not become summands."""
    return have == want or want.kind is not Kind.SUMMANDS or have.kind is not Kind.PART


def cheapest(
    have: Iterable[Holding], want: Holding, parts: int, *, has_gradient: bool
) -> tuple[float, Holding]:
    """Return the least `conversion_share` from any of some holdings, and the one it starts from. If
    several cost the same, it starts from one that takes the fewest collectives."""
    shares = (
        (conversion_share(h, want, parts, has_gradient=has_gradient), i, h)
        for i, h in enumerate(sorted(have, key=_order))
    )
    share, _, first = min(shares, key=lambda found: found[:2])
    return share, first


def _order(holding: Holding) -> tuple[bool, bool, str, int]:
    """Return the place of a holding among others. Full ones are first: at the same bytes, a
    conversion from them takes a collective in backward alone. Ragged ones can become anything."""
    dim = -1 if holding.dim is None else holding.dim
    return not holding.is_full, holding.kind is not Kind.RAGGED, holding.kind.value, dim


def convert(
    x: jax.Array,
    dims: Dims,
    have: Holding,
    want: Holding,
    axis: SplitAxis,
    window_of: Callable[[Holding], RowWindow] | None = None,
) -> jax.Array:
    """Turn this device's array of one holding into that of another. Call it inside `shard_map`.

    Args:
      x: the array, or a part of it.
      dims: the dims of the whole array.
      have, want: the holdings.
      axis: the axis.
      window_of: returns the rows that a ragged holding gives the device.
    """
    if have == want or axis.parts == 1:
        return x
    assert can_convert(have, want), (have, want)
    if Kind.RAGGED in (have.kind, want.kind):
        assert window_of is not None, (have, want)
        if x.dtype == bool:  # of which there is no sum
            return convert(x.astype(jnp.int8), dims, have, want, axis, window_of) != 0
        if want.kind is Kind.RAGGED:
            whole = convert(x, dims, have, COPIES, axis, window_of)
            return window_of(want).taken(whole, want)
        summands = window_of(have).put_back(x, have)
        return convert(summands, dims, SUMMANDS, want, axis)
    if not is_float(x.dtype):
        return _moved(x, dims, have, want, axis)
    forward = functools.partial(_moved, dims=dims, have=have, want=want, axis=axis)
    backward = functools.partial(_moved, dims=dims, have=want.dual, want=have.dual, axis=axis)
    run = jax.custom_vjp(forward)
    run.defvjp(lambda x: (forward(x), None), lambda _, ct: (backward(ct),))
    return run(x)


def _moved(x: jax.Array, dims: Dims, have: Holding, want: Holding, axis: SplitAxis) -> jax.Array:
    """Do what `convert` does forward. Conversions to summands are transposes of others."""
    if want.kind is Kind.SUMMANDS:
        if have.kind is Kind.PART:
            return _spread(x, dims, have, axis)
        return jnp.where(axis.index == 0, x, jnp.zeros_like(x)) if have is not SUMMANDS else x
    if have.is_full:
        return x if want.is_full else _taken(x, dims, want, axis)
    if have.kind is Kind.SUMMANDS:
        return lax.psum(x, axis.name) if want.is_full else _reduced(x, dims, want, axis)
    if want.is_full:
        return _collected(x, dims, have, axis)
    return _exchanged(x, dims, have, want, axis)


def _at(dims: Dims, holding: Holding) -> tuple[int, tuple[Atom, ...], bool]:
    """Return the split dim's number, the dim, and whether parts are runs of it that follow each
    other."""
    assert holding.dim is not None
    dim = expand(dims[holding.dim])
    return holding.dim, dim, dim[0] is holding.atom and not pieces_of(dim[0])


def _taken(x: jax.Array, dims: Dims, want: Holding, axis: SplitAxis) -> jax.Array:
    d, dim, _ = _at(dims, want)
    with choosing(want.atom):
        return axis.take_along(x, d, dim)


def _collected(x: jax.Array, dims: Dims, have: Holding, axis: SplitAxis) -> jax.Array:
    d, dim, is_run = _at(dims, have)
    if is_run:
        return lax.all_gather(x, axis.name, axis=d, tiled=True)
    with choosing(have.atom):
        return axis.joined_along(lax.all_gather(x, axis.name), d, dim)


def _reduced(x: jax.Array, dims: Dims, want: Holding, axis: SplitAxis) -> jax.Array:
    d, dim, is_run = _at(dims, want)
    if is_run:
        return lax.psum_scatter(x, axis.name, scatter_dimension=d, tiled=True)
    with choosing(want.atom):
        return lax.psum_scatter(axis.parts_along(x, d, dim), axis.name)


def _spread(x: jax.Array, dims: Dims, have: Holding, axis: SplitAxis) -> jax.Array:
    d, dim, _ = _at(dims, have)
    zeros = jnp.zeros((axis.parts, *x.shape), x.dtype)
    with choosing(have.atom):
        return axis.joined_along(lax.dynamic_update_index_in_dim(zeros, x, axis.index, 0), d, dim)


def _exchanged(
    x: jax.Array, dims: Dims, have: Holding, want: Holding, axis: SplitAxis
) -> jax.Array:
    (d, dim, is_run), (to, to_dim, to_is_run) = _at(dims, have), _at(dims, want)
    if d == to:
        return _taken(_collected(x, dims, have, axis), dims, want, axis)
    if is_run and to_is_run:
        return lax.all_to_all(x, axis.name, split_axis=to, concat_axis=d, tiled=True)
    with choosing(want.atom):
        sent = axis.parts_along(x, to, to_dim)
    received = lax.all_to_all(sent, axis.name, split_axis=0, concat_axis=0, tiled=True)
    with choosing(have.atom):
        return axis.joined_along(received, d, dim)
