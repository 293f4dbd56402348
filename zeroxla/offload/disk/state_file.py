"""`StateFile`: a process's arrays in one file, such that a step never destroys the one before.

The file has room for two versions of every array. A step writes the version that is not in force,
and then, in one block, a record that puts it in force: which version of each array, and the sum of
each of its blocks. There are two records, too, written in turn; that with the higher number holds,
if its own sum is right. So at every moment one whole state is in force, and a record is written
when all that it speaks of is on the disk.

    header | record 0 | record 1 | version 0 of all arrays | version 1 of all arrays
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import struct
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from zeroxla.offload.disk.block_file import BLOCK_BYTES, BlockFile, checksum
from zeroxla.offload.disk.pages import ALIGNMENT, PagePool, aligned
from zeroxla.offload.disk.reading import DamagedStateError, Reading

FORMAT = "zeroxla state 2"
_RECORD = struct.Struct("<QI")  # number of the version, bytes of what follows; then the sum
_SUM = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True, slots=True)
class _Extent:
    """Where an array is: within a version, and its blocks within the list of sums."""

    offset: int
    nbytes: int
    first_block: int

    @property
    def blocks(self) -> list[tuple[int, int, int]]:
        """(position among all blocks, offset within the array, bytes) of each block."""
        starts = range(0, self.nbytes, BLOCK_BYTES)
        return [
            (self.first_block + i, start, min(BLOCK_BYTES, self.nbytes - start))
            for i, start in enumerate(starts)
        ]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Version:
    """What a record says.

    Attributes:
      number: counted from 1; 0 if nothing was ever put in force.
      copies: which of the two copies of each array it is, 0 or 1.
      sums: of all blocks.
    """

    number: int
    copies: np.ndarray
    sums: np.ndarray


class StateFile:
    """Arrays of bytes, by name, in one file.

    Attributes:
      version: that is in force.
      pool: of the memory that it is read into; to be cleared after a number of reads.
    """

    def __init__(self, path: Path, sizes: Mapping[str, int]) -> None:
        """Open a file with these arrays, or make it.

        Args:
          path: of the file; its folder is made.
          sizes: bytes of each array.

        Raises:
          ValueError: the folder cannot be written, the disk has too little room, another process
            has the file open, or it holds something else.
        """
        self._extents: dict[str, _Extent] = {}
        offset = blocks = 0
        for name, nbytes in sizes.items():
            extent = self._extents[name] = _Extent(offset, nbytes, blocks)
            offset, blocks = offset + aligned(nbytes), blocks + len(extent.blocks)
        header = json.dumps({"format": FORMAT, "arrays": dict(sizes)}).encode()
        self._header = struct.pack("<IQ", len(header), checksum(header)) + header
        self.version = Version(0, np.zeros(len(sizes), np.uint8), np.zeros(blocks, np.uint64))
        self._order = {name: i for i, name in enumerate(sizes)}
        self._record_bytes = aligned(_RECORD.size + len(sizes) + 8 * blocks + _SUM.size)
        self._copy_bytes = offset
        self._start = aligned(len(self._header)) + 2 * self._record_bytes
        self._written: dict[str, list[tuple[int, Future[int]]]] = {}
        self._letting_go = threading.Condition()
        self._held: list[Version] = []
        self.pool = PagePool()
        self._blocks = self._open(path)

    @property
    def path(self) -> Path:
        """Of the file."""
        return self._blocks.path

    @property
    def blocks(self) -> BlockFile:
        """The file, block by block."""
        return self._blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._start + 2 * self._copy_bytes

    @property
    def array_bytes(self) -> int:
        """Bytes of the arrays, once."""
        return sum(extent.nbytes for extent in self._extents.values())

    def is_of(self, sizes: Mapping[str, int]) -> bool:
        """Whether the file has these arrays."""
        return sizes == {name: extent.nbytes for name, extent in self._extents.items()}

    def nbytes_of(self, name: str) -> int:
        """Return the bytes of an array."""
        return self._extents[name].nbytes

    def check(self) -> None:
        """Check that the file is there.

        Raises:
          DamagedStateError: it was removed, or another has its place.
        """
        if not self._blocks.is_there:
            raise DamagedStateError(
                f"{self.path} was removed or replaced while a step's state is in it; nothing of it "
                "can be found again when this process ends: restore a checkpoint"
            )

    def read(self, name: str, version: Version, into: np.ndarray | None = None) -> Reading:
        """Begin to read an array, in the version that is in force or one that is held.

        Args:
          name: of the array.
          version: of it.
          into: uint8[its bytes, aligned], which begins a page; pages of the pool if None.
        """
        extent = self._extents[name]
        into = self.pool.take(extent.nbytes) if into is None else into
        where = self._offset(extent, version.copies[self._order[name]])
        parts = [
            (i, self._blocks.read(where + start, into[start : start + aligned(nbytes)], nbytes))
            for i, start, nbytes in extent.blocks
        ]
        return Reading(self.path, name, into[: extent.nbytes], parts, version.sums)

    def write(self, name: str, data: np.ndarray) -> list[Future[int]]:
        """Begin to write an array's next version: contiguous, of as many bytes as its size says."""
        extent = self._extents[name]
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        assert flat.nbytes == extent.nbytes, (name, flat.nbytes, extent.nbytes)
        where = self._offset(extent, 1 - self.version.copies[self._order[name]])
        parts = [
            (i, self._blocks.write(where + start, flat[start : start + nbytes]))
            for i, start, nbytes in extent.blocks
        ]
        self._written[name] = parts
        return [future for _, future in parts]

    def commit(self) -> None:
        """Put in force, all at once, what was written since the last time; other arrays stay.

        Raises:
          OSError: something could not be written; then nothing changes.
        """
        written = self._written
        self.abandon()  # all has ended then, also where a part fails: the next step writes there
        number = self.version.number + 1
        copies, sums = self.version.copies.copy(), self.version.sums.copy()
        for name, parts in written.items():
            for i, future in parts:
                sums[i] = future.result()
            copies[self._order[name]] ^= 1
        body = copies.tobytes() + sums.tobytes()
        record = _RECORD.pack(number, len(body)) + body
        record += _SUM.pack(checksum(record))
        self._blocks.write_now(self._record_offset(number), record)
        self.version = Version(number, copies, sums)

    def abandon(self) -> None:
        """Forget what was written since the last time, when all of it has ended."""
        written, self._written = self._written, {}
        for parts in written.values():
            for _, future in parts:
                future.exception()

    def hold(self, version: Version) -> None:
        """Keep a version from being written over, until it is let go."""
        with self._letting_go:
            self._held.append(version)

    def let_go(self, version: Version) -> None:
        """End what `hold` began."""
        with self._letting_go:
            self._held.remove(version)
            self._letting_go.notify_all()

    def can_read(self, version: Version) -> bool:
        """Whether a version is in force or held."""
        return version is self.version or version in self._held

    def wait_for_readers(self) -> None:
        """Wait until nobody holds an older version than that in force: it is written over next."""
        with self._letting_go:
            self._letting_go.wait_for(lambda: all(v is self.version for v in self._held))

    def close(self) -> None:
        """Let go of the file."""
        self._blocks.close()

    def _offset(self, extent: _Extent, copy: int) -> int:
        return self._start + int(copy) * self._copy_bytes + extent.offset

    def _record_offset(self, number: int) -> int:
        return aligned(len(self._header)) + number % 2 * self._record_bytes

    def _open(self, path: Path) -> BlockFile:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            known = path.exists()
            blocks = BlockFile(path, create=True)
        except BlockingIOError as error:
            raise ValueError(
                f"{path} is in use by another process; give each run its own Offload(path=...)"
            ) from error
        except OSError as error:
            raise ValueError(
                f"the state cannot be kept in {path}: {error.strerror}; give a folder that can be "
                "written as Offload(path=...)"
            ) from error
        try:
            head = blocks.read_now(0, len(self._header)) if known else b""
            if head == self._header and blocks.size == self.nbytes:
                self._find_version(blocks)
            elif any(head):
                raise another_state(path)
            else:  # new, or never made to the end
                self._create(blocks)
        except BaseException:
            blocks.close()
            if not known:
                path.unlink(missing_ok=True)
            raise
        return blocks

    def _create(self, blocks: BlockFile) -> None:
        room = shutil.disk_usage(blocks.path.parent).free + blocks.size
        try:
            if room < self.nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            blocks.allocate(self.nbytes)
        except OSError as error:
            raise ValueError(
                f"the state needs {self.nbytes:,} bytes in {blocks.path.parent}, two versions of "
                f"{self.array_bytes:,}, and {room:,} are free ({error.strerror}); make room, "
                "offload less (ratio), or give another folder as Offload(path=...)"
            ) from error
        # No record of another state may hold.
        for number in (0, 1):
            blocks.write_now(self._record_offset(number), bytes(ALIGNMENT))
        blocks.write_now(0, self._header)

    def _find_version(self, blocks: BlockFile) -> None:
        """Take the newer of the two records that are whole."""
        empty = self.version
        body = empty.copies.nbytes + empty.sums.nbytes
        for slot in (0, 1):
            record = blocks.read_now(self._record_offset(slot), _RECORD.size + body + _SUM.size)
            number, nbytes = _RECORD.unpack_from(record)
            (total,) = _SUM.unpack(record[-_SUM.size :])
            is_whole = nbytes == body and checksum(record[: -_SUM.size]) == total
            if is_whole and number > self.version.number:
                copies = np.frombuffer(record, np.uint8, empty.copies.size, _RECORD.size)
                start = _RECORD.size + empty.copies.nbytes
                sums = np.frombuffer(record, np.uint64, empty.sums.size, start)
                self.version = Version(number, copies, sums)


def another_state(path: Path) -> ValueError:
    """Return the error that says that a file is not the one that was expected."""
    return ValueError(
        f"{path} holds another state: of another model, optimizer or mesh, or of no zeroxla; "
        "delete it, or give another folder as Offload(path=...)"
    )
