"""The ways in which an equation can run on an axis, read from its rule.

A rule says which dims of an equation are one (see `rules`). Here it is asked about one equation
alone: the classes that it then makes are the equation's own indices, as those of an einsum. The
equation can be split along each index that it does not need whole. Operands and results that have
the index are parts. The other operands are copies, and a result over which the index is summed is a
sum of summands. Besides, every equation can run whole, on all devices alike.

Whether an array has the same class twice does not matter here: scores of attention have the
sequence as queries and as keys, and either can be split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax

from zeroxla.program.primitives import LINEAR, SUMS
from zeroxla.program.trace import Constant, Equation, Operand, Program, Value
from zeroxla.split.atoms import (
    Atom,
    Dim,
    Dims,
    atoms_in,
    choosing,
    dim_in_pieces,
    expand,
    pieces_of,
    together,
)
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.holdings import COPIES, SUMMANDS, WHOLE, Holding, part
from zeroxla.split.run_parts import PartsRunner
from zeroxla.split.split_axis import SplitAxis


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AxisPlan:
    """How a program runs on an axis.

    Attributes:
      program: the program.
      flow: the dims of its values.
      steps: its equations, each with its way.
      inputs: the holdings in which each input is given.
      outputs: the holding of each result.
      cost: what it costs, in seconds, inputs aside.
    """

    program: Program
    flow: DimsFlow
    steps: tuple[tuple[Equation, Way], ...]
    inputs: tuple[tuple[Holding, ...], ...]
    outputs: tuple[Holding, ...]
    cost: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AxisExchange:
    """How an equation runs that exchanges arrays over the axis while it computes.

    Attributes:
      name: what is done, such as "ring".
      operand: the position of the operand that travels.
      run: (axis, operands in the holdings that it needs) -> results.
      forward, backward: the bytes that a device receives.
      collectives: their number, forward and backward.
    """

    name: str
    operand: int
    run: Callable[[SplitAxis, Sequence[jax.Array]], list[jax.Array]]
    forward: float
    backward: float
    collectives: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way to run an equation.

    Attributes:
      needs: the holdings that it needs of each operand.
      gives: the holding of each result.
      index: the index of the equation that is split; None if it runs on what it is given.
      flow: the equation alone, to run it.
      classes: the classes of the program that the index is, in operands and results.
      cost: what it costs, in seconds; conversions of operands aside.
      body: for a loop or a `jax.checkpoint`, the plan of its body; for a derivative of its own, the
        plan of forward.
      backward: the plan of backward, for a derivative of its own.
      turns: whether each device takes its part of a loop's turns.
      exchange: how it runs if it exchanges arrays on the way; None if it does not.
      keeps: the holdings to which results are converted, where a user has pinned them; empty if
        they stay as they are given.
      from_full: whether each device may have whole what it needs as summands.
    """

    needs: tuple[tuple[Holding, ...], ...]
    gives: tuple[Holding, ...]
    index: Atom | None = None
    flow: DimsFlow | None = None
    classes: frozenset[Atom] = frozenset()
    cost: float = 0.0
    body: AxisPlan | None = None
    backward: AxisPlan | None = None
    turns: bool = False
    exchange: AxisExchange | None = None
    keeps: tuple[Holding, ...] = ()
    from_full: bool = False

    @property
    def kept(self) -> tuple[Holding, ...]:
        """The holding in which each result is kept."""
        return self.keeps or self.gives

    @property
    def adds_up(self) -> bool:
        """Whether it adds summands to what it is given, which each device may have whole."""
        of_body = self.body is not None and SUMMANDS in self.gives
        return self.turns or self.from_full or of_body

    @property
    def is_split(self) -> bool:
        """Whether each device does a part of the work."""
        return bool(self.classes)

    def run(self, axis: SplitAxis, args: Sequence[jax.Array]) -> list[jax.Array]:
        """Run the equation on arrays in the holdings that it needs."""
        assert self.flow is not None, "it has a body"
        with choosing(self.index):
            axis = dataclasses.replace(axis, defers=True)
            return PartsRunner(self.flow, axis, index=self.index)(args)


def ways_of(eq: Equation, flow: DimsFlow, parts: int) -> list[Way]:
    """Return the ways to run an equation, the one in which nothing is split first.

    What is computed from leaves alone is copies, because leaves are: its cotangents are summed with
    those of the leaves.

    Args:
      eq: the equation.
      flow: the flow through the program that it is of.
      parts: the length of the axis.
    """
    operands = [flow.of_operand(x) for x in eq.inputs]
    local = flow_alone(eq, flow)
    clones = [local.dims[v] for v in local.program.inputs]
    (alone,) = local.program.equations
    indices: dict[Atom, _Index] = {}
    for i, (cloned, known) in enumerate(zip(clones, operands, strict=True)):
        _note(indices, cloned, known, i, is_result=False)
    for i, (v, found) in enumerate(zip(eq.outputs, local.outputs(), strict=True)):
        _note(indices, found, flow.dims[v], i, is_result=True)
    of_leaves = any(map(flow.made_of_leaves, eq.outputs))
    kind = COPIES if of_leaves else WHOLE
    found = [Way(((kind,),) * len(eq.inputs), (kind,) * len(eq.outputs), None, local)]
    composite = bool(local.bodies)
    for atom, index in indices.items():
        way = _way(alone, atom, index, local, parts, composite=composite)
        if way is not None:
            found.append(way)
    return found + _of_summands(eq, local)


