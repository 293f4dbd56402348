"""Follows dims through a program: each value's dims, joined where the program makes them one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from zeroxla.program import compat
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Constant, Equation, Operand, Program, Value
from zeroxla.split.atoms import Atom, Dim, Dims, block, dim_of, dims_of, expand, join, repeated
from zeroxla.split.products import rule_of


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DimsFlow:
    """The dims of all values of a program, the bodies of its loops included.

    Attributes:
      program: the program.
      dims: the dims of every value and constant, the loops' bodies aside.
      bodies: the flow through the body of each `scan`.
      contracted: by a leaf's number, the leaf's dims that products sum over. In tensor parallelism
        these are called a matrix' rows, and its other dims columns.
    """

    program: Program
    dims: dict[Operand, Dims] = dataclasses.field(default_factory=dict)
    bodies: dict[Equation, DimsFlow] = dataclasses.field(default_factory=dict)
    contracted: dict[int, list[Dim]] = dataclasses.field(default_factory=dict)
    _leaves: dict[Operand, frozenset[int]] = dataclasses.field(default_factory=dict)
    """For a value that depends on leaves alone: the numbers of these leaves."""

    @staticmethod
    def of(program: Program, leaves: Sequence[Dims]) -> DimsFlow:
        """Follow the dims through a program.

        Args:
          program: a program traced with `opened=compat.forward_jaxpr`.
          leaves: the dims of its first inputs, which are the leaves.
        """
        flow, num_leaves = DimsFlow(program), len(leaves)
        others = [dims_of(v.aval.shape) for v in program.inputs[num_leaves:]]
        flow.dims.update(zip(program.inputs, (*leaves, *others), strict=True))
        flow._leaves.update((v, frozenset((i,))) for i, v in enumerate(program.inputs[:num_leaves]))
        flow._walk(set(program.inputs[num_leaves:]))
        flow._block_repeated()
        return flow

    def outputs(self) -> list[Dims]:
        """Return the dims of the program's results."""
        return [self.of_operand(x) for x in self.program.outputs]

    def of_operand(self, operand: Operand) -> Dims:
        """Return the dims of a value or constant. A constant gets new dims when it is first met."""
        if operand not in self.dims:
            assert isinstance(operand, Constant), operand
            self.dims[operand] = dims_of(jnp.shape(operand.value))
        return self.dims[operand]

    def atoms(self) -> list[set[Atom]]:
        """Return the set of atoms of each value, the loops' values included."""
        own = [{a for dim in dims for a in expand(dim)} for dims in self.dims.values()]
        return own + [atoms for body in self.bodies.values() for atoms in body.atoms()]

    def _walk(self, active: set[Value]) -> None:
        """Connect the dims of all equations, in order.

        Args:
          active: the inputs that are not leaves. Every value that depends on one is added: it is an
            activation.
        """
        for eq in self.program.equations:
            ins = [self.of_operand(x) for x in eq.inputs]
            if not active.isdisjoint(eq.values):
                active.update(eq.outputs)
            else:
                made_of = frozenset().union(*map(self._made_of, eq.inputs))
                self._leaves.update(dict.fromkeys(eq.outputs, made_of))
            if eq.name == "scan":
                outs = self._through_loop(eq, ins, active)
            else:
                outs = rule_of(eq).connect(eq, ins)
                if eq.name == "dot_general":
                    self._through_product(eq, ins, active)
            self.dims.update(zip(eq.outputs, outs, strict=True))

    def _made_of(self, operand: Operand) -> frozenset[int]:
        """Return the leaves that a value is made of; none if it is an activation or a constant."""
        return self._leaves.get(operand, frozenset())

    def _through_product(self, eq: Equation, ins: list[Dims], active: set[Value]) -> None:
        """Mark heads, and note which leaf dims a product sums over."""
        contracted, batch = eq.params["dimension_numbers"]
        if all(x in active for x in eq.inputs):
            # Along heads two activations are multiplied one by one.
            for i in batch[0]:
                for atom in expand(ins[0][i]):
                    atom.is_heads = True
        for operand, dims, summed in zip(eq.inputs, ins, contracted, strict=True):
            for leaf in self._made_of(operand):
                self.contracted.setdefault(leaf, []).extend(dims[i] for i in summed)

    def _block_repeated(self) -> None:
        """Block atoms that one array holds twice."""
        for dims in self.dims.values():
            for atom in repeated(dims):
                block((atom,), "it stands twice in one array")
        for body in self.bodies.values():
            body._block_repeated()

    def _through_loop(self, eq: Equation, ins: list[Dims], active: set[Value]) -> list[Dims]:
        """Follow the dims through a `scan`'s body; return the dims of its results."""
        scan = Scan(eq)
        program = scan.body(compat.forward_jaxpr)
        consts, carry, xs = scan.split_inputs(ins)
        for dims in xs:
            _mark_loop(dims[0])
        body = DimsFlow(program, contracted=self.contracted)
        body._leaves.update(zip(program.inputs, map(self._made_of, eq.inputs), strict=True))
        inside = [*consts, *carry, *(dims[1:] for dims in xs)]
        body.dims.update(zip(program.inputs, inside, strict=True))
        within = {v for v, x in zip(program.inputs, eq.inputs, strict=True) if x in active}
        within.update(scan.split_inputs(program.inputs)[1])
        body._walk(within)
        self.bodies[eq] = body
        carried, ys = scan.split_outputs(body.outputs())
        for before, after in zip(carry, carried, strict=True):
            for a, b in zip(before, after, strict=True):
                join(a, b, "a loop carries it")
        stacked: list[Dims] = []
        for dims in ys:
            turns = dim_of(scan.length)
            _mark_loop(turns)
            stacked.append((turns, *dims))
        return [*carry, *stacked]


def _mark_loop(dim: Dim) -> None:
    """Record that a loop goes through the dim, which therefore cannot be split."""
    block(dim, "a loop goes through it")
    for atom in expand(dim):
        atom.is_loop = True


def planned_dims(
    shape: Sequence[int], dim: int | None, factors: tuple[int, int, int] | None
) -> Dims:
    """Return the dims of a leaf with the atom chosen that a plan splits.

    Args:
      shape: the leaf's shape.
      dim: the dim that is split; None if the leaf stays whole.
      factors: (outer, size, inner) of that dim; `size` becomes the chosen atom.
    """
    dims: list[Dim] = list(dims_of(shape))
    if dim is not None and factors is not None:
        outer, size, inner = factors
        dims[dim] = (*dim_of(outer), Atom(size, chosen=True), *dim_of(inner))
    return tuple(dims)
