"""Follows dims through a program: each value's dims, joined where the program makes them one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import jax.numpy as jnp

from zeroxla.program import compat
from zeroxla.program.branches import While, branches_of
from zeroxla.program.primitives import CUSTOM_RULES, NO_GRADIENT, REMATS
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Constant, Equation, Opened, Operand, Program, Value, flatten
from zeroxla.split.atoms import (
    Atom,
    Dim,
    Dims,
    atoms_in,
    block,
    dim_of,
    dims_of,
    repeated,
    together,
)
from zeroxla.split.custom_rules import CustomRule
from zeroxla.split.folded_padding import with_folded_padding
from zeroxla.split.joins import join
from zeroxla.split.products import rule_of


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DimsFlow:
    """The dims of all values of a program, the bodies of its loops included.

    Attributes:
      program: the program.
      dims: the dims of every value and constant, the loops' bodies aside.
      bodies: the flows through what an equation runs: the body of a `scan`, the branches of a
        `cond`, the condition and the body of a `while`.
      contracted: by a leaf's number, the leaf's dims that products sum over. In tensor parallelism
        these are called a matrix' rows, and its other dims columns.
      opened: says which equations the program was traced without; see `trace`. Custom derivatives
        that are equations of the program keep their rules when it runs on parts.
      rules: the programs of these derivatives, by equation.
    """

    program: Program
    dims: dict[Operand, Dims] = dataclasses.field(default_factory=dict)
    bodies: dict[Equation, list[DimsFlow]] = dataclasses.field(default_factory=dict)
    contracted: dict[int, list[Dim]] = dataclasses.field(default_factory=dict)
    opened: Opened = compat.forward_jaxpr
    rules: dict[Equation, CustomRule] = dataclasses.field(default_factory=dict)
    _leaves: dict[Operand, frozenset[int]] = dataclasses.field(default_factory=dict)
    """For a value that depends on leaves alone: the numbers of these leaves."""
    _fixed: set[Value] = dataclasses.field(default_factory=set)
    """The values that depend on constants alone."""
    _trained: set[Value] = dataclasses.field(default_factory=set)
    """The floating values that depend on a leaf."""

    @staticmethod
    def of(
        program: Program, leaves: Sequence[Dims], opened: Opened = compat.forward_jaxpr
    ) -> DimsFlow:
        """Follow the dims through a program.

        Args:
          program: the program.
          leaves: the dims of its first inputs, which are the leaves.
          opened: that with which the program was traced.
        """
        flow, num_leaves = DimsFlow(with_folded_padding(program), opened=opened), len(leaves)
        others = [dims_of(v.aval.shape) for v in program.inputs[num_leaves:]]
        flow.dims.update(zip(program.inputs, (*leaves, *others), strict=True))
        flow._leaves.update((v, frozenset((i,))) for i, v in enumerate(program.inputs[:num_leaves]))
        flow._trained.update(v for v in program.inputs[:num_leaves] if v.is_float)
        flow._walk(set(program.inputs[num_leaves:]))
        flow._block_repeated()
        return flow

    @staticmethod
    def of_equation(eq: Equation, ins: Sequence[Dims], opened: Opened) -> DimsFlow:
        """Follow the dims through one equation alone.

        Args:
          eq: the equation; each of its operands is another value.
          ins: the dims of its operands, shared with nothing else.
          opened: as in `of`.
        """
        flow = DimsFlow(Program(eq.values, (eq,), eq.outputs), opened=opened)
        flow.dims.update(zip(eq.values, ins, strict=True))
        flow._walk(set(eq.values))
        flow._block_repeated()
        return flow

    def is_computed(self, operand: Operand) -> bool:
        """Return whether a value depends on a leaf or on another input of the whole program."""
        return isinstance(operand, Value) and operand not in self._fixed

    def has_gradient(self, value: Value) -> bool:
        """Return whether a gradient may flow through a value."""
        return value in self._trained

    def made_of_leaves(self, operand: Operand) -> bool:
        """Return whether a value depends on leaves and constants alone, and on a leaf."""
        return bool(self.leaves_of(operand))

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
        """Return for each value the sets of atoms along which an element of it lies (see
        `atoms.together`); the values in loops and branches included."""
        own = [atoms for dims in self.dims.values() for atoms in together(dims)]
        return own + [atoms for body in self._inner() for atoms in body.atoms()]

    def all_dims(self) -> Iterator[Dim]:
        """Yield the dims of all values, those in loops and branches included."""
        for dims in self.dims.values():
            yield from dims
        for body in self._inner():
            yield from body.all_dims()

    def _inner(self) -> list[DimsFlow]:
        """Return the flows through what equations run."""
        return [body for bodies in self.bodies.values() for body in bodies]

    def _walk(self, active: set[Value]) -> None:
        """Connect the dims of all equations, in order.

        Args:
          active: the inputs that are not leaves. Every value that depends on one is added: it is an
            activation.
        """
        inputs = self.program.inputs
        self._fixed.update(v for v in inputs if v not in active and not self.leaves_of(v))
        for eq in self.program.equations:
            ins = [self.of_operand(x) for x in eq.inputs]
            if eq.name not in NO_GRADIENT and not self._trained.isdisjoint(eq.values):
                self._trained.update(v for v in eq.outputs if v.is_float)
            if not active.isdisjoint(eq.values):
                active.update(eq.outputs)
            else:
                made_of = frozenset().union(*map(self.leaves_of, eq.inputs))
                self._leaves.update(dict.fromkeys(eq.outputs, made_of))
                self._fixed.update(() if made_of else eq.outputs)
            if eq.name in _RUN and not compat.is_by_platform(eq.params):
                outs = _RUN[eq.name](self, eq, ins, active)
            else:
                outs = rule_of(eq).connect(eq, ins)
                self._through_product(eq, ins, active)
            self.dims.update(zip(eq.outputs, outs, strict=True))

    def leaves_of(self, operand: Operand) -> frozenset[int]:
        """Return the leaves that a value is made of; none if it is an activation or a constant."""
        return self._leaves.get(operand, frozenset())

    def _through_product(self, eq: Equation, ins: list[Dims], active: set[Value]) -> None:
        """Mark heads, and note which leaf dims a product or a convolution sums over."""
        if eq.name == "dot_general":
            contracted, batch = eq.params["dimension_numbers"]
        elif eq.name == "conv_general_dilated":
            numbers = eq.params["dimension_numbers"]
            contracted, batch = ((numbers.lhs_spec[1],), (numbers.rhs_spec[1],)), ((), ())
        else:
            return
        if all(x in active for x in eq.inputs):
            # Along heads two activations are multiplied one by one.
            for i in batch[0]:
                for atom in atoms_in(ins[0][i]):
                    atom.is_heads = True
        for operand, dims, summed in zip(eq.inputs, ins, contracted, strict=True):
            for leaf in self.leaves_of(operand):
                self.contracted.setdefault(leaf, []).extend(dims[i] for i in summed)

    def _block_repeated(self) -> None:
        """Block atoms that one array holds twice."""
        for dims in self.dims.values():
            for atom in repeated(dims):
                block((atom,), "it stands twice in one array")
        for body in self._inner():
            body._block_repeated()

    def _into(
        self,
        eq: Equation,
        program: Program,
        operands: Sequence[Operand],
        dims: Sequence[Dims],
        active: Collection[Operand],
        opened: Opened | None = None,
    ) -> list[Dims]:
        """Follow the dims through a program that an equation runs; return those of its results.

        Args:
          eq: the equation.
          program: the program.
          operands: the equation's operands that are its inputs.
          dims: the dims of its inputs.
          active: the operands that are not made of leaves alone, and inputs that are like them.
          opened: that with which the program was traced; None if it is this one's.
        """
        body = DimsFlow(
            with_folded_padding(program), contracted=self.contracted, opened=opened or self.opened
        )
        body._leaves.update(zip(program.inputs, map(self.leaves_of, operands), strict=True))
        body.dims.update(zip(program.inputs, dims, strict=True))
        pairs = list(zip(program.inputs, operands, strict=True))
        if opened is None:  # a derivative's own programs are not differentiated
            trained = {v for v, x in pairs if v.is_float and (x in self._trained or v in active)}
            body._trained.update(trained)
        body._walk({v for v, x in pairs if x in active or v in active})
        self.bodies.setdefault(eq, []).append(body)
        return body.outputs()

    def _through_loop(self, eq: Equation, ins: list[Dims], active: set[Value]) -> list[Dims]:
        """Follow the dims through a `scan`'s body; return the dims of its results."""
        scan = Scan(eq)
        program = scan.body(self.opened)
        consts, carry, xs = scan.split_inputs(ins)
        turns = dim_of(scan.length)
        for dims in xs:
            join(dims[0], turns, "a loop goes through it")
        _mark_loop(turns)
        inside = [*consts, *carry, *(dims[1:] for dims in xs)]
        within = active | set(scan.split_inputs(program.inputs)[1])
        carried, ys = scan.split_outputs(self._into(eq, program, eq.inputs, inside, within))
        _join_all(carry, carried, "a loop carries it")
        return [*carry, *((turns, *dims) for dims in ys)]

    def _through_while(self, eq: Equation, ins: list[Dims], active: set[Value]) -> list[Dims]:
        """Follow the dims through a `while`; return the dims of its results."""
        loop = While(eq)
        dims, given = loop.split_inputs(ins), loop.split_inputs(eq.inputs)
        first, found = dims[2], []
        for k, program in enumerate((loop.test(self.opened), loop.body(self.opened))):
            within = active | set(program.inputs[len(given[k]) :])
            operands, inside = [*given[k], *given[2]], [*dims[k], *first]
            found = self._into(eq, program, operands, inside, within)
        _join_all(first, found, "a loop carries it")
        return list(first)

    def _through_branches(self, eq: Equation, ins: list[Dims], active: set[Value]) -> list[Dims]:
        """Follow the dims through the branches of a `cond`; return the dims of its results."""
        found = [
            self._into(eq, program, eq.inputs[1:], ins[1:], active)
            for program in branches_of(eq, self.opened)
        ]
        for other in found[1:]:
            _join_all(found[0], other, "branches return it")
        return found[0]

    def _through_remat(self, eq: Equation, ins: list[Dims], active: set[Value]) -> list[Dims]:
        """Follow the dims through a `jax.checkpoint`; return the dims of its results."""
        return self._into(eq, flatten(eq.params["jaxpr"], self.opened), eq.inputs, ins, active)

    def _through_rule(self, eq: Equation, ins: list[Dims], active: set[Value]) -> list[Dims]:
        """Follow the dims through an equation with a derivative of its own, forward and backward;
        return the dims of its results."""
        rule = self.rules[eq] = CustomRule.of(eq)
        opened = compat.forward_jaxpr
        found = self._into(eq, rule.forward, eq.inputs, ins, active, opened)
        outs, kept = found[: len(eq.outputs)], found[len(eq.outputs) :]
        cts = [outs[i] for i in rule.outputs]
        inputs = rule.backward.inputs
        back = self._into(eq, rule.backward, inputs, [*kept, *cts], inputs, opened)
        _join_all([ins[i] for i in rule.targets], back, "it is a cotangent")
        return outs


_RUN = {
    "scan": DimsFlow._through_loop,
    "while": DimsFlow._through_while,
    "cond": DimsFlow._through_branches,
    **dict.fromkeys(REMATS, DimsFlow._through_remat),
    **dict.fromkeys(CUSTOM_RULES, DimsFlow._through_rule),
}
"""Equations that run programs of their own."""


def _join_all(first: Sequence[Dims], second: Sequence[Dims], why: str) -> None:
    """Join the dims of arrays with those of others."""
    for before, after in zip(first, second, strict=True):
        for a, b in zip(before, after, strict=True):
            join(a, b, why)


def _mark_loop(dim: Dim) -> None:
    """Record that a loop goes through the dim, which therefore cannot be split."""
    block(dim, "a loop goes through it")
    for atom in atoms_in(dim):
        atom.is_loop = True
