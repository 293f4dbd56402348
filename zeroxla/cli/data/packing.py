"""Packed batches: several short rows of the data share a row of the batch, and are kept apart.

Rows are packed a window at a time: those of a window are sorted by length, and each goes, the
longest first, where it leaves the least room (best-fit decreasing). Each row of the data is one
segment, and attention must stay inside a segment; models that take "segments" see to that.

Shapes: B batch, L length.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from zeroxla.cli.data.mixture import RowStream
from zeroxla.cli.data.row_batches import held_out, own_rows
from zeroxla.cli.data.row_encoder import TokenRow
from zeroxla.program.extras import extra

with extra("cli", "batches need"):
    import grain
    from grain.experimental import ThreadPrefetchIterDataset

WINDOW = 1024
"""The number of rows of the data that are packed together."""
_AHEAD = 16  # batches that a thread makes before they are asked for


def packed_batches(
    stream: RowStream[TokenRow],
    *,
    batch: int,
    shard_index: int = 0,
    shard_count: int = 1,
    window: int = WINDOW,
) -> grain.IterDataset:
    """Make an endless stream of packed batches.

    A conversation or a pair with more than L + 1 tokens is cut at its end. A longer document is cut
    into pieces, which are segments of their own.

    Args:
      stream: the rows of the data. L is the length of its encoder.
      batch: B, the rows of the global batch.
      shard_index, shard_count: this process makes the rows [index * B / count, (index + 1) * B /
        count) of every global batch. The global batch does not depend on the count.
      window: the number of rows of the data that are packed together. More leave less room empty.

    Returns:
      A grain IterDataset of batches with B / count rows: "tokens" int32[B, L + 1]; "mask" int8[B,
      L], 1 at the targets `tokens[:, 1:]` that count, which never is the first token of a segment;
      "segments" int32[B, L], the number of each input's segment in its row from 1, and 0 at
      padding; "positions" int32[B, L], from 0 in each segment. The iterators have `get_state()` (a
      small dict that JSON can hold) and `set_state(state)`. A state whose "next_index" has been set
      to another number leads there from the beginning, and packs all rows on the way.

    Raises:
      ImportError: grain is not installed.
      ValueError: B does not divide over the shards, or the window is empty. And while batches are
        made: too many rows are bad.

    Cost: where rows go depends on the lengths of the others in their window, so every process turns
    all rows into tokens. A thread does it ahead of the steps. The tokens of a window are in memory.
    """
    if window < 1:
        raise ValueError(f"a window of {window} rows holds none; {WINDOW} is usual")
    rows = own_rows(batch, shard_index, shard_count)
    made = _PackedBatches(stream, batch, rows, window)
    return ThreadPrefetchIterDataset(made, prefetch_buffer_size=_AHEAD)


def packed_validation_batches(
    stream: RowStream[TokenRow], *, batch: int, num_batches: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield packed validation batches, the same ones each time.

    They hold the same rows as the batches without packing, so the loss is over the same targets.
    The last batch may end with empty rows, in which nothing counts.

    Raises:
      ValueError: none of the held-out rows can be used, or too many are bad.
    """
    encoder = stream.encoder
    pieces = [row.window(encoder.length) for row in held_out(stream, batch * num_batches)]
    packed = pack([len(x.tokens_T) for x in pieces], encoder.length + 1)
    rows = [[pieces[i] for i in numbers] for numbers in packed]
    for first in range(0, len(rows), batch):
        yield packed_batch(rows[first : first + batch], batch, encoder.length)


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Put lengths into as few bins as best-fit decreasing finds.

    Args:
      lengths: each at most `size`.
      size: the size of a bin.

    Returns:
      For each bin the numbers of its lengths, in rising order.

    >>> pack([5, 3, 7, 2], 10)
    [[1, 2], [0, 3]]
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # the room that is left, and the number of the bin; sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect.bisect_left(rooms, (lengths[i], 0))
        if place == len(rooms):
            room, number = size, len(bins)
            bins.append([])
        else:
            room, number = rooms.pop(place)
        bins[number].append(i)
        bisect.insort(rooms, (room - lengths[i], number))
    return [sorted(numbers) for numbers in bins]