def flow_alone(eq: Equation, flow: DimsFlow) -> DimsFlow:
    """Return the flow through one equation of a program alone. Its inputs are the operands."""
    alone = dataclasses.replace(eq, inputs=tuple(map(_stand_in, eq.inputs)))
    clones = [_cloned(flow.of_operand(x)) for x in eq.inputs]
    return DimsFlow.of_equation(alone, clones, flow.opened)


@dataclasses.dataclass(slots=True)
class _Index:
    """Where an index of an equation occurs: (dim, class of the program) by operand or result."""

    operands: dict[int, tuple[int, Atom]] = dataclasses.field(default_factory=dict)
    results: dict[int, tuple[int, Atom]] = dataclasses.field(default_factory=dict)
    fits: bool = True


def _way(
    eq: Equation, atom: Atom, index: _Index, local: DimsFlow, parts: int, *, composite: bool
) -> Way | None:
    """Return the way to split an equation along an index; None if it cannot be split so."""
    if not index.fits or atom.blocked or atom.is_loop or atom.size % parts:
        return None
    reduced = bool(atom.sums) or atom.is_compared
    if composite and reduced:
        return None
    needs = tuple(
        (part(*index.operands[i]),) if i in index.operands else (COPIES,)
        for i in range(len(eq.inputs))
    )
    gives = []
    for i in range(len(eq.outputs)):
        if i in index.results:
            gives.append(part(*index.results[i]))
        elif not reduced:
            return None
        else:
            gives.append(WHOLE if atom.is_compared else SUMMANDS)
    classes = {g for _, g in (*index.operands.values(), *index.results.values())}
    return Way(needs, tuple(gives), atom, local, frozenset(classes))


def _of_summands(eq: Equation, local: DimsFlow) -> list[Way]:
    """Return the ways to run a linear equation on summands."""
    if not all(v.is_float for v in eq.outputs):
        return []
    flows = [x.is_float for x in local.program.inputs]
    num = len(eq.inputs)
    needs: list[tuple[Holding, ...]] = []
    if eq.name in SUMS or (eq.name in LINEAR and num == 1):
        needs.append((SUMMANDS,) * num)
    elif eq.name == "mul":
        needs += [(SUMMANDS, COPIES), (COPIES, SUMMANDS)]
    elif eq.name == "div":
        needs.append((SUMMANDS, COPIES))
    if not all(flows):
        return []
    return [Way(tuple((x,) for x in each), (SUMMANDS,), None, local) for each in needs]


def _note(
    indices: dict[Atom, _Index],
    found: Dims,
    known: Dims,
    i: int,
    *,
    is_result: bool,
) -> None:
    """Note where an operand or a result has which index.

    A dim of which only some pieces have the index does not fit: devices would have the other pieces
    whole, and one cotangent of them for each device.

    Args:
      indices: what is known of each index; is extended.
      found: the dims that the equation alone has.
      known: the dims that the array has in the program.
      i: the position of the operand or result.
      is_result: whether it is a result.
    """
    for d, (mine, its) in enumerate(zip(found, known, strict=True)):
        pairs = paired(mine, its)
        for local, _ in pairs or [(a, a) for a in atoms_in(mine)]:
            index = indices.setdefault(local, _Index())
            index.fits = index.fits and pairs is not None
        for local, atom in pairs or ():
            index = indices[local]
            at = index.results if is_result else index.operands
            same = {a for a, b in pairs or () if b is atom}
            in_all = all(local in atoms for atoms in together((mine,)))
            if not in_all or same != {local} or at.setdefault(i, (d, atom)) != (d, atom):
                index.fits = False


def paired(mine: Dim, its: Dim) -> list[tuple[Atom, Atom]] | None:
    """Return the atoms of two dims in pairs; None if they are not made alike."""
    first, second = expand(mine), expand(its)
    if [a.size for a in first] != [a.size for a in second]:
        return None
    found: list[tuple[Atom, Atom]] = []
    for a, b in zip(first, second, strict=True):
        left, right = pieces_of(a), pieces_of(b)
        if len(left) != len(right):
            return None
        for x, y in zip(left, right, strict=True):
            inner = paired(x, y)
            if inner is None:
                return None
            found += inner
        if not left:
            found.append((a, b))
    return found


def _cloned(dims: Dims) -> Dims:
    """Return dims made like others, of new atoms. A class that one dim has in several pieces is one
    new atom."""

    def clone(dim: Dim, known: dict[Atom, Atom]) -> Dim:
        found: list[Atom] = []
        for atom in expand(dim):
            if pieces := pieces_of(atom):
                found += dim_in_pieces([clone(piece, known) for piece in pieces])
                continue
            if atom not in known:
                known[atom] = Atom(atom.size)
            found.append(known[atom])
        return tuple(found)

    return tuple(clone(dim, {}) for dim in dims)


def _stand_in(operand: Operand) -> Value:
    if isinstance(operand, Constant):
        return Value(jax.typeof(operand.value))
    return Value(operand.aval)
