"""Reads a file's parts ahead of those who ask for them, in the order in which they last did."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from zeroxla.offload.disk.state_file import Reading, StateFile, Version

AHEAD_BYTES = 256 * 2**20
"""That a process has read, or is reading, before they are asked for; beside them each device has
the next part."""

Order = Mapping[int, Sequence[str]]
"""The names of parts that each device asked for, one after another."""


class ReadAhead:
    """The reads of one program's run.

    A device asks for its parts in the order of its program, about the same in every run. What it
    asks for that was not foreseen is read when it asks, and what it does not ask for is read in
    vain: a wrong guess costs time.

    Args:
      file: that is read.
      version: of it.
      order: of the last run; empty if there was none.

    Attributes:
      asked: the order of this run.
    """

    def __init__(self, file: StateFile, version: Version, order: Order) -> None:
        self._file, self._version, self._order = file, version, order
        self.asked: dict[int, list[str]] = {}
        self._lock = threading.Lock()
        self._next = dict.fromkeys(order, 0)
        self._begun: dict[int, list[tuple[str, Reading]]] = {device: [] for device in order}
        self._room = AHEAD_BYTES // max(1, len(order))
        for device in order:
            self._read_ahead(device)

    def take(self, device: int, names: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of parts, in the order in which one device asks for them.

        Raises:
          DamagedStateError: the bytes are not those that were written.
          OSError: they cannot be read.
        """
        with self._lock:
            self.asked.setdefault(device, []).extend(names)
            readings = [self._reading(device, name) for name in names]
            self._read_ahead(device)
        return [reading.result() for reading in readings]

    def close(self) -> None:
        """Wait for what is under way."""
        for begun in self._begun.values():
            for _, reading in begun:
                reading.wait()
        self._file.pool.clear()

    def _reading(self, device: int, name: str) -> Reading:
        begun = self._begun.get(device, [])
        for i, (other, reading) in enumerate(begun):
            if other == name:
                del begun[i]
                return reading
        with contextlib.suppress(ValueError):  # what is passed over is read when it is asked for
            start = self._next.get(device, 0)
            self._next[device] = self._order.get(device, ()).index(name, start) + 1
        return self._file.read(name, self._version)

    def _read_ahead(self, device: int) -> None:
        order, begun = self._order.get(device, ()), self._begun.get(device, [])
        held = sum(reading.nbytes for _, reading in begun)
        while (at := self._next.get(device, 0)) < len(order):
            nbytes = self._file.nbytes_of(order[at])
            if begun and held + nbytes > self._room:
                return
            begun.append((order[at], self._file.read(order[at], self._version)))
            self._next[device] = at + 1
            held += nbytes
