"""Holdings: how the devices along a mesh axis hold one array of a program.

    whole      every device has the array, and computes the same with it
    copies     every device has the array, and computes something else with it
    part       every device has its part of one dim
    summands   every device has an array of this shape; the array is their sum

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
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.program.trace import is_float
from zeroxla.split.atoms import Atom, Dims, choosing, expand, pieces_of
from zeroxla.split.split_axis import SplitAxis


class Kind(enum.Enum):
    """The kinds of holdings; see the head of this file."""

    WHOLE = "whole"
    COPIES = "copies"
    PART = "part"
    SUMMANDS = "summands"


@dataclasses.dataclass(frozen=True, slots=True)
class Holding:
    """How devices hold an array.

    Attributes:
      kind: its kind.
      dim: the dim that is split; None unless it is a part.
      atom: the class along which that dim is split; None unless it is a part.
    """

    kind: Kind
    dim: int | None = None
    atom: Atom | None = None
    _hash: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Searches look holdings up millions of times, and an enum's own hash is slow.
        object.__setattr__(self, "_hash", hash((self.kind.value, self.dim, self.atom)))

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


def moved_share(have: Holding, want: Holding, parts: int) -> float:
    """Return the bytes that a device receives to turn a holding into another, forward only, as a
    share of the whole array's bytes."""
    rest = (parts - 1) / parts
    if have == want or have.is_full or want.kind is Kind.SUMMANDS:
        return 0.0
    if have.kind is Kind.SUMMANDS:
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
    return 2 if have is SUMMANDS and want.is_full else 1


def can_convert(have: Holding, want: Holding) -> bool:
    """Return whether there is a conversion. Parts do not become summands."""
    return have == want or want.kind is not Kind.SUMMANDS or have.is_full


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


def _order(holding: Holding) -> tuple[bool, str, int]:
    """Return the place of a holding among others. Full ones are first: at the same bytes, a
    conversion from them takes a collective in backward alone."""
    return not holding.is_full, holding.kind.value, -1 if holding.dim is None else holding.dim


def convert(x: jax.Array, dims: Dims, have: Holding, want: Holding, axis: SplitAxis) -> jax.Array:
    """Turn this device's array of one holding into that of another. Call it inside `shard_map`.

    Args:
      x: the array, or a part of it.
      dims: the dims of the whole array.
      have, want: the holdings.
      axis: the axis.
    """
    if have == want or axis.parts == 1:
        return x
    assert can_convert(have, want), (have, want)
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
