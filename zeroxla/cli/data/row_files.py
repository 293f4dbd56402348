"""`RowFiles`: the rows of files, read one at a time at any place.

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

from zeroxla.cli.data.bad_rows import NUM_NAMED, BadRows, RowError
from zeroxla.cli.data.row_kinds import TrainingRow, kind_of, read_row, row_hash, side_hash
from zeroxla.cli.data.row_readers import FORMS, form_of, open_rows, row_place

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
      paths: files of JSON lines, JSON arrays, CSV, TSV or Parquet, compressed or not; `FORMS` and
        `COMPRESSIONS` of `row_readers` are their suffixes. Blank lines are skipped.
      bad: counts the rows that cannot be trained on. Its `check` is left to the caller, who may
        read more files.
      holdout: the share that is held out, between 0 and 1.

    Attributes:
      fingerprint: a hash of all good rows and their order.
      kinds: the number of good rows of each kind: {"Conversation": 3}.
      firsts: the file and the line of the first row of each kind.

    Raises:
      ValueError: a file is missing or unreadable, has another suffix or other contents than it
        says, none of its first rows is good, or fewer than two rows are good.
      ImportError: there is a file of Parquet or Zstandard, and pyarrow is not installed.

    Cost: one pass over the files. 32 bytes a row on disk, and for tables and compressed files the
    bytes of their rows as JSON; both in temporary files without names, which end with the process.
    The system may keep them in its page cache. Memory does not depend on the number of rows.
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
        self._by_line: list[bool] = []
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
        return self._place(int(place["file"]), int(place["line"]))

    def _place(self, file: int, number: int) -> str:
        return row_place(self.paths[file], number, by_line=self._by_line[file])

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
                self.firsts.setdefault(kind, self._place(number, place[3]))
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
        opened = open_rows(path, self._kept)
        self._files.append(opened.file)
        self._by_line.append(opened.by_line)
        # The bad rows before the first good one. If there is none, the file is of another kind,
        # which is said once, and not row by row.
        begin: list[tuple[str, str]] | None = []
        for offset, row_number, line in opened.rows:
            self._bad.rows += 1
            try:
                if isinstance(line, RowError):
                    raise line
                row = read_row(line)
                digest, side = row_hash(row), int.from_bytes(side_hash(row), "big")
            except RowError as error:
                place = self._place(number, row_number)
                if begin is None:
                    self._bad.add(place, str(error))
                else:
                    begin.append((place, str(error)))
                    if len(begin) == NUM_NAMED:
                        self._none_is_good(path, begin)
                        begin = None
                continue
            for found in begin or ():
                self._bad.add(*found)
            begin = None
            yield (offset, len(line), number, row_number, side), kind_of(row), digest
        if begin:
            self._none_is_good(path, begin)

    def _none_is_good(self, path: Path, begin: list[tuple[str, str]]) -> None:
        """Count the first rows of a file, which are all bad.

        Raises:
          ValueError: there are several, and not all rows may be bad.
        """
        if len(begin) > 1 and self._bad.limit < 1:
            (place, reason), reasons = begin[0], {reason for _, reason in begin}
            raise ValueError(
                f"{path}: none of its first {len(begin)} rows can be trained on, so it is of "
                f"another kind than its name says, or its rows have other keys. {place}: {reason}"
                + (f"; and {len(reasons) - 1} other reasons" if len(reasons) > 1 else "")
                + ". docs/data.md has the kinds of rows"
            )
        for found in begin:
            self._bad.add(*found)

    def _kept(self, file: IO[bytes] | None) -> IO[bytes]:
        """Keep a file open as long as rows may be read; for None make a temporary one."""
        if file is None:
            return self._temporary()
        self._opened.append(file)
        return file

    def _temporary(self) -> IO[bytes]:
        """Return a new file without a name. It is open as long as its rows may be read."""
        file = tempfile.TemporaryFile(buffering=_BUFFER_BYTES)  # noqa: SIM115
        self._opened.append(file)
        return file


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
    kinds = {str(path): form_of(Path(path)) is not None for path in paths}
    if len(set(kinds.values())) > 1:
        rows = next(name for name, is_rows in kinds.items() if is_rows)
        other = next(name for name, is_rows in kinds.items() if not is_rows)
        raise ValueError(
            f"{rows} holds rows and {other} does not; train on files of rows "
            f"({', '.join(FORMS)}), or on text"
        )
    return any(kinds.values())
