"""`DiskFlow`: reads sub-groups before a step updates them, and writes them while it goes on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import jax

from zeroxla.offload.disk.disk_array import ArrivingArray, DiskArray, write
from zeroxla.offload.disk.state_file import StateFile
from zeroxla.offload.update.rows import Rows


class DiskFlow:
    """The reads and writes of one step. Use it as a context: at its end nothing is under way.

    Args:
      file: the file that holds the arrays.
      groups: for each sub-group its arrays, by keys of the caller's choice, and their rows that it
        updates.
      buffers: number of sub-groups that are read, computed or written at a time.
      at_once: whether reading begins when the context is entered; otherwise at the first `next`.
    """

    def __init__(
        self,
        file: StateFile,
        groups: Sequence[tuple[Mapping[Any, DiskArray], Rows | None]],
        *,
        buffers: int,
        at_once: bool,
    ) -> None:
        self._file, self._buffers, self._at_once = file, buffers, at_once
        self._to_come = deque(groups)
        self._reading: deque[dict[Any, ArrivingArray]] = deque()
        self._writing: deque[tuple[list[Future[int]], Any]] = deque()
        self._begun = 0.0

    def __enter__(self) -> DiskFlow:
        self._file.wait_for_readers()
        self._file.blocks.accesses.clear()
        self._file.blocks.is_watched = True
        if self._at_once:
            self._read_ahead()
        return self

    def __exit__(self, *error: object) -> None:
        for group in self._reading:
            for arriving in group.values():
                arriving.wait()
        self._file.abandon()
        self._file.blocks.is_watched = False
        self._file.pool.clear()

    def next(self) -> dict[Any, jax.Array]:
        """Wait for the arrays of the next sub-group, and return them."""
        self._read_ahead()
        arrays = {k: arriving.result() for k, arriving in self._reading[0].items()}
        del self._reading[0]
        self._begun = time.perf_counter()
        return arrays

    def write(self, arrays: Sequence[tuple[DiskArray, jax.Array]], rows: Rows | None) -> None:
        """Begin to write the next version of arrays, or of some of their rows. Waits until they are
        computed."""
        jax.block_until_ready([new for _, new in arrays])
        self._file.blocks.note("update", self._begun)
        futures = [
            future for old, new in arrays for future in write(old.shards(rows), new, self._file)
        ]
        self._writing.append((futures, arrays))
        self._read_ahead()

    def commit(self) -> None:
        """Wait until everything is written, and put it in force."""
        self._writing.clear()
        self._file.commit()

    def _read_ahead(self) -> None:
        """Begin to read as many sub-groups as there is room for, but at least one. Waits for writes
        only if no sub-group is being read."""
        while self._to_come:
            self._forget_written()
            if len(self._reading) + len(self._writing) >= self._buffers:
                if self._reading:
                    return
                wait(self._writing[0][0])
                continue
            group, rows = self._to_come.popleft()
            self._reading.append({k: array.read(rows) for k, array in group.items()})

    def _forget_written(self) -> None:
        while self._writing and all(future.done() for future in self._writing[0][0]):
            for future in self._writing.popleft()[0]:
                future.result()
