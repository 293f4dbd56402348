"""Runs one equation on padded arrays, as its rule says.

The rule tells which dims of operands and results are one (see `split.rules`), and runs the equation
with other sizes of them. Where the equation goes through a dim with padding, padding is replaced
with what changes nothing: zeros in a sum. An equation that cannot run so gets its operands without
padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from zeroxla.program import compat
from zeroxla.program.primitives import NEUTRAL
from zeroxla.program.trace import Equation, Value
from zeroxla.split.atoms import Atom, Dims, atoms_in, expand, pieces_of
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.lengths.padded import Factor, Factors, Length, Padded, size_of
from zeroxla.split.products import rule_of
from zeroxla.split.split_axis import SplitAxis


def run_padded(eq: Equation, ins: Sequence[Padded]) -> list[Padded]:
    """Run an equation on padded arrays; return its results.

    Args:
      eq: the equation of the program without padding.
      ins: its operands.
    """
    while True:
        joined = _Joined.of(eq, ins)
        misfits = joined.misfits()
        if not any(misfits):
            return joined.run()
        ins = [x.without(lengths) for x, lengths in zip(ins, misfits, strict=True)]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Factor:
    """A factor of an operand's dim: operand, dim, its place in the dim, its atom."""

    operand: int
    dim: int
    factor: Factor
    atom: Atom


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Joined:
    """An equation and its operands, whose dims its rule has joined.

    Attributes:
      equation: the equation alone; its operands are values.
      original: the equation of the program.
      flow: the dims of its values.
      ins: its operands.
      factors: all factors of their dims.
    """

    equation: Equation
    original: Equation
    flow: DimsFlow
    ins: Sequence[Padded]
    factors: Sequence[_Factor]

    @staticmethod
    def of(eq: Equation, ins: Sequence[Padded]) -> _Joined:
        """Ask an equation's rule."""
        values = tuple(Value(compat.array_type(_shape(x), _dtype(x))) for x in ins)
        alone = dataclasses.replace(eq, inputs=values)
        factors = [
            _Factor(i, d, f, Atom(size_of(f)))
            for i, x in enumerate(ins)
            for d, dim in enumerate(x.dims)
            for f in dim
        ]
        rest = iter(factors)
        dims: list[Dims] = [
            tuple(tuple(next(rest).atom for _ in dim) for dim in x.dims) for x in ins
        ]
        flow = DimsFlow.of_equation(alone, dims, compat.inlined_jaxpr)
        return _Joined(alone, eq, flow, ins, factors)

    def misfits(self) -> list[set[Length]]:
        """Return the lengths that must not be padded, for each operand."""
        found: list[set[Length]] = [set() for _ in self.ins]
        in_pieces = set(self._in_pieces())
        for one, root, length in self._of_lengths():
            fits = root is not None and root not in in_pieces
            if root is not None and fits and length.is_padded:
                fits = not self._needs(root)
            if root is not None and fits and length.is_made:
                fits = not self._meets_plain(root)
            if not fits:
                found[one.operand].add(length)
        return found

    def run(self) -> list[Padded]:
        """Run the equation. No length is a misfit."""
        lengths = self._chosen()
        ins = [self._brought(i, lengths) for i in range(len(self.ins))]
        is_computed = any(x.is_computed for x in ins)
        arrays = [x.array for x in ins]
        if not any(length.is_padded for length in lengths.values()):
            eq = self.original
            outs = compat.call_equation(eq.source, eq.name_stack, arrays)
        else:
            ins = self._masked(ins, lengths)
            axis = SplitAxis(parts=1, sizes={a: x.held for a, x in lengths.items()})
            with compat.context_of(self.equation.source, self.equation.name_stack):
                arrays = [x.array for x in ins]
                outs = rule_of(self.equation).run(axis, self.flow.dims, self.equation, arrays)
        return [
            Padded(x, tuple(_factors(dim, lengths) for dim in dims), is_computed)
            for x, dims in zip(outs, self.flow.outputs(), strict=True)
        ]

    def _of_lengths(self) -> Iterator[tuple[_Factor, Atom | None, Length]]:
        """Yield the factors that are lengths, and their classes; None for one taken apart."""
        for one in self.factors:
            if isinstance(one.factor, Length):
                atoms = expand((one.atom,))
                whole = len(atoms) == 1 and not pieces_of(atoms[0])
                yield one, atoms[0] if whole else None, one.factor

    def _in_pieces(self) -> Iterator[Atom]:
        """Yield the classes that are parts of a dim which has pieces."""
        for dim in self.flow.all_dims():
            for atom in expand(dim):
                if pieces_of(atom):
                    yield from atoms_in((atom,))

    def _needs(self, root: Atom) -> bool:
        """Return whether the equation needs a class without padding."""
        if root.blocked or root.is_loop:
            return True
        return _is_summed(root) and self.equation.name not in NEUTRAL

    def _meets_plain(self, root: Atom) -> bool:
        """Return whether an operand has a class whose length is not known."""
        plain = (one.atom for one in self.factors if not isinstance(one.factor, Length))
        return any(root is a for atom in plain for a in expand((atom,)))

    def _chosen(self) -> dict[Atom, Length]:
        """Return the length of each class that has one: that of the largest array."""
        found: dict[Atom, Length] = {}
        order = sorted(
            self._of_lengths(),
            key=lambda each: (each[2].is_made, -self.ins[each[0].operand].num_elements),
        )
        for _, root, length in order:
            assert root is not None, "it is no misfit"
            found.setdefault(root, length)
        return found

    def _brought(self, i: int, lengths: dict[Atom, Length]) -> Padded:
        """Return an operand with the chosen lengths."""
        x, rest = self.ins[i], iter([one for one in self.factors if one.operand == i])
        have: list[Factors] = []
        want: list[Factors] = []
        for dim in x.dims:
            mine: list[Factor] = []
            its: list[Factor] = []
            for _ in dim:
                one = next(rest)
                for atom in expand((one.atom,)):
                    is_length = isinstance(one.factor, Length)
                    mine.append(one.factor if is_length else atom.size)
                    its.append(lengths.get(atom, atom.size))
            have.append(tuple(mine))
            want.append(tuple(its))
        if not any(isinstance(f, Length) for dim in want for f in dim):
            return x
        return dataclasses.replace(x, dims=tuple(have)).as_dims(want)

    def _masked(self, ins: Sequence[Padded], lengths: dict[Atom, Length]) -> list[Padded]:
        """Return the operands, one of them with neutral padding along each dim that is summed."""
        found = list(ins)
        for atom, length in lengths.items():
            if not length.is_padded or not _is_summed(atom):
                continue
            dims = self.flow.dims[self.equation.inputs[0]]
            for d, dim in enumerate(dims):
                for k, a in enumerate(expand(dim)):
                    if a is atom:
                        fill = _neutral(self.equation.name, found[0].array.dtype)
                        found[0] = found[0].filled(d, k, fill)
        return found


def _is_summed(atom: Atom) -> bool:
    """Return whether an equation goes through a class."""
    return bool(atom.sums or atom.reduced) or atom.is_compared


def _factors(dim: tuple[Atom, ...], lengths: dict[Atom, Length]) -> Factors:
    return tuple(lengths.get(atom, atom.size) for atom in expand(dim))


def _neutral(name: str, dtype: jnp.dtype) -> float | int | bool:
    """Return the value that changes no result, for a dtype."""
    value = NEUTRAL[name]
    if jnp.issubdtype(dtype, jnp.integer) and value in (float("inf"), -float("inf")):
        limits = jnp.iinfo(dtype)
        return limits.max if value > 0 else limits.min
    return value


def _shape(x: Padded) -> tuple[int, ...]:
    found = []
    for dim in x.dims:
        size = 1
        for factor in dim:
            size *= size_of(factor)
        found.append(size)
    return tuple(found)


def _dtype(x: Padded) -> jnp.dtype:
    return x.array.dtype if hasattr(x.array, "dtype") else jnp.result_type(x.array)
