"""`RowFiles`: the rows of JSONL and Parquet files, read one at a time at any place.

The files are read once from beginning to end. Each row is checked, and its place goes into a table
on disk. Afterwards a row is read from its place. So memory does not grow with the files.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from zeroxla.cli.data.bad_rows import BadRows, RowError
from zeroxla.cli.data.parquet import parquet_lines
from zeroxla.cli.data.row_kinds import TrainingRow, kind_of, read_row, row_hash, side_hash

SUFFIXES = (".jsonl", ".json", ".parquet")
MAX_ROW_BYTES = 64 << 20
"""A longer line is a bad row: most likely the file has no lines."""

# Where a row is, and its `side_hash`.
_PLACE = np.dtype(
    [("offset", "<u8"), ("length", "<u4"), ("file", "<u4"), ("line", "<u8"), ("side", "<u8")]
)
_FLUSHED = 4096  # places that are gathered before they are written
_BUFFER_BYTES = 1 << 20


class RowFiles:
    """The good rows of some files, split into training and validation.

    A row is held out if its `side_hash` lies in the lowest `holdout` of the range of hashes; at
    least one row is, and at least one is not. So a row keeps its side when others come, and equal
    rows are on the same side, as are preferences with the same prompt.

    Args:
      paths: files with the suffix .jsonl or .json (a JSON object a line; blank lines are skipped)
        or .parquet.
      bad: counts the rows that cannot be trained on. Its `check` is left to the caller, who may
        read more files.
      holdout: the share that is held out, between 0 and 1.

    Attributes:
      fingerprint: a hash of all good rows and their order.
      kinds: the number of good rows of each kind: {"Conversation": 3}.
      firsts: the file and the line of the first row of each kind.

    Raises:
      ValueError: a file is missing or unreadable, has another suffix, or fewer than two rows are
        good.
      ImportError: there is a Parquet file, and pyarrow is not installed.

    Cost: one pass over the files. 32 bytes a row on disk, and for Parquet files the bytes of their
    rows as JSON; both in temporary files without names, which end with the process. The system may
    keep them in its page cache. Memory does not depend on the number of rows.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        bad: BadRows,
        holdout: float = 0.05,
    ) -> None:
        if not 0 < holdout < 1:
            raise ValueError(f"holdout={holdout} must lie between 0 and 1; 0.05 is usual")
        self.paths = [Path(path).expanduser() for path in paths]
        self._bad, self._holdout = bad, holdout
        self.kinds: dict[str, int] = {}
        self.firsts: dict[str, str] = {}
        self._digest = hashlib.blake2b(digest_size=16)
        self._files: list[IO[bytes]] = []
        self._opened: list[IO[bytes]] = []  # those too that are read no more
        weakref.finalize(self, _close, self._opened)
        tables = [self._temporary() for _ in range(2)]
        train, valid = self._scan(tables)
        names = ", ".join(map(str, self.paths))
        if len(train) + len(valid) < 2:
            found = next(iter(bad.found.items()), None)
            said = f" (bad: {found[0]}: {found[1]})" if found else ""
            raise ValueError(
                f"{names}: {len(train) + len(valid)} good rows{said}; give at least two, one to "
                "train on and one to hold out"
            )
        self._train, self._valid = train, valid
        self.fingerprint = self._digest.hexdigest()

    def __len__(self) -> int:
        """Return the number of rows to train on."""
        return len(self._train)

    @property
    def num_valid(self) -> int:
        """The number of rows that are held out."""
        return len(self._valid)

    def read(self, index: int, *, valid: bool = False) -> TrainingRow:
        """Read a row.

        Args:
          index: its number, from 0, among the rows to train on or among those held out.
          valid: whether it is one of those held out.

        Raises:
          RowError: the file has been changed since it was first read.
        """
        place = (self._valid if valid else self._train)[index]
        descriptor = self._files[int(place["file"])].fileno()
        line = os.pread(descriptor, int(place["length"]), int(place["offset"]))
        return read_row(line)

    def place(self, index: int, *, valid: bool = False) -> str:
        """Return the file and the line of a row, for people."""
        place = (self._valid if valid else self._train)[index]
        return row_place(self.paths[int(place["file"])], int(place["line"]))

    def num_bytes(self, index: int, *, valid: bool = False) -> int:
        """Return the bytes of a row's JSON."""
        return int((self._valid if valid else self._train)[index]["length"])

    def _scan(self, tables: list[IO[bytes]]) -> tuple[np.ndarray, np.ndarray]:
        """Read all files; return the tables of the rows to train on and of those held out."""
        buffers: tuple[list[Any], list[Any]] = ([], [])
        lengths = [0, 0]
        for number, path in enumerate(self.paths):
            for place, kind, digest in self._good_rows(number, path):
                self._digest.update(digest)
                self.kinds[kind] = self.kinds.get(kind, 0) + 1
                self.firsts.setdefault(kind, row_place(path, place[3]))
                side = int(place[4] < self._holdout * 2**64)
                lengths[side] += 1
                buffers[side].append(place)
                if len(buffers[side]) == _FLUSHED:
                    _flush(tables[side], buffers[side])
        for table, buffer in zip(tables, buffers):
            _flush(table, buffer)
        train, valid = map(_mapped, tables, lengths)
        if not len(valid) and len(train) > 1:
            moved = _few(train["side"] == train["side"].min())
            return train[~moved], train[moved]
        if not len(train) and len(valid) > 1:
            moved = _few(valid["side"] == valid["side"].max())
            return valid[moved], valid[~moved]
        return train, valid

    def _good_rows(
        self, number: int, path: Path
    ) -> Iterator[tuple[tuple[int, int, int, int, int], str, bytes]]:
        """Yield the place, the kind and the hash of each good row of a file; count the others."""
        for offset, line_number, line in numbered_lines(self._open(path)):
            if not line.strip():
                continue
            self._bad.rows += 1
            try:
                if len(line) > MAX_ROW_BYTES:
                    raise RowError(f"the line is longer than {MAX_ROW_BYTES >> 20} MiB")
                row = read_row(line)
                digest, side = row_hash(row), int.from_bytes(side_hash(row), "big")
            except RowError as error:
                self._bad.add(row_place(path, line_number), str(error))
                continue
            yield (offset, len(line), number, line_number, side), kind_of(row), digest

    def _open(self, path: Path) -> IO[bytes]:
        """Open a file of JSON lines: the file itself, or the rows of a Parquet file."""
        if path.suffix not in SUFFIXES:
            raise ValueError(
                f"{path} ends with {path.suffix or 'no suffix'}; rows are read from files that end "
                f"with {', '.join(SUFFIXES)}: rename or unpack it"
            )
        try:
            file: IO[bytes] = path.open("rb", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}; correct the path") from error
        self._opened.append(file)
        if path.suffix == ".parquet":
            file = self._temporary()
            file.writelines(parquet_lines(path))
            file.seek(0)
        self._files.append(file)
        return file

    def _temporary(self) -> IO[bytes]:
        """Return a new file without a name. It is open as long as its rows may be read."""
        file = tempfile.TemporaryFile(buffering=_BUFFER_BYTES)  # noqa: SIM115
        self._opened.append(file)
        return file


