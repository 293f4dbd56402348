"""`matrix_pieces`: cuts the parts of an update that need whole matrices out of its program.

The equations that need a matrix whole (see `mixing`) are found first. Those that belong to one
matrix are joined: they follow from each other, or meet in one array. Around them a minimum cut
takes in other equations of this matrix alone, so that the fewest bytes go in and come out. With
Muon the momentum goes in and its orthogonalization comes out. Everything else stays outside, where
each device computes its part.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from zeroxla.program.min_cut import Edge, source_side
from zeroxla.program.primitives import ARRANGEMENTS, REDUCTIONS
from zeroxla.program.trace import Equation, Program, Value, bytes_of
from zeroxla.step.owners.mixing import mixes

_REDUCTION_BYTES = 256
"""A reduction outside costs as much as this many bytes: a collective of its own."""

_OUTSIDE, _INSIDE = 0, 1

Readers = Mapping[Value, Sequence[Equation | None]]
"""The equations that read each value; None stands for the program's results."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MatrixPiece:
    """Equations that one device computes, because they need a matrix whole.

    Attributes:
      equations: the equations, in order.
      reads: the values that they need and do not make, in the order of their first use.
      results: the values that others need of them.
      turn: pieces of one turn do not wait for each other; those of a later turn may need the
        results of an earlier one.
    """

    equations: tuple[Equation, ...]
    reads: tuple[Value, ...]
    results: tuple[Value, ...]
    turn: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CutProgram:
    """A program that is cut into matrix pieces and the rest.

    Attributes:
      program: the program.
      pieces: the pieces, by turns.
      outside: the other equations by turn: those of turn i run before the pieces of turn i, and the
        last ones after all pieces.
    """

    program: Program
    pieces: tuple[MatrixPiece, ...]
    outside: tuple[tuple[Equation, ...], ...]

    @property
    def turns(self) -> list[tuple[tuple[Equation, ...], list[MatrixPiece]]]:
        """The equations before the pieces of each turn, and these pieces."""
        return [
            (before, [piece for piece in self.pieces if piece.turn == i])
            for i, before in enumerate(self.outside)
        ]

    def only(self, kept: Collection[MatrixPiece]) -> CutProgram:
        """Return the program with some of its pieces; the equations of the others are outside."""
        mine = [piece for piece in self.pieces if piece in kept]
        owned = {eq: i for i, piece in enumerate(mine) for eq in piece.equations}
        return _cut(self.program, owned, _readers(self.program))


def matrix_pieces(program: Program) -> CutProgram:
    """Cut a program. It has no pieces if nothing in it needs a matrix whole.

    Cost: a minimum cut for each matrix, over the equations that belong to it.
    """
    seeds = [eq for eq in program.equations if mixes(eq) and not _stays(eq)]
    component = _components(program, seeds)
    readers, owned = _readers(program), {}
    for c, mine in _by_component(program, component).items():
        inside = _inside(mine, component, readers)
        owned.update((eq, c) for eq in mine if eq in inside)
    return _cut(program, owned, readers)


def _readers(program: Program) -> Readers:
    found: dict[Value, list[Equation | None]] = defaultdict(list)
    for eq in program.equations:
        for v in dict.fromkeys(eq.values):
            found[v].append(eq)
    for v in program.outputs:
        if isinstance(v, Value):
            found[v].append(None)
    return found


def _stays(eq: Equation) -> bool:
    """Return whether an equation must run on all devices together."""
    return eq.is_pinned or eq.name in ("shard_map", "sharding_constraint")


