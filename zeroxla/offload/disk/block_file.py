"""`BlockFile`: reads and writes blocks of a file with threads, past the page cache if possible.

A block is moved by one call to the operating system, and has one checksum. Threads call `pread` and
`pwrite`, because these release Python's lock, move bytes as fast as the disk does
(`benchmarks/offload_disk.py` compares tensorstore) and write inside one file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

from zeroxla.offload.disk.pages import aligned, pages
from zeroxla.program.extras import extra

BLOCK_BYTES = 8 * 2**20
"""Size of the largest block."""

WORKERS = 8
"""Number of threads: enough that a disk always has a next request."""


def checksum(data: bytes | np.ndarray) -> int:
    """Return the checksum of a block: 64 bits of XXH3.

    XXH3 is about as fast as memory. A CRC-32, which checkpoints have, would keep a core as long
    busy as a fast disk takes to move the block. A checkpoint keeps its CRC-32, so that older ones
    can be read and the standard library suffices.
    """
    return _xxhash().xxh3_64_intdigest(data)


@functools.cache
def _xxhash() -> Any:
    with extra("disk", "state on disk needs"):
        import xxhash
    return xxhash


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """An entry of a time line: a block that was moved, or a sub-group that was updated.

    Attributes:
      kind: "read", "write" or "update".
      begun, ended: seconds of `time.perf_counter`.
      nbytes: number of bytes moved.
    """

    kind: Literal["read", "write", "update"]
    begun: float
    ended: float
    nbytes: int


class BlockFile:
    """A file that threads read and write block by block.

    Attributes:
      path: the file's path.
      is_direct: whether blocks bypass the page cache.
      accesses: the accesses noted while `is_watched`, in the order in which they ended.
      is_watched: whether accesses are noted, as during a step.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Open a file that no other process may have open.

        Raises:
          OSError: the file cannot be opened.
          BlockingIOError: another process has it open, or has removed it meanwhile.
          ImportError: the package of checksums is not installed.
        """
        _xxhash()  # before there is a file
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
            if not self.is_there:
                raise BlockingIOError(errno.EWOULDBLOCK, "removed by another process")
        except OSError:
            os.close(self._fd)
            raise
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="disk")
        self._thread = threading.local()
        # Closes the file even without a call of `close`: once nothing refers to this object, no
        # access is under way.
        self._close = weakref.finalize(self, os.close, self._fd)

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        return os.fstat(self._fd).st_size

    @property
    def is_there(self) -> bool:
        """Whether the path still leads to this file."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def allocate(self, nbytes: int) -> None:
        """Give the file a size, and reserve room for all of it on the disk.

        Raises:
          OSError: the disk has no room.
        """
        if hasattr(os, "posix_fallocate"):  # macOS lacks it, and reserves nothing
            os.posix_fallocate(self._fd, 0, nbytes)
        os.ftruncate(self._fd, nbytes)

    def read(self, offset: int, into: np.ndarray, nbytes: int) -> Future[int]:
        """Begin to read a block. The future returns its checksum.

        Args:
          offset: the block's place in the file, aligned.
          into: memory for it: uint8[aligned(nbytes)] that begins at a page.
          nbytes: the block's size, up to BLOCK_BYTES.
        """
        return self._pool.submit(self._read, offset, into, nbytes)

    def write(self, offset: int, data: np.ndarray) -> Future[int]:
        """Begin to write a block: uint8, up to BLOCK_BYTES. The future returns its checksum."""
        return self._pool.submit(self._write, offset, data)

    def write_now(self, offset: int, data: bytes) -> None:
        """Write bytes durably: they, and everything written before, survive a loss of power."""
        with self._named():
            os.fdatasync(self._fd)
            self._write(offset, np.frombuffer(data, np.uint8))
            os.fdatasync(self._fd)

    def read_now(self, offset: int, nbytes: int) -> bytes:
        """Read bytes; fewer if the file ends before."""
        block = pages(nbytes)
        found = os.preadv(self._fd, [block], offset)
        return block[: min(found, nbytes)].tobytes()

    def note(self, kind: Literal["read", "write", "update"], begun: float, nbytes: int = 0) -> None:
        """Note an access that ends now, if the file is watched."""
        if self.is_watched:
            self.accesses.append(Access(kind, begun, time.perf_counter(), nbytes))

    def close(self) -> None:
        """Wait for accesses under way, and close the file."""
        self._pool.shutdown()
        self._close()

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
        buffer = getattr(self._thread, "buffer", None)
        if buffer is None or buffer.nbytes < padded:
            buffer = self._thread.buffer = pages(max(padded, BLOCK_BYTES))
        block = buffer[:padded]
        block[: data.nbytes] = data
        block[data.nbytes :] = 0
        total = checksum(block[: data.nbytes])
        begun, done = time.perf_counter(), 0
        with self._named():
            while done < padded:
                done += os.pwrite(self._fd, block[done:], offset + done)
        self.note("write", begun, padded)
        return total

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Let the system's errors name the file."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def lock(fd: int) -> None:
    """Keep other processes from locking a file, until this one closes it or ends.

    Raises:
      BlockingIOError: another process has locked it.
    """
    import fcntl  # Windows lacks it, and JAX has no accelerators there

    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
