"""Dims as products of atoms: which parts of which dims must be split together, if one is.

A dim of size 768 that is later seen as 12 heads of 64 is the product of two atoms, the outer one of
size 12. Where an equation makes two dims one (a product contracts them, a sum adds them), their
atoms are joined; where it takes a dim apart, its atoms are refined. At the end every class of
joined atoms is one thing of the model - its heads, its hidden width, its vocabulary - and each leaf
dim says which of them it holds, in which order.

Joining is union-find; a joined class is told by `Atom.root`.
"""

from __future__ import annotations

import math

Dim = tuple["Atom", ...]
"""A dim as a product of atoms, the outermost first; empty for size 1."""
Dims = tuple[Dim, ...]
"""Those of an array."""

KINDS = ("is_contracted", "is_heads", "is_table", "is_turns")


class Atom:
    """A factor of a dim. Compared by identity; `root` stands for its class.

    Attributes (of a root):
      size: how many.
      blocked: why the class cannot be split; empty if it can.
      sums: how many elements are summed over the parts, for each place where the class is
        contracted or looked up.
      is_contracted: whether a product sums over it.
      is_heads: whether two activations are multiplied head by head along it.
      is_table: whether tokens or positions are looked up along it.
      is_turns: whether a loop goes through it, turn by turn.
      chosen: it is split.
    """

    __slots__ = (
        "_parent",
        "_parts",
        "blocked",
        "chosen",
        "is_contracted",
        "is_heads",
        "is_table",
        "is_turns",
        "size",
        "sums",
    )

    def __init__(self, size: int, *, chosen: bool = False) -> None:
        self.size = size
        self.blocked: dict[str, None] = {}
        self.sums: list[int] = []
        self.is_contracted = self.is_heads = self.is_table = self.is_turns = False
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
    """Return a dim of its own."""
    return () if size == 1 else (Atom(size),)


def expand(dim: Dim) -> Dim:
    """Return the dim's atoms as they are refined and joined by now."""
    found: list[Atom] = []
    for atom in dim:
        root = atom.root
        found.extend(expand(root._parts) if root._parts else (root,))
    return tuple(found)


def size_of(dim: Dim) -> int:
    """Return the product of the dim's atoms."""
    return math.prod(atom.size for atom in dim)


def block(dim: Dim, why: str) -> None:
    """Say that nothing in the dim can be split."""
    for atom in expand(dim):
        atom.blocked[why] = None


def refine(atom: Atom, outer: int) -> None:
    """Take an unrefined root apart into `outer` times the rest."""
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

    Where one has 12 and the other 3 x 4, the 12 is refined. Where neither fits into the other (6 x
    2 and 4 x 3 after the common 2), what is left is blocked, with the reason `why`.
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
                # The same atom may stand in both dims, and further on.
                first[:], second[:] = expand(tuple(first)), expand(tuple(second))
                break
        else:
            _unite(x, y)
            del first[0], second[0]


def _unite(a: Atom, b: Atom) -> None:
    """Join two unrefined roots of one size."""
    if a is b:
        return
    b._parent = a
    a.blocked |= b.blocked
    a.sums += b.sums
    for kind in (*KINDS, "chosen"):
        setattr(a, kind, getattr(a, kind) or getattr(b, kind))


def splits(dim: Dim) -> tuple[int, int, int] | None:
    """Return (outer, size, inner) of the chosen atom of a dim, None if there is none."""
    atoms = expand(dim)
    places = [i for i, atom in enumerate(atoms) if atom.chosen]
    if not places:
        return None
    (i,) = places
    return size_of(atoms[:i]), atoms[i].size, size_of(atoms[i + 1 :])


def contiguous(dim: Dim, start: int, size: int) -> Dim | None:
    """Return the dim of a slice that takes whole outer turns: `size` elements from `start`, of a
    dim that is seen as so many runs of `size`; None where it is not such a slice."""
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
