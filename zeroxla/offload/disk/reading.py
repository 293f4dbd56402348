"""`Reading`: an array of a `StateFile` on its way, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np


class DamagedStateError(RuntimeError):
    """A state on disk is not what was written."""


class Reading:
    """An array that is being read."""

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
        """Of the array."""
        return self._data.nbytes

    def wait(self) -> None:
        """Wait until it is read, or cannot be."""
        for _, future in self._parts:
            future.exception()

    def result(self) -> np.ndarray:
        """Wait; return uint8 of the array's bytes, which nothing else uses.

        Raises:
          DamagedStateError: the bytes are not those that were written.
          OSError: they cannot be read.
        """
        for i, future in self._parts:
            if future.result() != self._sums[i]:
                raise DamagedStateError(
                    f"{self._name} in {self._path} is not what was written (checksum of block "
                    f"{i}): the disk or another program changed it; restore a checkpoint"
                )
        return self._data
