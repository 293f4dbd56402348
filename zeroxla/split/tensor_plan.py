"""Chooses which dim of which leaf is split over the axis `tensor`, from the model's own programs.

A class of joined atoms (see `atoms`) can be split if nothing in the programs needs it whole. Of the
classes that leaves hold and that can be split, the cheapest are split first, and no two that occur
in one array. A class is cheap if few elements are summed or gathered per element of the leaves that
it splits.

For a transformer this finds the heads, the hidden widths and the vocabulary; the residual stream
stays whole. Products then come in pairs: the first is split by columns, the second by rows, and one
sum follows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from zeroxla.program.report import Report
from zeroxla.split.atoms import Atom, Dims, atoms_in, expand, is_split, shares, size_of
from zeroxla.split.layout import LeafSplit, layout_of
from zeroxla.split.part_program import PartProgram

if TYPE_CHECKING:
    from rich.table import Table

REFUSED = "split, it computes something else"
"""The reason given for a class whose split the proof refused."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlan(Report):
    """The layout of every leaf; `print` it, or read `rows`.

    Attributes:
      rows: one row for each leaf, in the order of the flattened parameters.
      parts: the number of devices over which leaves are split.
    """

    rows: tuple[LeafSplit, ...]
    parts: int

    @property
    def num_elements(self) -> int:
        """The number of elements that one device holds, padding included."""
        return sum(math.prod(row.part_shape(self.parts)) for row in self.rows)

    @property
    def num_parameters(self) -> int:
        """The number of elements of all leaves."""
        return sum(math.prod(row.shape) for row in self.rows)

    @property
    def refused(self) -> list[str]:
        """The paths of leaves that stay whole because the proof refused their split."""
        return [row.path for row in self.rows if REFUSED in row.why]

    def table(self) -> Table:
        """Return the plan as a rich table."""
        share = self.num_elements * self.parts / max(self.num_parameters, 1)
        from rich.table import Table

        table = Table(
            title=f"{self.num_parameters:,} parameters, tensor={self.parts}\n"
            f"a device: {self.num_elements:,}, {share:.3f} of 1/{self.parts}"
        )
        for name in ("leaf", "shape", "split", "what, or why not"):
            table.add_column(name, no_wrap=name != "what, or why not")
        for row in self.rows:
            shape = "x".join(map(str, row.shape)) or "scalar"
            table.add_row(row.path, shape, row.in_words(), row.why)
        return table


def leaf_classes(leaves: Sequence[Dims]) -> dict[str, Atom]:
    """Return the classes that leaves hold, by name.

    A class is named after the place where it occurs first: the number of the leaf, of the dim in
    it, and of the atom in that.
    """
    found: dict[Atom, str] = {}
    for i, dims in enumerate(leaves):
        for d, dim in enumerate(dims):
            for k, atom in enumerate(atoms_in(dim)):
                found.setdefault(atom, f"{i}.{d}.{k}")
    return {name: atom for atom, name in found.items()}


def make_tensor_plan(
    programs: Sequence[PartProgram],
    leaves: Sequence[Dims],
    paths: Sequence[str],
    parts: int,
    refused: Collection[str] = (),
) -> TensorPlan:
    """Choose the classes to split, and mark their atoms as chosen.

    Args:
      programs: the programs that the layout is for, all over the same leaves.
      leaves: the dims of each leaf.
      paths: the name of each leaf.
      parts: the number of devices over which leaves are split.
      refused: classes that must not be split, by the names of `leaf_classes`.

    Raises:
      ValueError: the model has heads, and `parts` does not divide their number.
    """
    kept = {atom for name, atom in leaf_classes(leaves).items() if name in refused}
    covered: dict[Atom, float] = {}
    for dims in leaves:
        for atom, share in shares(dims).items():
            covered[atom] = covered.get(atom, 0) + share * _elements(dims)
    costs = {atom: float(sum(atom.sums)) for atom in covered}
    for dims in (dims for program in programs for dims in program.result_dims()):
        for atom, share in shares(dims).items():
            if atom in costs:
                costs[atom] += share * _elements(dims)
    arrays = [atoms & covered.keys() for program in programs for atoms in program.flow.atoms()]
    _check_heads(leaves, paths, parts, arrays)
    able = [a for a in covered if not a.needed_whole and _divides(a, parts) and a not in kept]
    for atom in sorted(able, key=lambda a: costs[a] / covered[a]):
        meets = any(other.chosen for found in arrays if atom in found for other in found)
        atom.chosen = parts > 1 and not meets
    rows = [
        _row(path, dims, parts, kept, _contracted(programs, i))
        for i, (path, dims) in enumerate(zip(paths, leaves, strict=True))
    ]
    return TensorPlan(rows=tuple(rows), parts=parts)


