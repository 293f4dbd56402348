"""Runs a program on padded arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zeroxla.program import compat
from zeroxla.program.primitives import CONTRACTIONS, CUSTOM_RULES, REMATS
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Constant, Equation, Operand, Program, flatten
from zeroxla.split.custom_rules import CustomRule
from zeroxla.split.lengths.known_lengths import KnownLengths
from zeroxla.split.lengths.moves import MOVES
from zeroxla.split.lengths.padded import Factors, Padded
from zeroxla.split.lengths.through_rules import run_padded
from zeroxla.split.run_parts import rematerialised


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PaddedRunner:
    """Runs one program on padded arrays. Its results have the values of the program without.

    Attributes:
      program: the program.
      known: what is known of lengths.
    """

    program: Program
    known: KnownLengths

    def __call__(self, ins: Sequence[Padded]) -> list[Padded]:
        """Return the program's results."""
        env: dict[Operand, Padded] = dict(zip(self.program.inputs, ins, strict=True))

        def read(operand: Operand) -> Padded:
            if isinstance(operand, Constant):
                return Padded.plain(operand.value)
            return env[operand]

        for eq in self.program.equations:
            outs = self._run(eq, [read(x) for x in eq.inputs])
            env.update(zip(eq.outputs, outs, strict=True))
        return [read(x) for x in self.program.outputs]

    def _run(self, eq: Equation, ins: Sequence[Padded]) -> list[Padded]:
        move = MOVES.get(eq.name)
        if move is not None and (found := move(self.known, eq, ins)) is not None:
            return found
        run = _RUN.get(eq.name)
        if run is not None and not compat.is_by_platform(eq.params):
            if any(x.is_computed for x in ins):
                return run(self, eq, ins)
        elif not eq.is_pinned and any(x.lengths for x in ins):
            found = run_padded(eq, ins)
            if eq.name in CONTRACTIONS:
                lengths = {f for x in found for f in x.lengths}
                self.known.used.update(f.size for f in lengths if f.is_padded)
            return found
        arrays = [x.unpadded().array for x in ins]
        is_computed = any(x.is_computed for x in ins)
        outs = compat.call_equation(eq.source, eq.name_stack, arrays)
        return [Padded.plain(x, is_computed=is_computed) for x in outs]

    def _inner(self, program: Program) -> PaddedRunner:
        return dataclasses.replace(self, program=program)

    def _remat(self, eq: Equation, ins: Sequence[Padded]) -> list[Padded]:
        """Run a `jax.checkpoint`."""
        run = _Traced(self._inner(flatten(eq.params["jaxpr"])), ins)
        return run.results(rematerialised(eq, run)([x.array for x in ins]))

    def _loop(self, eq: Equation, ins: Sequence[Padded]) -> list[Padded]:
        """Run a `scan`. Its carry keeps the dims that it is given."""
        scan = Scan(eq)
        consts, carry, xs = scan.split_inputs(ins)
        xs = [
            x.as_dim(0, (scan.length,) if scan.length != 1 else ()) if x.dims[0] else x for x in xs
        ]
        num_carry = len(carry)
        slices = [dataclasses.replace(x, dims=x.dims[1:], is_computed=True) for x in xs]
        inside = [*consts, *(dataclasses.replace(x, is_computed=True) for x in carry), *slices]
        run = _Traced(self._inner(scan.body()), inside, [x.dims for x in carry])

        def turn(now: list[Any], each: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = run([*(x.array for x in consts), *now, *each])
            return outs[:num_carry], outs[num_carry:]

        arrays = [x.array for x in carry], [x.array for x in xs]
        last, ys = scan.run(turn, *arrays)
        ends = [dataclasses.replace(x, array=y, is_computed=True) for x, y in zip(carry, last)]
        loop: Factors = (scan.length,) if scan.length != 1 else ()
        return [
            *ends,
            *(Padded(y, (loop, *dims), True) for y, dims in zip(ys, run.dims[num_carry:])),
        ]

    def _rule(self, eq: Equation, ins: Sequence[Padded]) -> list[Padded]:
        """Run an equation with a derivative of its own."""
        if not any(length.is_padded for x in ins for length in x.lengths):
            return run_padded(eq, ins) if any(x.lengths for x in ins) else self._plain(eq, ins)
        rule = CustomRule.of(eq)
        first = _Traced(self._inner(rule.forward), ins)

        def backward(args: Sequence[Any]) -> list[Any]:
            num_results = len(eq.outputs)
            kept = first.dims[num_results:]
            cts = [first.dims[i] for i in rule.outputs]
            given = [Padded(x, dims, True) for x, dims in zip(args, (*kept, *cts), strict=True)]
            found = self._inner(rule.backward)(given)
            return [
                ct.unpadded().as_dims(ins[i].dims, zeros=True).array
                for i, ct in zip(rule.targets, found, strict=True)
            ]

        outs = rule.run(first, backward, [x.array for x in ins])
        return first.results(outs)

    def _plain(self, eq: Equation, ins: Sequence[Padded]) -> list[Padded]:
        outs = compat.call_equation(eq.source, eq.name_stack, [x.array for x in ins])
        return [Padded.plain(x, is_computed=True) for x in outs]


_RUN: dict[str, Callable[[PaddedRunner, Equation, Sequence[Padded]], list[Padded]]] = {
    "scan": PaddedRunner._loop,
    **dict.fromkeys(REMATS, PaddedRunner._remat),
    **dict.fromkeys(CUSTOM_RULES, PaddedRunner._rule),
}
"""Equations that run programs of their own. Branches and `while` loops run without padding."""


class _Traced:
    """A program as a function of arrays, for JAX to trace. It keeps the dims of its results."""

    def __init__(
        self, run: PaddedRunner, ins: Sequence[Padded], wanted: Sequence[Sequence[Factors]] = ()
    ) -> None:
        """Note what the arrays mean.

        Args:
          run: the program.
          ins: arrays with the dims that operands have.
          wanted: the dims that the first results must have.
        """
        self._run, self._ins, self._wanted = run, ins, wanted
        self.dims: list[tuple[Factors, ...]] = []

    def __call__(self, args: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the results' arrays."""
        given = [dataclasses.replace(x, array=y) for x, y in zip(self._ins, args, strict=True)]
        found = self._run(given)
        for i, dims in enumerate(self._wanted):
            found[i] = found[i].unpadded().as_dims(dims) if found[i].dims != dims else found[i]
        self.dims = [x.dims for x in found]
        return [jax.numpy.asarray(x.array) for x in found]

    def results(self, arrays: Sequence[jax.Array]) -> list[Padded]:
        """Return results' arrays with their dims."""
        return [Padded(x, dims, True) for x, dims in zip(arrays, self.dims, strict=False)]
