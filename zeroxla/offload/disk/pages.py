"""`PagePool`: whole pages of memory to read a disk into and write it from, used again and again."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque

import numpy as np

ALIGNMENT = 4096
"""Bytes to which direct access to a disk wants offsets, lengths and memory aligned."""


def aligned(nbytes: int) -> int:
    """Return a number of bytes rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pages(nbytes: int) -> np.ndarray:
    """Return fresh memory: uint8[aligned(nbytes)] that begins at a page."""
    return np.frombuffer(_fresh(nbytes), np.uint8)


class PagePool:
    """Pages that are used again once nothing refers to them any longer.

    The system clears a fresh page when it is first touched, which can take longer than reading it
    from a fast disk. Kept pages and pages in use together never exceed the pages that were in use
    at one time before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []  # the one that has been kept longest comes first
        # A finalizer runs wherever the last reference ends, even in a thread that holds the lock.
        self._returned: deque[mmap.mmap] = deque()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the kept pages, which nothing refers to."""
        with self._lock:
            self._collect()
            return sum(map(len, self._free))

    def take(self, nbytes: int) -> np.ndarray:
        """Return uint8[aligned(nbytes)] that begins at a page, with any content. Once the array and
        all views of it are gone, its memory is given to another."""
        with self._lock:
            self._collect()
            memory = self._fitting(aligned(nbytes))
            array = np.frombuffer(memory, np.uint8)
            weakref.finalize(array, self._returned.append, memory).atexit = False
        return array

    def clear(self) -> None:
        """Give kept pages back to the system, and pages in use once they no longer are."""
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
    return mmap.mmap(-1, max(aligned(nbytes), ALIGNMENT))  # zero bytes cannot be mapped