def _divides(atom: Atom, parts: int) -> bool:
    """Whether an atom can be split into equal parts.

    Parts may be padded if no product meets the padding: a vocabulary, a table of positions.
    """
    return atom.size % parts == 0 or not (atom.is_heads or atom.is_contracted)


def _elements(dims: Dims) -> int:
    return math.prod(size_of(expand(dim)) for dim in dims)


def _check_heads(
    leaves: Sequence[Dims], paths: Sequence[str], parts: int, arrays: Sequence[set[Atom]]
) -> None:
    """Check that attention can be split: by its heads, or by the queries of a key-value head.

    Raises:
      ValueError: neither number divides by `parts`.
    """
    for path, dims in zip(paths, leaves, strict=True):
        for d, dim in enumerate(dims):
            for atom in (a for a in atoms_in(dim) if a.is_heads and not a.needed_whole):
                beside = {a for found in arrays if atom in found for a in found if a.is_heads}
                if all(a.needed_whole or a.size % parts for a in beside):
                    divisors = [n for n in range(1, atom.size + 1) if atom.size % n == 0]
                    raise ValueError(
                        f"tensor={parts} does not divide the {atom.size} heads of {path!r} (dim "
                        f"{d}; with grouped queries, its key-value heads); use one of {divisors}"
                    )


def _contracted(programs: Sequence[PartProgram], leaf: int) -> set[Atom]:
    """Return the atoms of a leaf that products sum over."""
    return {
        atom
        for program in programs
        for dim in program.flow.contracted.get(leaf, ())
        for atom in atoms_in(dim)
    }


def _row(path: str, dims: Dims, parts: int, kept: Collection[Atom], summed: set[Atom]) -> LeafSplit:
    """Describe how a leaf is split, or why it is not.

    Args:
      path, dims: the leaf's name and dims.
      parts: the number of devices over which leaves are split.
      kept: the classes that must not be split.
      summed: the leaf's atoms that products sum over.
    """
    shape = tuple(size_of(expand(dim)) for dim in dims)
    for d, dim in enumerate(dims):
        if is_split(dim):
            kinds = dict.fromkeys(_kind(atom, summed) for atom in atoms_in(dim) if atom.chosen)
            why = "; ".join(kinds)
            return LeafSplit(path=path, shape=shape, dim=d, pieces=layout_of(dim), why=why)
    reasons = []
    for d, dim in enumerate(dims):
        why = [_reason(atom, parts, kept) for atom in atoms_in(dim)]
        reasons += [f"dim {d}: {why[0]}"] if why else []
    return LeafSplit(path=path, shape=shape, why="; ".join(reasons) or "one element")


def _kind(atom: Atom, summed: set[Atom]) -> str:
    """Return what a chosen atom is."""
    kind = "rows" if atom in summed else "columns"
    if atom.is_heads:
        kind = f"heads, in {kind}"
    elif atom.is_table:
        kind = "entries of a table"
    return f"{atom.size} {kind}"


def _reason(atom: Atom, parts: int, kept: Collection[Atom]) -> str:
    """Return the reason why an atom is not split."""
    if why := atom.needed_whole:
        return next(iter(why))
    if atom in kept:
        return REFUSED
    if not _divides(atom, parts):
        return f"{atom.size} does not divide by {parts}"
    return "one device has all" if parts == 1 else "another split is cheaper"