def _components(program: Program, seeds: Sequence[Equation]) -> dict[Equation, int]:
    """Return the number of each seed's component. Seeds are joined where arrays that follow from
    them meet; values of one element do not count, as norms over several matrices do not."""
    parent = list(range(len(seeds)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    number = {eq: i for i, eq in enumerate(seeds)}
    follows: dict[Value, int] = {}  # a value that follows from a seed, and this seed
    for eq in program.equations:
        found = [follows[v] for v in eq.values if v in follows and v.aval.size > 1]
        found += [number[eq]] if eq in number else []
        for i in found[1:]:
            parent[root(i)] = root(found[0])
        if found:
            follows.update(dict.fromkeys(eq.outputs, found[0]))
    names: dict[int, int] = {}
    return {eq: names.setdefault(root(i), len(names)) for eq, i in number.items()}


def _by_component(program: Program, component: Mapping[Equation, int]) -> dict[int, list[Equation]]:
    """Return the equations that belong to one component alone: all seeds that they follow from, or
    that follow from them, are of this component."""
    above: dict[Value, int] = defaultdict(int)  # sets of components, as bits
    below: dict[Value, int] = defaultdict(int)
    bits: dict[Equation, int] = {}
    for eq in program.equations:
        own = 1 << component[eq] if eq in component else 0
        bits[eq] = own
        for v in eq.values:
            bits[eq] |= above[v]
        above.update(dict.fromkeys(eq.outputs, bits[eq]))
    found: dict[int, list[Equation]] = {}
    for eq in reversed(program.equations):
        mine = 1 << component[eq] if eq in component else 0
        for v in eq.outputs:
            mine |= below[v]
        for v in eq.values:
            below[v] |= mine
        mine |= bits[eq]
        if eq in component or (mine.bit_count() == 1 and not _stays(eq)):
            c = component.get(eq, mine.bit_length() - 1)
            found.setdefault(c, []).append(eq)
    return {c: mine[::-1] for c, mine in sorted(found.items())}


def _inside(
    mine: Sequence[Equation], seeds: Mapping[Equation, int], readers: Readers
) -> frozenset[Equation]:
    """Return the equations that the minimum cut leaves inside, for one component."""
    node = {eq: i for i, eq in enumerate(mine, start=2)}
    maker = {v: node[eq] for eq in mine for v in eq.outputs}
    edges: list[Edge] = []
    between = _between(mine, seeds)
    for eq, n in node.items():
        if eq in between:
            edges.append((n, _INSIDE, np.inf))
        elif eq.name in REDUCTIONS:
            edges.append((n, _INSIDE, _REDUCTION_BYTES))
        elif eq.name in ARRANGEMENTS:
            edges.append((n, _INSIDE, 1.0))  # Matrices travel as they are stored.
    free = len(node) + 2
    for v in dict.fromkeys(v for eq in mine for v in (*eq.values, *eq.outputs)):
        there = [node.get(eq, _OUTSIDE) if eq else _OUTSIDE for eq in readers.get(v, ())]
        nodes = there if v in maker else [n for n in there if n != _OUTSIDE]
        made, down, up = maker.get(v, _OUTSIDE), free, free + 1
        free += 2
        edges += [(made, down, float(bytes_of(v))), (up, made, float(bytes_of(v)))]
        edges += [(down, n, np.inf) for n in nodes] + [(n, up, np.inf) for n in nodes]
    outside = source_side(edges, free, source=_OUTSIDE, sink=_INSIDE)
    return frozenset(eq for eq, n in node.items() if n not in outside)


def _between(mine: Sequence[Equation], seeds: Mapping[Equation, int]) -> set[Equation]:
    """Return the seeds, and the equations that follow from one and that another one follows from.
    If these were outside, a matrix would travel twice."""
    after: set[Value] = set()
    before: set[Value] = set()
    for eq in mine:
        if eq in seeds or not after.isdisjoint(eq.values):
            after.update(eq.outputs)
    for eq in reversed(mine):
        if eq in seeds or not before.isdisjoint(eq.outputs):
            before.update(eq.values)
    follow = {eq for eq in mine if not after.isdisjoint(eq.values)}
    return {
        eq for eq in mine if eq in seeds or (eq in follow and not before.isdisjoint(eq.outputs))
    }


def _cut(program: Program, owned: Mapping[Equation, int], readers: Readers) -> CutProgram:
    """Return the program with the equations of `owned`, by component, in pieces."""
    turn: dict[Value, int] = defaultdict(int)  # even: outside, before the pieces of turn n // 2
    outside: dict[int, list[Equation]] = defaultdict(list)
    inside: dict[tuple[int, int], list[Equation]] = defaultdict(list)
    for eq in program.equations:
        side = int(eq in owned)
        n = max((turn[v] + (turn[v] % 2 != side) for v in eq.values), default=side)
        n += n % 2 != side
        turn.update(dict.fromkeys(eq.outputs, n))
        if side:
            inside[n // 2, owned[eq]].append(eq)
        else:
            outside[n // 2].append(eq)
    found = [_piece(eqs, readers, n) for (n, _), eqs in sorted(inside.items())]
    order = {eq: i for i, eq in enumerate(program.equations)}
    pieces = [
        same[0] if len(same) == 1 else _piece(sorted(eqs, key=order.__getitem__), readers, turn)
        for turn in dict.fromkeys(piece.turn for piece in found)
        for same in sharing([piece for piece in found if piece.turn == turn])
        for eqs in [[eq for piece in same for eq in piece.equations]]
    ]
    num = 1 + max([*outside, *(piece.turn + 1 for piece in pieces)], default=0)
    return CutProgram(
        program=program,
        pieces=tuple(pieces),
        outside=tuple(tuple(outside[i]) for i in range(num)),
    )


def sharing(pieces: Sequence[MatrixPiece]) -> list[list[MatrixPiece]]:
    """Join pieces of one turn that read the same matrices, which then travel once.

    Two are joined if what both read is at least a quarter of the bytes that each of them reads.
    """
    readers: dict[Value, list[int]] = defaultdict(list)
    for i, piece in enumerate(pieces):
        for v in piece.reads:
            readers[v].append(i)
    both: Counter[tuple[int, int]] = Counter()
    for v, mine in readers.items():
        both.update(dict.fromkeys(itertools.pairwise(mine), bytes_of(v)))
    sizes = [sum(map(bytes_of, piece.reads)) for piece in pieces]
    groups = [[i] for i in range(len(pieces))]
    for (i, j), size in both.items():
        if 4 * size >= max(sizes[i], sizes[j]) and groups[i] is not groups[j]:
            groups[i] += groups[j]
            for k in groups[j]:
                groups[k] = groups[i]
    firsts = {id(group): sorted(group) for group in groups}
    return [[pieces[i] for i in group] for group in firsts.values()]


def _piece(equations: Sequence[Equation], readers: Readers, turn: int) -> MatrixPiece:
    mine, made = set(equations), dict.fromkeys(v for eq in equations for v in eq.outputs)
    return MatrixPiece(
        equations=tuple(equations),
        reads=tuple(dict.fromkeys(v for eq in equations for v in eq.values if v not in made)),
        results=tuple(v for v in made if not mine.issuperset(readers.get(v, ()))),
        turn=turn,
    )
