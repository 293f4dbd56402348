"""The dims of every value of a program, joined where the program makes them one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from zeroxla.program import compat
from zeroxla.program.trace import Atom as Operand
from zeroxla.program.trace import Constant, Equation, Program, Value, flatten
from zeroxla.split.atoms import Atom, Dim, Dims, block, dim_of, expand, join, repeated
from zeroxla.split.products import rule_of


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DimsFlow:
    """Dims of the values of a program and of the loops in it.

    Attributes:
      program: the program; its loops' bodies are in `bodies`.
      dims: of every value and constant.
      bodies: of each `scan`.
      contracted: of each leaf, by its number, the dims that products sum over: the rows of a
        matrix, as the field calls them, where the others are its columns.
    """

    program: Program
    dims: dict[Operand, Dims] = dataclasses.field(default_factory=dict)
    bodies: dict[Equation, DimsFlow] = dataclasses.field(default_factory=dict)
    contracted: dict[int, list[Dim]] = dataclasses.field(default_factory=dict)
    _leaves: dict[Operand, frozenset[int]] = dataclasses.field(default_factory=dict)
    """Of which leaves a value was made, where of nothing else."""

    @staticmethod
    def of(program: Program, leaves: Sequence[Dims]) -> DimsFlow:
        """Follow the dims through a program.

        Args:
          program: traced with `opened=compat.forward_jaxpr`.
          leaves: dims of its first inputs, the leaves.
        """
        flow, num_leaves = DimsFlow(program), len(leaves)
        others = [tuple(map(dim_of, v.aval.shape)) for v in program.inputs[num_leaves:]]
        flow.dims.update(zip(program.inputs, (*leaves, *others), strict=True))
        flow._leaves.update((v, frozenset((i,))) for i, v in enumerate(program.inputs[:num_leaves]))
        flow._walk(set(program.inputs[num_leaves:]))
        flow._block_repeated()
        return flow

    def outputs(self) -> list[Dims]:
        """Return the dims of the program's results."""
        return [self.of_operand(x) for x in self.program.outputs]

    def of_operand(self, operand: Operand) -> Dims:
        """Return the dims of a value or constant, new ones for a constant that was not met yet."""
        if operand not in self.dims:
            assert isinstance(operand, Constant), operand
            self.dims[operand] = tuple(map(dim_of, jnp.shape(operand.value)))
        return self.dims[operand]

    def atoms(self) -> list[set[Atom]]:
        """Return the atoms of every value, loops included."""
        own = [{a for dim in dims for a in expand(dim)} for dims in self.dims.values()]
        return own + [atoms for body in self.bodies.values() for atoms in body.atoms()]

    def _walk(self, active: set[Value]) -> None:
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
        return self._leaves.get(operand, frozenset())

    def _through_product(self, eq: Equation, ins: list[Dims], active: set[Value]) -> None:
        contracted, batch = eq.params["dimension_numbers"]
        if all(x in active for x in eq.inputs):
            # Heads are what two activations are multiplied along, one by one.
            for i in batch[0]:
                for atom in expand(ins[0][i]):
                    atom.is_heads = True
        for operand, dims, summed in zip(eq.inputs, ins, contracted, strict=True):
            for leaf in self._made_of(operand):
                self.contracted.setdefault(leaf, []).extend(dims[i] for i in summed)

    def _block_repeated(self) -> None:
        for dims in self.dims.values():
            for atom in repeated(dims):
                block((atom,), "it stands twice in one array")
        for body in self.bodies.values():
            body._block_repeated()

    def _through_loop(self, eq: Equation, ins: list[Dims], active: set[Value]) -> list[Dims]:
        num_consts, num_carry = compat.scan_counts(eq.params)
        program = flatten(eq.params["jaxpr"], compat.forward_jaxpr)
        first_x = num_consts + num_carry
        for dims in ins[first_x:]:
            _mark_turns(dims[0])
        body = DimsFlow(program, contracted=self.contracted)
        body._leaves.update(zip(program.inputs, map(self._made_of, eq.inputs), strict=True))
        inside = [*ins[:first_x], *(dims[1:] for dims in ins[first_x:])]
        body.dims.update(zip(program.inputs, inside, strict=True))
        within = {v for v, x in zip(program.inputs, eq.inputs, strict=True) if x in active}
        within.update(program.inputs[num_consts:first_x])
        body._walk(within)
        self.bodies[eq] = body
        outs = body.outputs()
        for carry, out in zip(ins[num_consts:first_x], outs, strict=False):
            for a, b in zip(carry, out, strict=True):
                join(a, b, "a loop carries it")
        stacked: list[Dims] = []
        for dims in outs[num_carry:]:
            turns = dim_of(eq.params["length"])
            _mark_turns(turns)
            stacked.append((turns, *dims))
        return [*ins[num_consts:first_x], *stacked]


def _mark_turns(dim: Dim) -> None:
    block(dim, "a loop goes through it")
    for atom in expand(dim):
        atom.is_turns = True


def seeded(shape: Sequence[int], dim: int | None, factors: tuple[int, int, int] | None) -> Dims:
    """Return the dims of a leaf of which one factor of one dim is chosen."""
    dims: list[Dim] = list(map(dim_of, shape))
    if dim is not None and factors is not None:
        outer, size, inner = factors
        dims[dim] = (*dim_of(outer), Atom(size, chosen=True), *dim_of(inner))
    return tuple(dims)
