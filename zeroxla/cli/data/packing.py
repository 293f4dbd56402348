"""Packed batches: several short rows of the data share a row of the batch, and are kept apart.

grain packs first-fit: a row goes into the first bin that has room, and when it fits into none, all
bins become rows of batches. Each row of the data is one segment, and attention must stay inside a
segment; models that take "segments" see to that.

Shapes: B batch, L length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from zeroxla.cli.data.mixture import RowStream
from zeroxla.cli.data.row_batches import held_out, own_rows
from zeroxla.cli.data.row_encoder import TokenRow
from zeroxla.program.extras import extra

with extra("cli", "batches need"):
    import grain
    from grain.experimental import FirstFitPackIterDataset, ThreadPrefetchIterDataset

BINS = 256
"""The number of rows that are filled at the same time. More leave less room empty, and take more
memory: 21 bytes for each of the L + 1 places."""
_READ = 64  # rows of the data that become tokens at a time


def packed_batches(
    stream: RowStream,
    *,
    batch: int,
    shard_index: int = 0,
    shard_count: int = 1,
    bins: int = BINS,
) -> grain.IterDataset:
    """Make an endless stream of packed batches.

    A conversation or a pair with more than L + 1 tokens is cut at its end. A longer document is cut
    into pieces, which are segments of their own.

    Args:
      stream: the rows of the data. L is the length of its encoder.
      batch: B, the rows of the global batch.
      shard_index, shard_count: this process makes the rows [index * B / count, (index + 1) * B /
        count) of every global batch. The global batch does not depend on the count.
      bins: the number of rows that are filled at the same time.

    Returns:
      A grain IterDataset of batches with B / count rows: "tokens" int32[B, L + 1]; "mask" int8[B,
      L], 1 at the targets `tokens[:, 1:]` that count, which never is the first token of a segment;
      "segments" int32[B, L], the number of each input's segment in its row from 1, and 0 at
      padding; "positions" int32[B, L], from 0 in each segment. The iterators have `get_state()` (a
      small dict that JSON can hold) and `set_state(state)`. A state whose "next_index" has been set
      to another number leads there from the beginning, and makes all batches on the way.

    Raises:
      ImportError: grain is not installed.
      ValueError: B does not divide over the shards. And while batches are made: too many rows are
        bad.

    Cost: where rows go depends on the lengths of all rows before, so every process turns all rows
    into tokens. A thread does it ahead of the steps.
    """
    rows = own_rows(batch, shard_index, shard_count)
    made = _PackedBatches(_Pieces(stream), stream.encoder.length, batch, rows, bins)
    # All batches of the bins that are ready at once, and one more.
    return ThreadPrefetchIterDataset(made, prefetch_buffer_size=-(-bins // batch) + 1)


def packed_validation_batches(
    stream: RowStream, *, batch: int, num_batches: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield packed validation batches, the same ones each time.

    They hold the same rows as the batches without packing, so the loss is over the same targets.
    The last batch may end with empty rows, in which nothing counts.

    Raises:
      ValueError: none of the held-out rows can be used, or too many are bad.
    """
    encoder = stream.encoder
    found = held_out(stream, batch * num_batches)
    elements = [_element(encoder.window(row, 0.0)) for row in found]
    packed = list(
        _packed(grain.MapDataset.source(elements).to_iter_dataset(), encoder.length, BINS)
    )
    for first in range(0, len(packed), batch):
        yield _stacked(packed[first : first + batch], batch)


def fill_of(batch: dict[str, np.ndarray]) -> float:
    """Return the share of a packed batch's inputs that are no padding."""
    return float((batch["segments"] != 0).mean())


def _element(row: TokenRow) -> dict[str, np.ndarray]:
    return {"tokens": row.tokens_T, "counted": row.counted_T.astype(np.int8)}


def _packed(elements: grain.IterDataset, length: int, bins: int) -> grain.IterDataset:
    sizes = {"tokens": length + 1, "counted": length + 1}
    return FirstFitPackIterDataset(
        elements, length_struct=sizes, num_packing_bins=bins, shuffle_bins=False
    )


def _stacked(packed: Sequence[dict[str, np.ndarray]], batch: int) -> dict[str, np.ndarray]:
    """Return the batch of rows from grain's packer, filled up with empty rows."""
    empty = [{name: np.zeros_like(x) for name, x in packed[0].items()}] * (batch - len(packed))
    rows = {name: np.stack([row[name] for row in [*packed, *empty]]) for name in packed[0]}
    return {
        "tokens": rows["tokens"].astype(np.int32),
        "mask": rows["counted"][:, 1:].astype(np.int8),
        "segments": rows["tokens_segment_ids"][:, :-1].astype(np.int32),
        "positions": rows["tokens_positions"][:, :-1].astype(np.int32),
    }


class _Pieces(grain.IterDataset):
    """The rows of a stream in order, long documents in pieces."""

    def __init__(self, stream: RowStream) -> None:
        super().__init__()
        self.stream = stream

    def __iter__(self) -> _PiecesIterator:
        return _PiecesIterator(self.stream)


class _PiecesIterator(grain.DatasetIterator):
    def __init__(self, stream: RowStream) -> None:
        super().__init__()
        self._stream = stream
        self._position, self._piece = 0, 0
        self._ahead: dict[int, list[TokenRow]] = {}

    def __next__(self) -> dict[str, np.ndarray]:
        pieces = self._ahead.get(self._position)
        if pieces is None:
            positions = range(self._position, self._position + _READ)
            rows = self._stream.rows(positions)
            cut = map(self._stream.encoder.pieces, rows)
            self._ahead = dict(zip(positions, cut, strict=True))
            pieces = self._ahead[self._position]
        piece = pieces[self._piece]
        self._piece += 1
        if self._piece == len(pieces):
            self._position, self._piece = self._position + 1, 0
        return _element(piece)

    def get_state(self) -> dict[str, Any]:
        return {"position": self._position, "piece": self._piece}

    def set_state(self, state: dict[str, Any]) -> None:
        self._position, self._piece = state["position"], state["piece"]
        self._ahead = {}


class _PackedBatches(grain.IterDataset):
    """Batches of packed rows, of which a process keeps its own."""

    def __init__(self, pieces: _Pieces, length: int, batch: int, rows: slice, bins: int) -> None:
        super().__init__()
        self.packed, self.num_rows, self.own = _packed(pieces, length, bins), batch, rows

    def __iter__(self) -> _PackedBatchesIterator:
        return _PackedBatchesIterator(self)


class _PackedBatchesIterator(grain.DatasetIterator):
    """Its state is the packer's, and the number of batches that have been taken."""

    def __init__(self, batches: _PackedBatches) -> None:
        super().__init__()
        self._batches = batches
        self._restart()

    def _restart(self) -> None:
        self._packed, self._taken = iter(self._batches.packed), 0

    def __next__(self) -> dict[str, np.ndarray]:
        made = [next(self._packed) for _ in range(self._batches.num_rows)]
        rows = made[self._batches.own]
        self._taken += 1
        return _stacked(rows, len(rows))

    def get_state(self) -> dict[str, Any]:
        return {
            "next_index": self._taken,
            "packer": {"batches": self._taken, "state": self._packed.get_state()},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        packer = state["packer"]
        if packer["batches"] == state["next_index"]:
            self._packed = iter(self._batches.packed)
            self._packed.set_state(packer["state"])
            self._taken = state["next_index"]
            return
        self._restart()
        while self._taken < state["next_index"]:
            for _ in range(self._batches.num_rows):
                next(self._packed)
            self._taken += 1
