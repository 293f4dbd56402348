"""Places of a row in arrays: which dim holds them, and the slice of an array at one place.

A program that reads whole rows computes each array for all places of a row. One call of the new
program computes the slice of each array at one place. An array is then in one of two forms: whole,
or its slice along an `Along`.
"""

from __future__ import annotations

import dataclasses

import jax
from jax import lax

from zeroxla.program.trace import Equation
from zeroxla.split.atoms import Atom, Dim, Dims, dim_of, expand, size_of
from zeroxla.split.joins import join
from zeroxla.split.split_axis import SplitAxis, take_part


@dataclasses.dataclass(frozen=True, slots=True)
class Along:
    """The dim of an array that holds places; its size is outer x places x inner.

    A slice at one place keeps the dim, with the size outer x inner.

    Attributes:
      dim: the number of the dim.
      outer, inner: what else the dim holds, if the program has merged it with other dims.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    def behind(self, dims: int) -> Along:
        """Return the same in an array that has so many more dims before this one."""
        return dataclasses.replace(self, dim=self.dim + dims)


Form = Along | None
"""The slice at one place along a dim, or None: the whole array."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlaceAxis(SplitAxis):
    """Cuts places into parts of one place each; one call computes with one of them.

    Attributes:
      part: the number of the place, int32[].
    """

    def slice_of(self, whole: jax.Array, along: Along) -> jax.Array:
        """Return the slice of a whole array at the place."""
        factors = (along.outer, self.parts, along.inner)
        return take_part(whole, along.dim, factors, 1, self.parts, self.part)

    def write(self, whole: jax.Array, part: jax.Array, along: Along) -> jax.Array:
        """Return a whole array with another slice at the place."""
        before, after = whole.shape[: along.dim], whole.shape[along.dim + 1 :]

        def apart(x: jax.Array, places: int) -> jax.Array:
            return x.reshape(*before, along.outer, places, along.inner, *after)

        wide, new = apart(whole, self.parts), apart(part, 1).astype(whole.dtype)
        axis = along.dim + 1
        return lax.dynamic_update_slice_in_dim(wide, new, self.part, axis).reshape(whole.shape)


class ForbiddenError(Exception):
    """A model cannot be computed place by place; the message names the equation, if it is one."""

    def __init__(self, eq: Equation | None, why: str) -> None:
        at = "" if eq is None else f"`{eq.name}` to {eq.outputs[0].aval.str_short()}: "
        super().__init__(at + why)


def mark(dims: Dims, along: Along, places: Atom, eq: Equation) -> None:
    """Join the places' atom with the dim of an array that holds them."""
    found = (*dim_of(along.outer), places, *dim_of(along.inner))
    join(dims[along.dim], found, f"{eq.name} regroups it")


def alongs(dims: Dims, places: Atom) -> list[Along]:
    """Return the dims of an array that hold the places."""
    found = []
    for d, dim in enumerate(dims):
        atoms: Dim = expand(dim)
        for k, atom in enumerate(atoms):
            if atom is places:
                found.append(Along(d, size_of(atoms[:k]), size_of(atoms[k + 1 :])))
    return found
