"""Dims as products of atoms, the parts of dims that must be split together.

A dim of size 768 that the program later reshapes to 12 heads of 64 is the product of two atoms, the
outer one of size 12. Where an equation makes two dims one (a product contracts them, a sum adds
them), their atoms are joined. Where an equation takes a dim apart, its atoms are refined: into
factors where it is reshaped, into pieces where it is sliced. A fused projection of queries, keys
and values has three pieces, one after another, each a product of atoms of its own. In the
end every class of joined atoms is one quantity of the model: its heads, its hidden width, its
vocabulary. Each dim of a leaf then lists the classes that it holds, the outermost first.

Joining is union-find (see `joins`); `Atom.root` stands for a class.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

Dim = tuple["Atom", ...]
"""A dim as a product of atoms, the outermost first. A dim of size 1 has no atoms."""
Dims = tuple[Dim, ...]
"""The dims of one array."""

KINDS = ("is_contracted", "is_heads", "is_table", "is_loop", "is_compared")

_MOST_TOGETHER = 64
"""The most sets that `together` returns."""


class Atom:
    """A factor of a dim. Atoms are compared by identity; `root` stands for an atom's class.

    Attributes (of a root; they hold for its whole class):
      size: the number of elements along it.
      blocked: the reasons why it cannot be split; empty if it can be.
      reduced: the equations that reduce along it. Training splits such a class, and completes the
        results over the parts; generation does not.
      sums: for each product or lookup along it, the number of elements of the result. They are
        summed over the parts if it is split.
      is_contracted: whether a product sums over it.
      is_heads: whether two activations are multiplied head by head along it.
      is_table: whether indices are looked up along it.
      is_loop: whether a loop goes through it, one element in each turn.
      is_compared: whether the largest or smallest element along it is looked for.
      chosen: whether it is split.
      depth: how many times the dim that it comes from has been cut.
    """

    __slots__ = (
        "_factors",
        "_parent",
        "_pieces",
        "blocked",
        "chosen",
        "depth",
        "is_compared",
        "is_contracted",
        "is_heads",
        "is_loop",
        "is_table",
        "reduced",
        "size",
        "sums",
    )

    def __init__(self, size: int, *, chosen: bool = False) -> None:
        self.size = int(size)
        self.blocked: dict[str, None] = {}
        self.reduced: dict[str, None] = {}
        self.sums: list[int] = []
        self.is_contracted = self.is_heads = self.is_table = self.is_loop = False
        self.is_compared = False
        self.chosen = chosen
        self.depth = 0
        self._parent: Atom | None = None
        self._factors: Dim = ()
        self._pieces: tuple[Dim, ...] = ()

    @property
    def root(self) -> Atom:
        """The atom that stands for this one's class."""
        atom = self
        while atom._parent is not None:
            atom = atom._parent
        return atom

    def __repr__(self) -> str:
        return f"Atom({self.size})"

    @property
    def needed_whole(self) -> dict[str, None]:
        """The reasons why generation keeps it whole; empty if it may be split.

        There an equation that goes through a dim needs it whole, also where training completes the
        result over the parts.
        """
        return {**self.blocked, **self.reduced}

    def note(self, other: Atom) -> None:
        """Note of this class all that is known of another, `chosen` aside."""
        self.blocked |= other.blocked
        self.reduced |= other.reduced
        self.sums += other.sums
        for kind in KINDS:
            setattr(self, kind, getattr(self, kind) or getattr(other, kind))


def dim_of(size: int) -> Dim:
    """Return a new dim, about which nothing is known."""
    return () if size == 1 else (Atom(size),)


def dims_of(shape: Sequence[int]) -> Dims:
    """Return new dims for an array of a shape; nothing is known about them."""
    return tuple(map(dim_of, shape))


def dim_in_pieces(pieces: Sequence[Dim]) -> Dim:
    """Return the dim that has some dims, none of them empty, one after another."""
    if len(pieces) == 1:
        return pieces[0]
    atom = Atom(sum(map(size_of, pieces)))
    atom._pieces = tuple(pieces)
    return (atom,)


def expand(dim: Dim) -> Dim:
    """Return the dim's atoms after all refinements and joins so far. One of them may have
    pieces."""
    found: list[Atom] = []
    for atom in dim:
        root = atom.root
        found.extend(expand(root._factors) if root._factors else (root,))
    return tuple(found)


def pieces_of(atom: Atom) -> tuple[Dim, ...]:
    """Return the dims that an atom consists of, one after another; none if it is not cut."""
    found: list[Dim] = []
    for piece in atom.root._pieces:
        whole = expand(piece)
        inner = pieces_of(whole[0]) if len(whole) == 1 else ()
        found.extend(inner or (whole,))
    return tuple(found)


def atoms_in(dim: Dim) -> Iterator[Atom]:
    """Yield the atoms of a dim, and instead of one that is cut those of its pieces."""
    for atom in expand(dim):
        pieces = pieces_of(atom)
        for piece in pieces:
            yield from atoms_in(piece)
        if not pieces:
            yield atom


def size_of(dim: Dim) -> int:
    """Return the product of the sizes of the dim's atoms."""
    return math.prod(atom.size for atom in dim)


def first_run(dim: Dim, parts: int) -> Atom | None:
    """Return the atom along which the parts of a dim are runs of it that follow each other; None if
    there is none."""
    atoms = expand(dim)
    return atoms[0] if atoms and not pieces_of(atoms[0]) and atoms[0].size % parts == 0 else None


def block(dim: Dim, why: str) -> None:
    """Record that no atom of the dim can be split, and the reason."""
    for atom in atoms_in(dim):
        atom.blocked[why] = None


@contextlib.contextmanager
def choosing(atom: Atom | None) -> Iterator[None]:
    """Return a context in which an atom's class is split; in that of None nothing is."""
    if atom is None:
        yield
        return
    root, before = atom.root, atom.root.chosen
    root.chosen = True
    try:
        yield
    finally:
        root.chosen = before


def is_split(dim: Dim) -> bool:
    """Return whether an atom of the dim is chosen."""
    return any(atom.chosen for atom in atoms_in(dim))


def shares(dims: Dims) -> dict[Atom, float]:
    """Return the atoms of an array, and the share of its elements that lies along each."""
    found: dict[Atom, float] = {}
    for dim in dims:
        for atom in expand(dim):
            pieces = pieces_of(atom)
            for piece in pieces:
                for inner, share in shares((piece,)).items():
                    found[inner] = found.get(inner, 0) + share * size_of(piece) / atom.size
            if not pieces:
                found[atom] = 1.0
    return found


def together(dims: Dims) -> list[set[Atom]]:
    """Return the sets of atoms along which one element of an array can lie.

    There is one set, unless dims have pieces.
    """
    found: list[set[Atom]] = [set()]
    for dim in dims:
        for atom in expand(dim):
            inner = [atoms for piece in pieces_of(atom) for atoms in together((piece,))]
            found = [a | b for a in found for b in inner or [{atom}]]
            if len(found) > _MOST_TOGETHER:
                found = [set().union(*found)]
    return found


def repeated(dims: Dims) -> set[Atom]:
    """Return the atoms along which an element of an array lies twice."""
    seen: set[Atom] = set()
    twice: set[Atom] = set()
    for dim in dims:
        for atom in expand(dim):
            mine = set(atoms_in((atom,)))
            twice |= seen & mine
            seen |= mine
            for piece in pieces_of(atom):
                twice |= repeated((piece,))
    return twice