def packed_batch(
    rows: Sequence[Sequence[TokenRow]], batch: int, length: int
) -> dict[str, np.ndarray]:
    """Return a batch whose rows hold several token rows each, filled up with empty rows."""
    tokens = np.zeros((batch, length + 1), np.int32)
    counted = np.zeros((batch, length + 1), np.int8)
    segments, positions = (np.zeros((batch, length + 1), np.int32) for _ in range(2))
    for i, row in enumerate(rows):
        first = 0
        for number, part in enumerate(row, 1):
            place = slice(first, first + len(part.tokens_T))
            tokens[i, place], counted[i, place] = part.tokens_T, part.counted_T
            segments[i, place], positions[i, place] = number, np.arange(len(part.tokens_T))
            first = place.stop
    return {
        "tokens": tokens,
        "mask": counted[:, 1:],
        "segments": segments[:, :-1],
        "positions": positions[:, :-1],
    }


def fill_of(batch: dict[str, np.ndarray]) -> float:
    """Return the share of a packed batch's inputs that are no padding."""
    return float((batch["segments"] != 0).mean())


class _PackedBatches(grain.IterDataset):
    """Batches of packed rows, of which a process keeps its own."""

    def __init__(self, stream: RowStream[TokenRow], num_rows: int, own: slice, window: int) -> None:
        super().__init__()
        self.stream, self.num_rows, self.own, self.window = stream, num_rows, own, window

    def __iter__(self) -> _PackedBatchesIterator:
        return _PackedBatchesIterator(self)


class _PackedBatchesIterator(grain.DatasetIterator):
    """Its state is the number of batches that have been taken, the window of the next row, and the
    number of that row in its window."""

    def __init__(self, batches: _PackedBatches) -> None:
        super().__init__()
        self._batches = batches
        self._taken = self._window = self._row = 0
        self._rows: list[list[TokenRow]] | None = None

    def __next__(self) -> dict[str, np.ndarray]:
        batches = self._batches
        rows = self._next_rows()[batches.own]
        return packed_batch(rows, len(rows), batches.stream.encoder.length)

    def _next_rows(self) -> list[list[TokenRow]]:
        """Return the rows of the next global batch."""
        found: list[list[TokenRow]] = []
        while len(found) < self._batches.num_rows:
            if self._rows is None:
                self._rows = self._packed(self._window)
            missing = self._batches.num_rows - len(found)
            found += self._rows[self._row : self._row + missing]
            self._row += missing
            if self._row >= len(self._rows):
                self._window, self._row, self._rows = self._window + 1, 0, None
        self._taken += 1
        return found

    def _packed(self, window: int) -> list[list[TokenRow]]:
        """Return the rows of batches that a window gives, in random order."""
        stream, size = self._batches.stream, self._batches.window
        found = stream.rows(range(window * size, (window + 1) * size))
        length = stream.encoder.length
        pieces = [piece for row in found for piece in row.pieces(length)]
        packed = pack([len(x.tokens_T) for x in pieces], length + 1)
        order = stream.generator(window).permutation(len(packed))
        return [[pieces[i] for i in packed[number]] for number in order]

    def get_state(self) -> dict[str, Any]:
        place = {"batches": self._taken, "window": self._window, "row": self._row}
        return {"next_index": self._taken, "packer": place}

    def set_state(self, state: dict[str, Any]) -> None:
        place = state["packer"]
        moved = place["batches"] != state["next_index"]
        if moved:
            place = {"batches": 0, "window": 0, "row": 0}
        self._taken, self._window, self._row = place["batches"], place["window"], place["row"]
        self._rows = None
        while self._taken < state["next_index"]:
            self._next_rows()
