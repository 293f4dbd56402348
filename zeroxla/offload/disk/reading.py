"""`Reading`: an array of a `StateFile` that is being read, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np


class DamagedStateError(RuntimeError):
    """A state on disk differs from what was written, or its file is gone."""


class Reading:
    """An array that is being read.

    Args:
      path: the file's path, for messages.
      name: the array's name, for messages.
      data: the memory that is read into, uint8.
      parts: the number of each block, and the future of its checksum.
      sums: the expected checksums of all blocks of the file.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        data: np.ndarray,
        parts: Sequence[tuple[int, Future[int]]],
        sums: np.ndarray,
    ) -> None:
        self._path, self._name = path, name
        self._data, self._parts, self._sums = data, parts, sums

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self._data.nbytes

    def wait(self) -> None:
        """Wait until all blocks are read or have failed. Raises nothing."""
        for _, future in self._parts:
            future.exception()

    def result(self) -> np.ndarray:
        """Wait, and return the array's bytes as uint8. Nothing else uses this memory.

        Raises:
          DamagedStateError: the bytes differ from those that were written.
          OSError: the bytes cannot be read.
        """
        for i, future in self._parts:
            if future.result() != self._sums[i]:
                raise DamagedStateError(
                    f"{self._name} in {self._path} is not what was written (checksum of block "
                    f"{i}): the disk or another program changed it; restore a checkpoint"
                )
        return self._data
