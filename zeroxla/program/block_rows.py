"""Finds rows of equal blocks in a program: the same equations over leaves of the same shapes.

Blocks are stretches of the equations that make activations. They form a row if they differ only in
what a loop over them could take from its turn: each reads results of the block before, which a loop
carries; leaves of its own, which it can stack; constants of its own, such as those from which keys
of dropout are made; and what all blocks read alike.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zeroxla.program import compat
from zeroxla.program.likeness import is_same_constant, likeness
from zeroxla.program.origins import activation_equations
from zeroxla.program.repeats import Repeat, repeats
from zeroxla.program.trace import Constant, Equation, Operand, Program, Value

_TRIES = 8
"""So many repetitions of a stretch are looked at before it is left as it is."""


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


def find_rows(program: Program, model: Mapping[Value, Hashable]) -> list[BlockRow]:
    """Return the rows of blocks of a program, in order.

    Args:
      program: any program.
      model: the inputs that are the model's leaves and state, each with a key. Those of one shape
        and one key may be stacked.
    """
    activations = activation_equations(program, model)
    finder = _Finder(program, model, activations)
    return finder.rows(0, len(activations))


class _DifferError(Exception):
    """Blocks differ in more than a loop can take from its turn."""


class _Finder:
    """Finds the rows of one program; see `find_rows`."""

    def __init__(
        self, program: Program, model: Mapping[Value, Hashable], activations: list[Equation]
    ) -> None:
        self.program, self.model, self.activations = program, model, activations
        self.place = {
            v: (i, o) for i, eq in enumerate(activations) for o, v in enumerate(eq.outputs)
        }
        self.makers = {
            v: (eq, o)
            for eq in program.equations
            for o, v in enumerate(eq.outputs)
            if v not in self.place
        }
        self._likeness: dict[Equation, Hashable] = {}
        self.keys = self._keys()
        self.readers = collections.defaultdict[Value, list[int]](list)
        for i, eq in enumerate(activations):
            for v in eq.values:
                self.readers[v].append(i)
        for v in program.outputs:
            if isinstance(v, Value):
                self.readers[v].append(len(activations))
        self.bytes_across = _bytes_across(activations, self.readers)

    def _keys(self) -> list[int]:
        """Return a number for each of the activations' equations.

        Equations with one number are alike, and so is what their operands do to the leaves that
        they follow from, which have one kind.
        """
        numbers: dict[Hashable, int] = {}

        def number(*key: Hashable) -> int:
            return numbers.setdefault(key, len(numbers))

        known: dict[Operand, int] = {
            v: number("model", _type(v), kind) for v, kind in self.model.items()
        }
        keys = {}
        for eq in self.program.equations:
            keys[eq] = number("equation", self.likeness(eq), *map(known.get, eq.inputs))
            if eq.values and known.keys() >= set(eq.values):
                known.update((v, number("made", keys[eq], o)) for o, v in enumerate(eq.outputs))
        return [keys[eq] for eq in self.activations]

    def likeness(self, eq: Equation) -> Hashable:
        if eq not in self._likeness:
            self._likeness[eq] = likeness(eq)
        return self._likeness[eq]

    def rows(self, first: int, end: int) -> list[BlockRow]:
        """Return the rows among the activations' equations from `first` to `end`, in order."""
        for found in itertools.islice(repeats(self.keys[first:end]), _TRIES):
            repeat = dataclasses.replace(found, start=found.start + first)
            row = self._row(repeat)
            if row is not None:
                start, count, made = row
                stop = start + count * repeat.period
                return [*self.rows(first, start), made, *self.rows(stop, end)]
        return []

    def _row(self, repeat: Repeat) -> tuple[int, int, BlockRow] | None:
        """Return a row of a repetition's blocks: its start, the number of its blocks, and itself.

        Blocks begin where the fewest bytes cross from one to the next, even if that makes one block
        fewer. The first or the last one may be unlike the others.
        """
        period, length = repeat.period, repeat.count * repeat.period + repeat.slack
        offsets = [i for i in range(period) if (length - i) // period > 1]
        best = min(
            offsets,
            key=lambda i: (self.bytes_across[repeat.start + i + period], -((length - i) // period)),
        )
        for first, last in ((0, 0), (1, 0), (0, 1), (1, 1)):
            start = repeat.start + best + first * period
            count = (length - best) // period - first - last
            if count < 2:
                continue
            try:
                return start, count, _Matcher(self, start, period, count).row()
            except _DifferError:
                continue
        return None


def _bytes_across(equations: Sequence[Equation], readers: Mapping[Value, list[int]]) -> np.ndarray:
    """Return the bytes of the activations that cross each place before an equation, and the end."""
    change = np.zeros(len(equations) + 2, np.int64)
    for i, eq in enumerate(equations):
        for v in eq.outputs:
            last = max(readers[v], default=i) if v in readers else i
            change[i + 1] += bytes_of(v)
            change[last + 1] -= bytes_of(v)
    return np.cumsum(change)


def bytes_of(value: Value) -> int:
    """Return the bytes of a value; a PRNG key counts as its words."""
    return value.aval.size * getattr(value.aval.dtype, "itemsize", 8)


class _Matcher:
    """Compares blocks, and makes a row of them if they are alike.

    It goes through all blocks at once: an operand is a tuple with one operand for each block, and
    block 1 is the model of the body, because the first one has no block before it.
    """

    def __init__(self, finder: _Finder, start: int, period: int, count: int) -> None:
        self.finder, self.start, self.period, self.count = finder, start, period, count
        self.blocks = tuple(
            tuple(finder.activations[start + b * period : start + (b + 1) * period])
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
            all(a in self.finder.model for a in operands) for _, operands in self.xs.values()
        ):
            raise _DifferError("the blocks read nothing of each other, or no leaves of their own")
        last, outs = [], []
        for (j, o), (carried, _) in self.carries.items():
            last.append(self.blocks[-1][j].outputs[o])
            outs.append(self.inside[self.blocks[1][j].outputs[o]])
            if _type(outs[-1]) != _type(carried):
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
                readers = self.finder.readers
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
        finder, first = self.finder, operands[0]
        if all(a is first for a in operands):
            if isinstance(first, Value) and finder.place.get(first, (-1, 0))[0] >= self.start:
                raise _DifferError("all blocks read a result of the first one")
            return first
        if all(isinstance(a, Constant) for a in operands):
            if all(is_same_constant(first, a) for a in operands):  # type: ignore[arg-type]
                return first
            return self._sliced(operands, _type)
        if not all(isinstance(a, Value) for a in operands[1:]):
            raise _DifferError("constants in the place of values")
        if all(a in finder.model for a in operands):
            if len(set(operands)) < self.count:
                raise _DifferError("some blocks share a leaf, and others do not")
            return self._sliced(operands, lambda a: (_type(a), finder.model[a]))
        if operands[1] in finder.place:
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
        place = self.finder.place
        places = [place[a] for a in operands[1:] if isinstance(a, Value) and a in place]
        if len(places) < self.count - 1:
            raise _DifferError("an activation in some blocks alone")
        offsets = {(i - self.start - b * self.period, o) for b, (i, o) in enumerate(places, 1)}
        if len(offsets) > 1:
            raise _DifferError("blocks read different results")
        ((i, o),) = offsets
        first = operands[0]
        if i >= 0:
            if self.finder.place.get(first) != (self.start + i, o):  # type: ignore[arg-type]
                raise _DifferError("the first block reads another result")
            return self.inside[operands[1]]  # type: ignore[index]
        if i < -self.period:
            raise _DifferError("a block reads results of one that is not next to it")
        if self.finder.place.get(first, (-1, 0))[0] >= self.start:  # type: ignore[arg-type]
            raise _DifferError("the first block reads its own result in the place of the carry")
        key = i + self.period, o
        if key not in self.carries:
            self.carries[key] = Value(operands[1].aval), first  # type: ignore[union-attr]
        carried, given = self.carries[key]
        if given is not first or _type(first) != _type(carried):
            raise _DifferError("the first block has several operands in the place of one carry")
        return carried

    def _made_again(self, operands: tuple[Operand, ...]) -> Value:
        """Return the body's value for those that follow from leaves, or from the batch, alone."""
        makers = [self.finder.makers.get(a) for a in operands]  # type: ignore[arg-type]
        if None in makers:
            raise _DifferError("different inputs of the program")
        equations, outputs = zip(*makers, strict=True)  # type: ignore[arg-type]
        if len(set(outputs)) > 1 or len({self.finder.likeness(eq) for eq in equations}) > 1:
            raise _DifferError("values that are made in different ways")
        self._copy(equations)
        return self.inside[operands[1]]  # type: ignore[index]


def _type(operand: Operand) -> Hashable:
    aval = _aval_of(operand)
    return aval.shape, aval.dtype


def _aval_of(operand: Operand) -> Any:
    if isinstance(operand, Value):
        return operand.aval
    value = operand.value
    return compat.array_type(np.shape(value), jax.dtypes.result_type(value))
