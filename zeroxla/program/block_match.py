"""Compares stretches of a program, and makes the body of a loop of them if they are alike."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import numpy as np

from zeroxla.program import compat
from zeroxla.program.likeness import is_same_constant, likeness
from zeroxla.program.origins import activation_equations
from zeroxla.program.trace import Constant, Equation, Operand, Program, Value


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockRow:
    """Equal blocks, one after another, as the body of a loop.

    Attributes:
      equations: of each block, the equations that make activations.
      body: one block. Its inputs are the carry and then the slices of `xs`; it also reads values of
        the program around it, which are the same for all blocks. Its outputs are the next carry and
        then what later equations read of each block.
      carry: the operands that the first block has in the place of the carry.
      xs: for each sliced input of the body, the operand of each block.
      last: for each carry, the value that it has after the last block.
      ys: for each other output of the body, the value of each block.
    """

    equations: tuple[tuple[Equation, ...], ...]
    body: Program
    carry: tuple[Operand, ...]
    xs: tuple[tuple[Operand, ...], ...]
    last: tuple[Value, ...]
    ys: tuple[tuple[Value, ...], ...]


class ActivationIndex:
    """A program's equations that make activations, and who makes and reads each value.

    Attributes:
      program: the program.
      model: the inputs that are the model's leaves and state, each with a key. Those of one shape
        and one key may be stacked.
      equations: the equations that make activations, in order.
      place: for each activation, the number of its equation, and its number among the results.
      makers: the same for all other values, with the equation itself.
      readers: the numbers of the equations that read a value. The program's outputs are read after
        the last one.
    """

    def __init__(self, program: Program, model: Mapping[Value, Hashable]) -> None:
        self.program, self.model = program, model
        self.equations = activation_equations(program, model)
        numbered = enumerate(self.equations)
        self.place = {v: (i, o) for i, eq in numbered for o, v in enumerate(eq.outputs)}
        self.makers = {
            v: (eq, o)
            for eq in program.equations
            for o, v in enumerate(eq.outputs)
            if v not in self.place
        }
        self.readers = collections.defaultdict[Value, list[int]](list)
        for i, eq in enumerate(self.equations):
            for v in eq.values:
                self.readers[v].append(i)
        for v in program.outputs:
            if isinstance(v, Value):
                self.readers[v].append(len(self.equations))
        self._likeness: dict[Equation, Hashable] = {}

    def likeness(self, eq: Equation) -> Hashable:
        """Return the key of an equation; see `likeness`."""
        if eq not in self._likeness:
            self._likeness[eq] = likeness(eq)
        return self._likeness[eq]


def match_blocks(index: ActivationIndex, start: int, period: int, count: int) -> BlockRow | None:
    """Return the row of `count` blocks of `period` equations from `start` on; None if the blocks
    differ in more than a loop can take from its turn."""
    try:
        return _Matcher(index, start, period, count).row()
    except _DifferError:
        return None


class _DifferError(Exception):
    """Blocks differ in more than a loop can take from its turn."""


class _Matcher:
    """Compares blocks, and makes a row of them if they are alike.

    It goes through all blocks at once: an operand is a tuple with one operand for each block, and
    block 1 is the model of the body, because the first one has no block before it.
    """

    def __init__(self, index: ActivationIndex, start: int, period: int, count: int) -> None:
        self.index, self.start, self.period, self.count = index, start, period, count
        self.blocks = tuple(
            tuple(index.equations[start + b * period : start + (b + 1) * period])
            for b in range(count)
        )
        self.equations: list[Equation] = []  # of the body
        self.inside: dict[Value, Value] = {}  # a value of block 1 -> its stand-in in the body
        self.carries: dict[tuple[int, int], tuple[Value, Operand]] = {}  # by place in the block
        self.xs: dict[tuple[int, ...], tuple[Value, tuple[Operand, ...]]] = {}  # by identities
        self.copied: set[tuple[Equation, ...]] = set()

    def row(self) -> BlockRow:
        """Return the row.

        Raises:
          _DifferError: the blocks are not alike.
        """
        for equations in zip(*self.blocks, strict=True):
            self._copy(equations)
        if not self.carries or not any(
            all(a in self.index.model for a in operands) for _, operands in self.xs.values()
        ):
            raise _DifferError("the blocks read nothing of each other, or no leaves of their own")
        last, outs = [], []
        for (j, o), (carried, _) in self.carries.items():
            last.append(self.blocks[-1][j].outputs[o])
            outs.append(self.inside[self.blocks[1][j].outputs[o]])
            if type_of(outs[-1]) != type_of(carried):
                raise _DifferError("a carry changes its shape")
        ys = self._read_later()
        body = Program(
            (*(v for v, _ in self.carries.values()), *(v for v, _ in self.xs.values())),
            tuple(self.equations),
            (*outs, *(self.inside[self.blocks[1][j].outputs[o]] for j, o in ys)),
        )
        return BlockRow(
            equations=self.blocks,
            body=body,
            carry=tuple(a for _, a in self.carries.values()),
            xs=tuple(operands for _, operands in self.xs.values()),
            last=tuple(last),
            ys=tuple(tuple(block[j].outputs[o] for block in self.blocks) for j, o in ys),
        )

    def _read_later(self) -> list[tuple[int, int]]:
        """Return the places in a block of values that are read outside the row."""
        first, stop = self.start, self.start + self.period * self.count
        found = []
        for j, equations in enumerate(zip(*self.blocks, strict=True)):
            for o, values in enumerate(zip(*(eq.outputs for eq in equations), strict=True)):
                own = values[:-1] if (j, o) in self.carries else values
                readers = self.index.readers
                if any(not first <= i < stop for v in own if v in readers for i in readers[v]):
                    found.append((j, o))
        return found

    def _copy(self, equations: tuple[Equation, ...]) -> None:
        """Copy the equation that the blocks have at one place to the body."""
        if equations in self.copied:
            return
        self.copied.add(equations)
        inputs = zip(*(eq.inputs for eq in equations), strict=True)
        operands = [self._operand(each) for each in inputs]
        model = equations[1]
        outputs = tuple(Value(v.aval) for v in model.outputs)
        self.inside.update(zip(model.outputs, outputs, strict=True))
        copy = dataclasses.replace(model, inputs=tuple(operands), outputs=outputs)
        self.equations.append(copy)

    def _operand(self, operands: tuple[Operand, ...]) -> Operand:
        """Return the body's operand for those that the blocks have at one place."""
        index, first = self.index, operands[0]
        if all(a is first for a in operands):
            if isinstance(first, Value) and index.place.get(first, (-1, 0))[0] >= self.start:
                raise _DifferError("all blocks read a result of the first one")
            return first
        if all(isinstance(a, Constant) for a in operands):
            if all(is_same_constant(first, a) for a in operands):  # type: ignore[arg-type]
                return first
            return self._sliced(operands, type_of)
        if not all(isinstance(a, Value) for a in operands[1:]):
            raise _DifferError("constants in the place of values")
        if all(a in index.model for a in operands):
            if len(set(operands)) < self.count:
                raise _DifferError("some blocks share a leaf, and others do not")
            return self._sliced(operands, lambda a: (type_of(a), index.model[a]))
        if operands[1] in index.place:
            return self._activation(operands)
        return self._made_again(operands)

    def _sliced(self, operands: tuple[Operand, ...], kind: Callable[[Any], Hashable]) -> Value:
        """Return the body's input that is sliced from the blocks' operands."""
        if len({kind(a) for a in operands}) > 1:
            raise _DifferError("operands of different shapes or kinds")
        key = tuple(map(id, operands))
        if key not in self.xs:
            self.xs[key] = Value(_aval_of(operands[1])), operands
        return self.xs[key][0]

    def _activation(self, operands: tuple[Operand, ...]) -> Value:
        """Return the body's value for activations: one of its own, or a carry."""
        place = self.index.place
        places = [place[a] for a in operands[1:] if isinstance(a, Value) and a in place]
        if len(places) < self.count - 1:
            raise _DifferError("an activation in some blocks alone")
        offsets = {(i - self.start - b * self.period, o) for b, (i, o) in enumerate(places, 1)}
        if len(offsets) > 1:
            raise _DifferError("blocks read different results")
        ((i, o),) = offsets
        first = operands[0]
        if i >= 0:
            if self.index.place.get(first) != (self.start + i, o):  # type: ignore[arg-type]
                raise _DifferError("the first block reads another result")
            return self.inside[operands[1]]  # type: ignore[index]
        if i < -self.period:
            raise _DifferError("a block reads results of one that is not next to it")
        if self.index.place.get(first, (-1, 0))[0] >= self.start:  # type: ignore[arg-type]
            raise _DifferError("the first block reads its own result in the place of the carry")
        key = i + self.period, o
        if key not in self.carries:
            self.carries[key] = Value(operands[1].aval), first  # type: ignore[union-attr]
        carried, given = self.carries[key]
        if given is not first or type_of(first) != type_of(carried):
            raise _DifferError("the first block has several operands in the place of one carry")
        return carried

    def _made_again(self, operands: tuple[Operand, ...]) -> Value:
        """Return the body's value for those that follow from leaves, or from the batch, alone."""
        makers = [self.index.makers.get(a) for a in operands]  # type: ignore[arg-type]
        if None in makers:
            raise _DifferError("different inputs of the program")
        equations, outputs = zip(*makers, strict=True)  # type: ignore[arg-type]
        if len(set(outputs)) > 1 or len({self.index.likeness(eq) for eq in equations}) > 1:
            raise _DifferError("values that are made in different ways")
        self._copy(equations)
        return self.inside[operands[1]]  # type: ignore[index]


def type_of(operand: Operand) -> Hashable:
    aval = _aval_of(operand)
    return aval.shape, aval.dtype


def _aval_of(operand: Operand) -> Any:
    if isinstance(operand, Value):
        return operand.aval
    value = operand.value
    return compat.array_type(np.shape(value), jax.dtypes.result_type(value))
