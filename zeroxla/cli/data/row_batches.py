"""Batches of token rows, a row of the batch for each row of the data.

Shapes: B batch, L length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from zeroxla.cli.data.mixture import RowStream
from zeroxla.cli.data.row_encoder import TokenRow
from zeroxla.program.extras import extra

if TYPE_CHECKING:
    import grain

_Encoded = TypeVar("_Encoded")


def row_batches(
    stream: RowStream[TokenRow], *, batch: int, shard_index: int = 0, shard_count: int = 1
) -> grain.IterDataset:
    """Make an endless stream of batches with a row of the data in each row.

    A conversation or a pair with more than L + 1 tokens is cut at its end. Of a longer document a
    window is taken at a random place.

    Args:
      stream: the rows. L is the length of its encoder.
      batch: B, the rows of the global batch.
      shard_index, shard_count: this process makes the rows [index * B / count, (index + 1) * B /
        count) of every global batch, and reads only these. The global batch does not depend on the
        count.

    Returns:
      A grain IterDataset of {"tokens": int32[B / count, L + 1], "mask": int8[B / count, L]}. The
      mask is 1 at the targets `tokens[:, 1:]` that count. Rows that are shorter end with the token
      0, which does not count. The iterators have `get_state()` (a small dict that JSON can hold,
      with the number of the next batch) and `set_state(state)`.

    Raises:
      ImportError: grain is not installed.
      ValueError: B does not divide over the shards. And while batches are made: too many rows are
        bad.
    """

    def make(rows: Sequence[TokenRow], positions: Sequence[int]) -> dict[str, np.ndarray]:
        length = stream.encoder.length
        shares = [stream.draw(position) for position in positions]
        windows = [row.window(length, share) for row, share in zip(rows, shares, strict=True)]
        return padded(windows, len(windows), length)

    return batches_of(stream, make, batch, own_rows(batch, shard_index, shard_count))


def validation_row_batches(
    stream: RowStream[TokenRow], *, batch: int, num_batches: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield validation batches, the same ones each time, with a held-out row in each row.

    There are at most `num_batches`, and fewer if fewer rows are held out. The last one may end with
    empty rows, in which nothing counts.

    Raises:
      ValueError: none of the held-out rows can be used, or too many are bad.
    """
    rows = held_out(stream, batch * num_batches)
    windows = [row.window(stream.encoder.length) for row in rows]
    for first in range(0, len(windows), batch):
        yield padded(windows[first : first + batch], batch, stream.encoder.length)


def held_out(stream: RowStream[_Encoded], number: int) -> list[_Encoded]:
    """Return at most `number` held-out rows.

    Raises:
      ValueError: none can be used.
    """
    rows = stream.validation(number)
    if not rows:
        raise ValueError("none of the held-out rows can be used; give more rows, or mend them")
    return rows


def padded(rows: Sequence[TokenRow], batch: int, length: int) -> dict[str, np.ndarray]:
    """Return a batch of rows of at most `length` + 1 tokens, filled up with the token 0."""
    tokens = np.zeros((batch, length + 1), np.int32)
    mask = np.zeros((batch, length), np.int8)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens_T)] = row.tokens_T
        mask[i, : max(0, len(row.tokens_T) - 1)] = row.counted_T[1:]
    return {"tokens": tokens, "mask": mask}


def own_rows(batch: int, shard_index: int, shard_count: int) -> slice:
    """Return the rows of every global batch that a process makes.

    Raises:
      ValueError: the batch does not divide over the processes.
    """
    if batch < 1 or batch % shard_count or not 0 <= shard_index < shard_count:
        raise ValueError(
            f"batch of {batch} does not divide over {shard_count} shards (index {shard_index}); "
            f"use a multiple of {shard_count}"
        )
    rows = batch // shard_count
    return slice(shard_index * rows, (shard_index + 1) * rows)


def batches_of(
    stream: RowStream[_Encoded],
    make: Callable[[Sequence[_Encoded], Sequence[int]], dict[str, np.ndarray]],
    batch: int,
    own: slice,
) -> grain.IterDataset:
    """Make an endless stream of batches.

    Args:
      stream: the rows.
      make: returns a batch of rows, which are given with their positions in the stream.
      batch: B, the rows of the global batch.
      own: the rows of every global batch to make.

    Raises:
      ImportError: grain is not installed.
    """
    with extra("cli", "batches need"):  # here, because it takes long to import
        import grain
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    source = _RowBatches(stream, make, batch, own)
    return grain.MapDataset.source(source).to_iter_dataset(options)


@dataclass(frozen=True, slots=True)
class _RowBatches(Generic[_Encoded]):
    """A grain random-access source: element i is batch i of the endless stream."""

    stream: RowStream[_Encoded]
    make: Callable[[Sequence[_Encoded], Sequence[int]], dict[str, np.ndarray]]
    batch: int
    own: slice

    def __len__(self) -> int:
        return sys.maxsize // self.batch

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        first = index * self.batch
        positions = range(first + self.own.start, first + self.own.stop)
        return self.make(self.stream.rows(positions), positions)
