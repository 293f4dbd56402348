"""`Version`: the record that puts a version of a state file in force, and its bytes in the file.

A record has these fields, one after another:

    number | bytes of copies and sums | copy of each array | sum of each block | sum of it all
"""

from __future__ import annotations

import dataclasses
import struct

import numpy as np

from zeroxla.offload.disk.block_file import checksum

_HEAD = struct.Struct("<QI")  # number of the version, bytes of copies and sums
_SUM = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Version:
    """The content of a record.

    Attributes:
      number: the version's number, counted from 1; 0 if none was ever put in force.
      copies: for each array, which of its two copies belongs to the version: uint8, 0 or 1.
      sums: the checksums of all blocks, uint64.
    """

    number: int
    copies: np.ndarray
    sums: np.ndarray

    @staticmethod
    def none(num_arrays: int, num_blocks: int) -> Version:
        """Return the version of a file in which none was ever put in force."""
        return Version(0, np.zeros(num_arrays, np.uint8), np.zeros(num_blocks, np.uint64))

    @property
    def record_bytes(self) -> int:
        """The number of bytes of the record, the same for all versions of a file."""
        return _HEAD.size + self.copies.nbytes + self.sums.nbytes + _SUM.size

    def record(self) -> bytes:
        """Return the record as bytes."""
        body = self.copies.tobytes() + self.sums.tobytes()
        record = _HEAD.pack(self.number, len(body)) + body
        return record + _SUM.pack(checksum(record))

    def from_record(self, record: bytes) -> Version | None:
        """Return the version that a record of the same file holds; None if the record is
        damaged."""
        number, nbytes = _HEAD.unpack_from(record)
        (total,) = _SUM.unpack(record[-_SUM.size :])
        if _HEAD.size + nbytes + _SUM.size != self.record_bytes:
            return None
        if checksum(record[: -_SUM.size]) != total:
            return None
        copies = np.frombuffer(record, np.uint8, self.copies.size, _HEAD.size)
        start = _HEAD.size + self.copies.nbytes
        return Version(number, copies, np.frombuffer(record, np.uint64, self.sums.size, start))
