"""Memory that a disk is read into and written from: whole pages, used again and again."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque

import numpy as np

ALIGNMENT = 4096
"""Bytes; of offsets, lengths and memory, as direct access to a disk wants them."""


def aligned(nbytes: int) -> int:
    """Return a number of bytes rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pages(nbytes: int) -> np.ndarray:
    """Return uint8[aligned(nbytes)] of fresh memory that begins a page."""
    return np.frombuffer(_fresh(nbytes), np.uint8)


class PagePool:
    """Pages that are used again when nothing refers to them any more.

    The system clears a fresh page when it is first touched, which can take longer than to read it
    from a fast disk. What is kept here and what is in use are together never more than what was in
    use at a time before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []  # what was kept longest first
        # Finalizers run wherever the last reference goes, also in a thread that holds the lock.
        self._returned: deque[mmap.mmap] = deque()

    @property
    def kept_bytes(self) -> int:
        """Of the pages that nothing refers to."""
        with self._lock:
            self._collect()
            return sum(map(len, self._free))

    def take(self, nbytes: int) -> np.ndarray:
        """Return uint8[aligned(nbytes)] that begins a page, of any content. When the array and all
        views of it are gone, its memory is another's."""
        with self._lock:
            self._collect()
            memory = self._fitting(aligned(nbytes))
            array = np.frombuffer(memory, np.uint8)
            weakref.finalize(array, self._returned.append, memory).atexit = False
        return array

    def clear(self) -> None:
        """Give back what is kept, and what is in use when it is no longer."""
        with self._lock:
            self._free, self._returned = [], deque()

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())

    def _fitting(self, nbytes: int) -> mmap.mmap:
        for i, memory in enumerate(self._free):
            if len(memory) == nbytes:
                return self._free.pop(i)
        room = nbytes
        while self._free and room > 0:
            room -= len(self._free.pop(0))
        return _fresh(nbytes)


def _fresh(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, max(aligned(nbytes), ALIGNMENT))  # nothing cannot be mapped
