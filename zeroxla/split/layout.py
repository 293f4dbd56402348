"""How one leaf is split over the axis `tensor`: along one dim, in one piece or in several."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from zeroxla.split.atoms import (
    Atom,
    Dim,
    Dims,
    atoms_in,
    dim_in_pieces,
    dim_of,
    dims_of,
    expand,
    is_split,
    pieces_of,
    size_of,
)
from zeroxla.split.split_axis import SplitAxis

Factors = tuple[int, int, int]
"""(outer, size, inner): the size of a piece as a product. The middle factor is split."""
Piece = Factors | int
"""A piece of a dim that is split, or the size of one that every device has whole."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeafSplit:
    """One leaf in the tensor-parallel layout.

    Attributes:
      path, shape: the leaf's name and natural shape.
      dim: the dim that is split; None if the leaf is whole on every device.
      pieces: the pieces of that dim, one after another; none if the leaf is whole.
      why: the thing that is split, or the reason why nothing is.
    """

    path: str
    shape: tuple[int, ...]
    dim: int | None = None
    pieces: tuple[Piece, ...] = ()
    why: str

    @property
    def dims(self) -> Dims:
        """New dims, with the atoms chosen that are split."""
        return planned_dims(self.shape, self.dim, self.pieces)

    def part_shape(self, parts: int) -> tuple[int, ...]:
        """The shape of one device's part, padding included."""
        return tuple(map(SplitAxis(parts=parts).dim_size, self.dims))

    def is_one_run(self, parts: int) -> bool:
        """Whether each part is one run of the dim: the parts follow each other without padding."""
        if len(self.pieces) != 1 or isinstance(self.pieces[0], int):
            return False
        outer, size, _ = self.pieces[0]
        return outer == 1 and size % parts == 0

    def in_words(self) -> str:
        """The layout as text, such as "dim 2: 3 x [4] x 8"."""
        if self.dim is None:
            return "whole"
        return f"dim {self.dim}: " + " + ".join(map(_in_words, self.pieces))


def planned_dims(shape: Sequence[int], dim: int | None, pieces: Sequence[Piece]) -> Dims:
    """Return new dims of a leaf, with the atoms chosen that a plan splits.

    Args:
      shape: the leaf's shape.
      dim: the dim that is split; None if the leaf stays whole.
      pieces: the pieces of that dim.
    """
    dims = list(dims_of(shape))
    if dim is not None:
        dims[dim] = dim_in_pieces([_planned(piece) for piece in pieces])
    return tuple(dims)


def structured_dims(shape: Sequence[int], dim: int, pieces: Sequence[Piece]) -> Dims:
    """Return the same dims with nothing chosen: only the pieces and factors are known."""
    dims = planned_dims(shape, dim, pieces)
    for atom in atoms_in(dims[dim]):
        atom.chosen = False
    return dims


def _planned(piece: Piece) -> Dim:
    if isinstance(piece, int):
        return dim_of(piece)
    outer, size, inner = piece
    return (*dim_of(outer), Atom(size, chosen=True), *dim_of(inner))


def layout_of(dim: Dim) -> tuple[Piece, ...]:
    """Return the pieces of a dim; equal ones that follow each other are one piece."""
    atoms = expand(dim)
    first = next((k for k, atom in enumerate(atoms) if is_split((atom,))), None)
    if first is None:
        return (size_of(atoms),)
    outer, atom, inner = size_of(atoms[:first]), atoms[first], size_of(atoms[first + 1 :])
    if not (pieces := pieces_of(atom)):
        return ((outer, atom.size, inner),)
    each: list[Piece] = []
    for piece in (x for part in pieces for x in layout_of(part)):
        each.append(piece * inner if isinstance(piece, int) else (*piece[:2], piece[2] * inner))
    found: list[Piece] = []
    for piece in each * outer:
        before = found[-1] if found else None
        if isinstance(piece, int) and isinstance(before, int):
            found[-1] = before + piece
        elif isinstance(piece, tuple) and isinstance(before, tuple) and piece[1:] == before[1:]:
            found[-1] = (before[0] + piece[0], *piece[1:])
        else:
            found.append(piece)
    return tuple(found)


def _in_words(piece: Piece) -> str:
    """Return a piece as text, such as "3 x [4] x 8"."""
    if isinstance(piece, int):
        return str(piece)
    outer, size, inner = piece
    turns, runs = f"{outer} x " if outer > 1 else "", f" x {inner}" if inner > 1 else ""
    return f"{turns}[{size}]{runs}"