def numbered_lines(file: IO[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Yield the offset, the number from 1, and the bytes of each line. A line that is too long is
    cut behind the limit."""
    offset = 0
    if file.read(3) != b"\xef\xbb\xbf":  # a byte order mark
        file.seek(0)
    else:
        offset = 3
    number = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        length = len(line)
        yield offset, number, line
        while len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_ROW_BYTES + 1)
            length += len(line)
        offset += length


def row_place(path: Path, line: int) -> str:
    """Return the file and the line of a row, for people."""
    return f"{path}: row {line}" if path.suffix == ".parquet" else f"{path}:{line}"


def _few(moved: np.ndarray) -> np.ndarray:
    """Return the mask of rows that change sides: the first one alone, if it would be all."""
    if moved.all():
        moved[1:] = False
    return moved


def _flush(table: IO[bytes], buffer: list[Any]) -> None:
    table.write(np.array(buffer, _PLACE).tobytes())
    buffer.clear()


def _mapped(table: IO[bytes], length: int) -> np.ndarray:
    """Map a table's file into memory; the system holds it as long as the array lives."""
    with table:
        table.flush()
        if not length:
            return np.empty(0, _PLACE)
        return np.memmap(table, _PLACE, mode="r", shape=(length,))


def _close(files: Iterable[IO[bytes]]) -> None:
    for file in files:
        file.close()


def are_rows(paths: Iterable[str | os.PathLike[str]]) -> bool:
    """Return whether all files have a suffix of files with rows.

    Raises:
      ValueError: some have and some have not.
    """
    kinds = {str(path): Path(path).suffix in SUFFIXES for path in paths}
    if len(set(kinds.values())) > 1:
        rows = next(name for name, is_rows in kinds.items() if is_rows)
        other = next(name for name, is_rows in kinds.items() if not is_rows)
        raise ValueError(
            f"{rows} holds rows and {other} does not; train on files of rows "
            f"({', '.join(SUFFIXES)}), or on text"
        )
    return any(kinds.values())
