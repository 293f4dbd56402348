"""`ReadAhead`: reads a file's parts before devices ask for them, in the order of the last run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from zeroxla.offload.disk.reading import Reading
from zeroxla.offload.disk.state_file import StateFile
from zeroxla.offload.disk.versions import Version

AHEAD_BYTES = 256 * 2**20
"""Largest number of bytes that a process has read, or is reading, before they are asked for. The
next part of each device is read in any case."""

Order = Mapping[int, Sequence[str]]
"""The names of the parts that each device asked for, in order. A device is named by the number of
its shards."""


class ReadAhead:
    """The reads of one run of a program.

    A device asks for its parts in the order of its program, which is about the same in every run. A
    part that was not foreseen is read when the device asks for it, and a part that is never asked
    for is read in vain. So a wrong guess costs time and nothing else.

    Args:
      file: the file to read.
      version: the version of its arrays to read.
      order: the order of the last run; empty if there was none.

    Attributes:
      asked: the order of this run so far.
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
        """Return the bytes of the parts that a device asks for next. Waits until they are read.

        Raises:
          DamagedStateError: the bytes differ from those that were written.
          OSError: the bytes cannot be read.
        """
        with self._lock:
            self.asked.setdefault(device, []).extend(names)
            readings = [self._reading(device, name) for name in names]
            self._read_ahead(device)
        return [reading.result() for reading in readings]

    def bytes_ahead(self, device: int) -> int:
        """Return the bytes that were read, or are being read, before a device asked for them."""
        return sum(reading.nbytes for _, reading in self._begun.get(device, ()))

    def close(self) -> None:
        """Wait for all reads under way."""
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
        with contextlib.suppress(ValueError):  # parts that are skipped are read when asked for
            start = self._next.get(device, 0)
            self._next[device] = self._order.get(device, ()).index(name, start) + 1
        return self._file.read(name, self._version)

    def _read_ahead(self, device: int) -> None:
        order, begun = self._order.get(device, ()), self._begun.get(device, [])
        held = self.bytes_ahead(device)
        while (at := self._next.get(device, 0)) < len(order):
            nbytes = self._file.nbytes_of(order[at])
            if begun and held + nbytes > self._room:
                return
            begun.append((order[at], self._file.read(order[at], self._version)))
            self._next[device] = at + 1
            held += nbytes
