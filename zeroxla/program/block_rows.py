"""Finds rows of equal blocks in a program: the same equations over leaves of the same shapes.

Blocks are stretches of the equations that make activations. They form a row if they differ only in
what a loop over them could take from its turn: each reads results of the block before, which a loop
carries; leaves of its own, which it can stack; constants of its own, such as those from which keys
of dropout are made; and what all blocks read alike.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Mapping

import numpy as np

from zeroxla.program.block_match import ActivationIndex, BlockRow, match_blocks, type_of
from zeroxla.program.repeats import Repeat, repeats
from zeroxla.program.trace import Operand, Program, Value, bytes_of

_TRIES = 8
"""So many repetitions of a stretch are looked at before it is left as it is."""


def find_rows(program: Program, model: Mapping[Value, Hashable]) -> list[BlockRow]:
    """Return the rows of blocks of a program, in order.

    Args:
      program: any program.
      model: the inputs that are the model's leaves and state, each with a key. Those of one shape
        and one key may be stacked.
    """
    finder = _Finder(ActivationIndex(program, model))
    return finder.rows(0, len(finder.keys))


class _Finder:
    """Finds the rows of one program; see `find_rows`."""

    def __init__(self, index: ActivationIndex) -> None:
        self.index, self.keys = index, _keys(index)
        self.bytes_across = _bytes_across(index)

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
            row = match_blocks(self.index, start, period, count) if count > 1 else None
            if row is not None:
                return start, count, row
        return None


def _keys(index: ActivationIndex) -> list[int]:
    """Return a number for each of the activations' equations.

    Equations with one number are alike, and so is what their operands do to the leaves that
    they follow from, which have one kind.
    """
    numbers: dict[Hashable, int] = {}

    def number(*key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    known: dict[Operand, int] = {
        v: number("model", type_of(v), kind) for v, kind in index.model.items()
    }
    keys = {}
    for eq in index.program.equations:
        keys[eq] = number("equation", index.likeness(eq), *map(known.get, eq.inputs))
        if eq.values and known.keys() >= set(eq.values):
            known.update((v, number("made", keys[eq], o)) for o, v in enumerate(eq.outputs))
    return [keys[eq] for eq in index.equations]


def _bytes_across(index: ActivationIndex) -> np.ndarray:
    """Return the bytes of the activations that cross each place before an equation, and the end."""
    change = np.zeros(len(index.equations) + 2, np.int64)
    for i, eq in enumerate(index.equations):
        for v in eq.outputs:
            last = max(index.readers.get(v, (i,)))
            change[i + 1] += bytes_of(v)
            change[last + 1] -= bytes_of(v)
    return np.cumsum(change)
