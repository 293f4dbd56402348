"""`layers_of`: proves that a piece of stacked matrices computes each of them alone.

Scanned models stack the matrices of their layers in one leaf. If no equation of a piece combines
elements of two layers, each layer can have an owner of its own. The rules that find the axes of a
model (see `split/rules.py`) tell whether this holds, and run the piece on one layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax

from zeroxla.program.trace import Program
from zeroxla.split.atoms import Atom, Dim, choosing, dims_of, expand, pieces_of
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.run_parts import PartsRunner
from zeroxla.split.split_axis import SplitAxis
from zeroxla.step.owners.matrix_pieces import MatrixPiece


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layers:
    """A dim along which a piece may be cut.

    Attributes:
      flow: the piece, and the dims of its values.
      atom: the dim.
      reads, results: by position, the number of the dim in each value that the piece reads and
        makes; None where it does not occur.
    """

    flow: DimsFlow
    atom: Atom
    reads: tuple[int | None, ...]
    results: tuple[int | None, ...]

    @property
    def length(self) -> int:
        """The number of layers."""
        return self.atom.root.size

    def run(self, args: Sequence[jax.Array], layer: jax.Array) -> list[jax.Array]:
        """Compute one layer.

        Args:
          args: what the piece reads; the dim of the layers has length 1.
          layer: the number of the layer, int32.

        Returns:
          The results; the dim of the layers has length 1.
        """
        with choosing(self.atom):
            return PartsRunner(self.flow, SplitAxis(parts=self.length, part=layer))(args)


def program_of(piece: MatrixPiece) -> Program:
    """Return a piece as a program of its own."""
    return Program(piece.reads, piece.equations, piece.results)


def layers_of(piece: MatrixPiece) -> list[Layers]:
    """Return the dims along which a piece may be cut, in the order of the dims of what it reads.

    Each of the piece's results has such a dim, and no equation goes through it.
    """
    flow = DimsFlow.of(program_of(piece), [dims_of(v.aval.shape) for v in piece.reads])
    reads = [flow.dims[v] for v in piece.reads]
    results = [flow.dims[v] for v in piece.results]
    found: list[Layers] = []
    for atom in dict.fromkeys(a for dims in reads for a in _alone(dims)):
        inside = [_place_of(dims, atom) for dims in reads]
        made = [_place_of(dims, atom) for dims in results]
        if _is_batch(atom) and None not in made:
            layers = Layers(flow=flow, atom=atom, reads=tuple(inside), results=tuple(made))
            found.append(layers)
    return found


def _alone(dims: Sequence[Dim]) -> Iterator[Atom]:
    """Yield the atoms that are a whole dim of an array."""
    for dim in dims:
        atoms = expand(dim)
        if len(atoms) == 1 and not pieces_of(atoms[0]):
            yield atoms[0]


def _place_of(dims: Sequence[Dim], atom: Atom) -> int | None:
    """Return the number of the dim that an atom is."""
    return next((d for d, dim in enumerate(dims) if expand(dim) == (atom,)), None)


def _is_batch(atom: Atom) -> bool:
    """Return whether no equation combines elements along an atom."""
    passed = atom.needed_whole or atom.sums or atom.is_table or atom.is_loop or atom.is_compared
    return not passed and not atom.is_contracted
