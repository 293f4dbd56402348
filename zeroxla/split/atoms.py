"""Dims as products of atoms, the parts of dims that must be split together.

A dim of size 768 that the program later reshapes to 12 heads of 64 is the product of two atoms, the
outer one of size 12. Where an equation makes two dims one (a product contracts them, a sum adds
them), their atoms are joined. Where an equation takes a dim apart, its atoms are refined. In the
end every class of joined atoms is one quantity of the model: its heads, its hidden width, its
vocabulary. Each dim of a leaf then lists the classes that it holds, the outermost first.

Joining is union-find; `Atom.root` stands for a class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Dim = tuple["Atom", ...]
"""A dim as a product of atoms, the outermost first. A dim of size 1 has no atoms."""
Dims = tuple[Dim, ...]
"""The dims of one array."""

KINDS = ("is_contracted", "is_heads", "is_table", "is_loop")


class Atom:
    """A factor of a dim. Atoms are compared by identity; `root` stands for an atom's class.

    Attributes (of a root; they hold for its whole class):
      size: the number of elements along it.
      blocked: the reasons why it cannot be split; empty if it can be.
      sums: for each product or lookup along it, the number of elements of the result. They are
        summed over the parts if it is split.
      is_contracted: whether a product sums over it.
      is_heads: whether two activations are multiplied head by head along it.
      is_table: whether indices are looked up along it.
      is_loop: whether a loop goes through it, one element in each turn.
      chosen: whether it is split.
    """

    __slots__ = (
        "_parent",
        "_parts",
        "blocked",
        "chosen",
        "is_contracted",
        "is_heads",
        "is_loop",
        "is_table",
        "size",
        "sums",
    )

    def __init__(self, size: int, *, chosen: bool = False) -> None:
        self.size = size
        self.blocked: dict[str, None] = {}
        self.sums: list[int] = []
        self.is_contracted = self.is_heads = self.is_table = self.is_loop = False
        self.chosen = chosen
        self._parent: Atom | None = None
        self._parts: Dim = ()

    @property
    def root(self) -> Atom:
        """The atom that stands for this one's class."""
        atom = self
        while atom._parent is not None:
            atom = atom._parent
        return atom

    def __repr__(self) -> str:
        return f"Atom({self.size})"


def dim_of(size: int) -> Dim:
    """Return a new dim, about which nothing is known."""
    return () if size == 1 else (Atom(size),)


def dims_of(shape: Sequence[int]) -> Dims:
    """Return new dims for an array of a shape; nothing is known about them."""
    return tuple(map(dim_of, shape))


def expand(dim: Dim) -> Dim:
    """Return the dim's atoms after all refinements and joins so far."""
    found: list[Atom] = []
    for atom in dim:
        root = atom.root
        found.extend(expand(root._parts) if root._parts else (root,))
    return tuple(found)


def size_of(dim: Dim) -> int:
    """Return the product of the sizes of the dim's atoms."""
    return math.prod(atom.size for atom in dim)


def block(dim: Dim, why: str) -> None:
    """Record that no atom of the dim can be split, and the reason."""
    for atom in expand(dim):
        atom.blocked[why] = None


def refine(atom: Atom, outer: int) -> None:
    """Take an unrefined root apart into an atom of size `outer` and one for the rest."""
    if atom.chosen:
        block((atom,), "it is taken apart")
        return
    parts = Atom(outer), Atom(atom.size // outer)
    for part in parts:
        part.blocked, part.sums = dict(atom.blocked), list(atom.sums)
        for kind in KINDS:
            setattr(part, kind, getattr(atom, kind))
    atom._parts = parts


def join(a: Dim, b: Dim, why: str) -> None:
    """Make two dims one.

    If one dim has an atom of 12 where the other has 3 x 4, the 12 is refined. If neither fits into
    the other (6 x 2 and 4 x 3, after the common 2), the rest of both is blocked, with the reason
    `why`.
    """
    assert size_of(expand(a)) == size_of(expand(b)), (a, b)
    first, second = list(expand(a)), list(expand(b))
    while first and second:
        x, y = first[0].root, second[0].root
        common = math.gcd(x.size, y.size)
        if common == 1:
            block((*first, *second), why)
            return
        for atom in (x, y):
            if atom.size != common:
                if atom.chosen:
                    block((*first, *second), why)
                    return
                refine(atom, common)
                # The same atom may stand in both dims, and again further on.
                first[:], second[:] = expand(tuple(first)), expand(tuple(second))
                break
        else:
            _unite(x, y)
            del first[0], second[0]


def _unite(a: Atom, b: Atom) -> None:
    """Join two unrefined roots of the same size."""
    if a is b:
        return
    b._parent = a
    a.blocked |= b.blocked
    a.sums += b.sums
    for kind in (*KINDS, "chosen"):
        setattr(a, kind, getattr(a, kind) or getattr(b, kind))


def chosen_factors(dim: Dim) -> tuple[int, int, int] | None:
    """Return a dim's size as (outer, size, inner), where `size` belongs to the chosen atom.

    Returns None if no atom of the dim is chosen.
    """
    atoms = expand(dim)
    places = [i for i, atom in enumerate(atoms) if atom.chosen]
    if not places:
        return None
    (i,) = places
    return size_of(atoms[:i]), atoms[i].size, size_of(atoms[i + 1 :])


def one_run(dim: Dim, start: int, size: int) -> Dim | None:
    """Return the dim of a slice that takes one whole run of a dim.

    The dim is seen as several runs of `size` elements, one after another. The slice takes the run
    that begins at `start`. Returns None if no run begins there, or if `size` does not divide the
    dim.
    """
    whole = expand(dim)
    total = size_of(whole)
    if size == total:
        return whole
    if size == 0 or total % size or start % size:
        return None
    outer = Atom(total // size)
    inner = dim_of(size)
    join(whole, (outer, *inner), "a slice cuts it")
    block((outer,), "a slice takes one of its parts")
    return expand(inner)


def repeated(dims: Dims) -> set[Atom]:
    """Return the atoms that occur more than once in a value's dims."""
    seen: set[Atom] = set()
    twice: set[Atom] = set()
    for dim in dims:
        for atom in expand(dim):
            (twice if atom in seen else seen).add(atom)
    return twice
