"""`StateFile`: a process's arrays in one file. A step never destroys the state before it.

The file has room for two copies of every array. A step writes the copies that are not in force, and
then, in one block, a record that puts them in force (see `versions`): it names the copy of each
array and the checksum of each block. There is room for two records too, and they are written in
turn. The record with the higher number holds, unless its own checksum is wrong. A record is written
once everything that it names is on the disk. So at every moment one whole state is in force.

    header | record 0 | record 1 | copy 0 of all arrays | copy 1 of all arrays
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
from zeroxla.offload.disk.versions import Version

FORMAT = "zeroxla state 2"


@dataclasses.dataclass(frozen=True, slots=True)
class _Location:
    """The place of an array: its offset within a copy of all arrays, its size, and the position of
    its first block among all blocks."""

    offset: int
    nbytes: int
    first_block: int

    @property
    def blocks(self) -> list[tuple[int, int, int]]:
        """For each block, (position among all blocks, offset within the array, bytes)."""
        starts = range(0, self.nbytes, BLOCK_BYTES)
        return [
            (self.first_block + i, start, min(BLOCK_BYTES, self.nbytes - start))
            for i, start in enumerate(starts)
        ]


class FileInUseError(ValueError):
    """Another process has the file open."""


class StateFile:
    """Arrays of bytes in one file, each with a name.

    Attributes:
      version: the version that is in force.
      pool: the memory that arrays are read into. Clear it after a series of reads.
    """

    def __init__(self, path: Path, sizes: Mapping[str, int]) -> None:
        """Open the file, or make it if there is none.

        Args:
          path: the file's path. Its folder is made if missing.
          sizes: the bytes of each array, by its name.

        Raises:
          FileInUseError: another process has the file open.
          ValueError: the folder cannot be written, the disk has too little room, or the file holds
            something else.
        """
        self._locations: dict[str, _Location] = {}
        offset = blocks = 0
        for name, nbytes in sizes.items():
            location = self._locations[name] = _Location(offset, nbytes, blocks)
            offset, blocks = offset + aligned(nbytes), blocks + len(location.blocks)
        header = json.dumps({"format": FORMAT, "arrays": dict(sizes)}).encode()
        self._header = struct.pack("<IQ", len(header), checksum(header)) + header
        self.version = Version.none(len(sizes), blocks)
        self._order = {name: i for i, name in enumerate(sizes)}
        self._record_bytes = aligned(self.version.record_bytes)
        self._copy_bytes = offset
        self._start = aligned(len(self._header)) + 2 * self._record_bytes
        self._written: dict[str, list[tuple[int, Future[int]]]] = {}
        self._released = threading.Condition()
        self._held_versions: list[Version] = []
        self.pool = PagePool()
        self._blocks = self._open(path)

    @property
    def path(self) -> Path:
        """The file's path."""
        return self._blocks.path

    @property
    def blocks(self) -> BlockFile:
        """The file as blocks."""
        return self._blocks

    @property
    def nbytes(self) -> int:
        """The file's size in bytes."""
        return self._start + 2 * self._copy_bytes

    @property
    def array_bytes(self) -> int:
        """Bytes of all arrays, each counted once."""
        return sum(location.nbytes for location in self._locations.values())

    @property
    def names(self) -> list[str]:
        """The names of the arrays."""
        return list(self._locations)

    def is_of(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the file has exactly these arrays."""
        return sizes == {name: location.nbytes for name, location in self._locations.items()}

    def nbytes_of(self, name: str) -> int:
        """Return the size of an array in bytes."""
        return self._locations[name].nbytes

    def offset_of(self, name: str, version: Version) -> int:
        """Return where an array begins in the file, in a version that is in force or held."""
        return self._offset(self._locations[name], version.copies[self._order[name]])

    def check(self) -> None:
        """Check that the file is there.

        Raises:
          DamagedStateError: the file was removed, or another one is in its place.
        """
        if not self._blocks.is_there:
            raise DamagedStateError(
                f"{self.path} was removed or replaced while a step's state is in it; nothing of it "
                "can be found again when this process ends: restore a checkpoint"
            )

    def read(self, name: str, version: Version, into: np.ndarray | None = None) -> Reading:
        """Begin to read an array, in the version that is in force or one that is held.

        Args:
          name: the array's name.
          version: the version to read.
          into: the memory to read into: uint8[its bytes, aligned] that begins at a page. None takes
            pages of the pool.
        """
        location = self._locations[name]
        into = self.pool.take(location.nbytes) if into is None else into
        where = self.offset_of(name, version)
        parts = [
            (i, self._blocks.read(where + start, into[start : start + aligned(nbytes)], nbytes))
            for i, start, nbytes in location.blocks
        ]
        return Reading(self.path, name, into[: location.nbytes], parts, version.sums)

    def write(self, name: str, data: np.ndarray) -> list[Future[int]]:
        """Begin to write the next version of an array, from data of the array's size in bytes."""
        location = self._locations[name]
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        assert flat.nbytes == location.nbytes, (name, flat.nbytes, location.nbytes)
        where = self._offset(location, 1 - self.version.copies[self._order[name]])
        parts = [
            (i, self._blocks.write(where + start, flat[start : start + nbytes]))
            for i, start, nbytes in location.blocks
        ]
        self._written[name] = parts
        return [future for _, future in parts]

    def commit(self) -> None:
        """Put everything that was written since the last commit in force, all at once. Arrays that
        were not written keep their version.

        Raises:
          OSError: something could not be written. Then nothing changes.
        """
        written = self._written
        self.abandon()  # waits for all writes, even if one fails: the next step writes there
        copies, sums = self.version.copies.copy(), self.version.sums.copy()
        for name, parts in written.items():
            for i, future in parts:
                sums[i] = future.result()
            copies[self._order[name]] ^= 1
        version = Version(self.version.number + 1, copies, sums)
        self._blocks.write_now(self.record_offset(version.number), version.record())
        self.version = version

    def abandon(self) -> None:
        """Wait for the writes since the last commit, and forget them."""
        written, self._written = self._written, {}
        for parts in written.values():
            for _, future in parts:
                future.exception()

    def hold(self, version: Version) -> None:
        """Keep a version from being written over until `let_go`."""
        with self._released:
            self._held_versions.append(version)

    def let_go(self, version: Version) -> None:
        """Allow a version that was held to be written over."""
        with self._released:
            self._held_versions.remove(version)
            self._released.notify_all()

    def can_read(self, version: Version) -> bool:
        """Return whether a version is in force or held, so that it can be read."""
        return version is self.version or version in self._held_versions

    def wait_for_readers(self) -> None:
        """Wait until no one holds a version older than the one in force: its copies are written
        next."""
        with self._released:
            self._released.wait_for(lambda: all(v is self.version for v in self._held_versions))

    def close(self) -> None:
        """Close the file."""
        self._blocks.close()

    def _offset(self, location: _Location, copy: int) -> int:
        return self._start + int(copy) * self._copy_bytes + location.offset

    def record_offset(self, number: int) -> int:
        """Return where the record of a version begins in the file, given the version's number."""
        return aligned(len(self._header)) + number % 2 * self._record_bytes

    def _open(self, path: Path) -> BlockFile:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            known = path.exists()
            blocks = BlockFile(path, create=True)
        except BlockingIOError as error:
            raise FileInUseError(
                f"{path} is in use by another process; give this one another file"
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
                raise ValueError(
                    f"{path} holds another state: of another model, optimizer or mesh, or of no "
                    "zeroxla; give this one another file"
                )
            else:  # the file is new, or was never completed
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
        # A record of an earlier state must not count.
        for number in (0, 1):
            blocks.write_now(self.record_offset(number), bytes(ALIGNMENT))
        blocks.write_now(0, self._header)

    def _find_version(self, blocks: BlockFile) -> None:
        """Take the newest version whose record is undamaged."""
        none = self.version
        for slot in (0, 1):
            record = blocks.read_now(self.record_offset(slot), none.record_bytes)
            found = none.from_record(record)
            if found is not None and found.number > self.version.number:
                self.version = found
