"""Blocks of a file, read and written by threads: aligned, summed, past the page cache if it can be.

A block is what one call to the operating system moves, and what has one checksum. Threads over
`pread` and `pwrite` they are because these release Python's lock, move as fast as the disk does
(`benchmarks/offload_disk.py` has tensorstore beside them) and write inside one file.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
import warnings
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash

from zeroxla.offload.disk.pages import aligned, pages

BLOCK_BYTES = 8 * 2**20
"""Of the largest block."""

WORKERS = 8
"""Threads: enough that a disk always has the next request."""


def checksum(data: bytes | np.ndarray) -> int:
    """Return the sum of a block, 64 bits of XXH3: about as fast as memory, where a CRC would keep
    a core as busy as a fast disk keeps the block."""
    return xxhash.xxh3_64_intdigest(data)


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """What a time line shows: a block that was moved, or a sub-group that was updated.

    Attributes:
      kind: "read", "write" or "update".
      begun, ended: seconds, of `time.perf_counter`.
      nbytes: moved.
    """

    kind: Literal["read", "write", "update"]
    begun: float
    ended: float
    nbytes: int


class BlockFile:
    """A file, moved block by block by threads.

    Attributes:
      path: of the file.
      is_direct: whether it is moved past the page cache.
      accesses: what was moved while `is_watched`, in the order in which it ended.
      is_watched: whether these are noted, as during a step.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Open a file, which nobody else may have open.

        Raises:
          OSError: it cannot be opened; BlockingIOError: another process has it open.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self.path = path
        self.accesses: list[Access] = []
        self.is_watched = False
        direct = getattr(os, "O_DIRECT", 0)
        try:
            self._fd = os.open(path, flags | direct, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            direct = 0
            self._fd = os.open(path, flags, 0o600)
            warnings.warn(
                f"the file system of {path} has no direct access (as in memory, or on some "
                "networks): what is moved passes through the page cache, and fills it",
                stacklevel=2,
            )
        self.is_direct = bool(direct)
        try:
            lock(self._fd)
        except OSError:
            os.close(self._fd)
            raise
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="disk")
        self._own = threading.local()
        # Also without a `close`, when nothing refers to it and so nothing is under way.
        self._let_go = weakref.finalize(self, os.close, self._fd)

    @property
    def size(self) -> int:
        """Bytes that the file has."""
        return os.fstat(self._fd).st_size

    @property
    def is_there(self) -> bool:
        """Whether the path still leads to this file."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def allocate(self, nbytes: int) -> None:
        """Make the file so large, with room on the disk for all of it.

        Raises:
          OSError: there is no room.
        """
        if hasattr(os, "posix_fallocate"):  # not on macOS, which reserves nothing
            os.posix_fallocate(self._fd, 0, nbytes)
        os.ftruncate(self._fd, nbytes)

    def read(self, offset: int, into: np.ndarray, nbytes: int) -> Future[int]:
        """Begin to read a block; the future has its checksum.

        Args:
          offset: aligned.
          into: uint8[aligned(nbytes)], which begins a page.
          nbytes: of the block, up to BLOCK_BYTES.
        """
        return self._pool.submit(self._read, offset, into, nbytes)

    def write(self, offset: int, data: np.ndarray) -> Future[int]:
        """Begin to write a block, uint8 of up to BLOCK_BYTES; the future has its checksum."""
        return self._pool.submit(self._write, offset, data)

    def write_now(self, offset: int, data: bytes) -> None:
        """Write bytes, such that they outlive a loss of power with all that was written before."""
        os.fdatasync(self._fd)
        self._write(offset, np.frombuffer(data, np.uint8))
        os.fdatasync(self._fd)

    def read_now(self, offset: int, nbytes: int) -> bytes:
        """Read bytes; fewer where the file ends."""
        block = pages(nbytes)
        found = os.preadv(self._fd, [block], offset)
        return block[: min(found, nbytes)].tobytes()

    def note(self, kind: Literal["read", "write", "update"], begun: float, nbytes: int = 0) -> None:
        """Note what ends now, if the file is watched."""
        if self.is_watched:
            self.accesses.append(Access(kind, begun, time.perf_counter(), nbytes))

    def close(self) -> None:
        """Wait for what is under way, and let go of the file."""
        self._pool.shutdown()
        self._let_go()

    def _read(self, offset: int, into: np.ndarray, nbytes: int) -> int:
        begun, done = time.perf_counter(), 0
        while done < nbytes:
            found = os.preadv(self._fd, [into[done:]], offset + done)
            if found == 0:
                raise OSError(errno.EIO, f"{self.path} ends at {offset + done}")
            done += found
        self.note("read", begun, into.nbytes)
        return checksum(into[:nbytes])

    def _write(self, offset: int, data: np.ndarray) -> int:
        padded = aligned(data.nbytes)
        buffer = getattr(self._own, "buffer", None)
        if buffer is None or buffer.nbytes < padded:
            buffer = self._own.buffer = pages(max(padded, BLOCK_BYTES))
        block = buffer[:padded]
        block[: data.nbytes] = data
        block[data.nbytes :] = 0
        total = checksum(block[: data.nbytes])
        begun, done = time.perf_counter(), 0
        while done < padded:
            done += os.pwrite(self._fd, block[done:], offset + done)
        self.note("write", begun, padded)
        return total


def lock(fd: int) -> None:
    """Keep other processes from locking a file; until it is closed, also by the process' death.

    Raises:
      BlockingIOError: another has locked it.
    """
    import fcntl  # not on Windows, where JAX has no accelerators

    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
