"""`open_rows`: the rows of a file of any form, each as JSON at a place from which it can be read
again.

| the file's form | where a row is read from |
|---|---|
| JSON lines, JSON arrays, JSON objects one after the other | the file itself |
| CSV and TSV with a header, Parquet | a temporary file of JSON lines |
| any of them compressed | a temporary file: unpacked, or of JSON lines |

So memory does not grow with the files. In a table or a compressed file no place can be read without
all that comes before it; for these a temporary file is written once.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from zeroxla.cli.data.bad_rows import RowError
from zeroxla.cli.data.file_kinds import SNIFFED_BYTES, wrong_kind
from zeroxla.cli.data.foreign_rows import FOREIGN_KEYS, can_hold_rows, no_columns
from zeroxla.cli.data.parquet import parquet_lines
from zeroxla.cli.data.row_kinds import KEYS
from zeroxla.program.extras import extra

FORMS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet")
"""The suffixes of files with rows. Of these .jsonl, .json and .ndjson are told apart by content."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
"""The suffixes that may follow them."""
MAX_ROW_BYTES = 64 << 20
"""A longer row is a bad one: most likely the file has no lines."""

Place = tuple[int, int, "bytes | RowError"]
"""The offset of a row, its number from 1, and its JSON or what is wrong with it."""

_CHUNK = 1 << 20
_SPACE = re.compile(r"[ \t\n\r]*")
_DELIMITERS = {".csv": (",", ";", "\t", "|"), ".tsv": ("\t",)}


@dataclass(frozen=True, slots=True)
class OpenRows:
    """The rows of an open file.

    Attributes:
      file: holds the JSON of each row at its offset, once the row has been yielded.
      rows: yields the rows in their order.
      by_line: whether a row's number is that of its line.
    """

    file: IO[bytes]
    rows: Iterator[Place]
    by_line: bool


def form_of(path: Path) -> tuple[str, str] | None:
    """Return the suffixes of a file with rows: of its form, and of its compression or "". None if
    it holds none, by its name.

    >>> form_of(Path("chat.jsonl.gz"))
    ('.jsonl', '.gz')
    >>> form_of(Path("novel.txt"))
    """
    *_, form, last = ("", *(suffix.lower() for suffix in ("", *path.suffixes)))
    if last in FORMS:
        return last, ""
    return (form, last) if form in FORMS and last in COMPRESSIONS else None


def checked_form(path: Path) -> tuple[str, str]:
    """Return the suffixes of a file with rows; see `form_of`.

    Raises:
      ValueError: it has others.
    """
    found = form_of(path)
    if found is None:
        raise ValueError(
            f"{path} ends with {path.suffix or 'no suffix'}; rows are read from files that end "
            f"with {', '.join(FORMS)}, and with {', '.join(COMPRESSIONS)} after it: rename or "
            "unpack it"
        )
    return found


def open_rows(path: Path, keep: Callable[[IO[bytes] | None], IO[bytes]]) -> OpenRows:
    """Open a file of rows.

    Args:
      path: the file. Its suffixes say its form; see `form_of`.
      keep: takes a file that is to be open as long as rows are read, and returns it; for None it
        makes a temporary one.

    Raises:
      ValueError: the file cannot be read, is damaged, or is of another kind than its name says.
      ImportError: a package that its form needs is not installed.

    Cost: temporary files as large as the rows, where rows cannot be read from the file itself.
    """
    form, compression = checked_form(path)
    try:
        file = keep(path.open("rb", buffering=_CHUNK))
        if compression:
            file = _unpacked(path, file, compression, keep(None))
        head = file.read(SNIFFED_BYTES)
    except OSError as error:
        raise ValueError(
            f"cannot read {path}: {error.strerror or error}; correct the path"
        ) from error
    file.seek(0)
    kind = wrong_kind(head)
    if form == ".parquet":
        if kind is not None and not head.startswith(b"PAR1"):
            raise ValueError(f"cannot read {path} as a Parquet file: it is {_named(kind, path)}")
        return _written(parquet_lines(path, file), keep(None))
    if kind is not None:
        raise ValueError(f"{path} is {_named(kind, path)}")
    if form in _DELIMITERS:
        return _written(_table_lines(path, file, form), keep(None))
    begin = 3 if head.startswith(codecs.BOM_UTF8) else 0
    is_array = head[begin:].lstrip(b" \t\r\n").startswith(b"[")
    if is_array or _spans_lines(file, begin):
        return OpenRows(file, json_values(path, file, begin), by_line=False)
    return OpenRows(file, numbered_lines(file, begin), by_line=True)


def row_place(path: Path, number: int, *, by_line: bool) -> str:
    """Return the file and the line, or the number, of a row, for people."""
    return f"{path}:{number}" if by_line else f"{path}: row {number}"


def numbered_lines(file: IO[bytes], begin: int = 0) -> Iterator[Place]:
    """Yield the lines of a file that are not blank, from an offset on. Of a line that is too long
    its error comes."""
    file.seek(begin)
    offset, number = begin, 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        length = len(line)
        if length > MAX_ROW_BYTES:
            yield offset, number, RowError(f"the line is longer than {MAX_ROW_BYTES >> 20} MiB")
        elif line.strip():
            yield offset, number, line
        while len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_ROW_BYTES + 1)
            length += len(line)
        offset += length


def json_values(path: Path, file: IO[bytes], begin: int = 0) -> Iterator[Place]:
    """Yield the values of a JSON array, or those that follow each other without one, wherever their
    lines end.

    The file is read a piece at a time; a value is in memory while it is read.

    Raises:
      ValueError: the JSON breaks; with the row and the byte.
    """
    file.seek(begin)
    text = _Text(file, begin)
    is_array = text.next() == "["
    if is_array:
        text.skip(1)
    number = 0
    while (after := text.next()) and not (is_array and after == "]"):
        number += 1
        try:
            value = text.value()
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(
                f"{path}: its JSON breaks in row {number}, which begins at byte {text.offset:,}: "
                f"{error.msg if isinstance(error, json.JSONDecodeError) else 'too deep'}. The file "
                "may be cut short; download or write it anew"
            ) from error
        yield text.offset, number, value
        text.skip(len(value), value.decode(errors="surrogateescape"))
        if is_array:
            after = text.next()
            if after == ",":
                text.skip(1)
            elif after:
                break
    if is_array:
        if after != "]":
            raise ValueError(
                f"{path}: its JSON array {'breaks' if after else 'ends'} after row {number}, at "
                f"byte {text.offset:,}; the file may be cut short: download or write it anew"
            )
        text.skip(1)
        if text.next():
            raise ValueError(
                f"{path}: something follows its JSON array at byte {text.offset:,}. If each line "
                'is an array of messages, make it an object: {"messages": [...]}'
            )


class _Text:
    """A file as text, of which a piece is in memory.

    Bytes that are no UTF-8 stay as they are, so that only their row is bad.
    """

    def __init__(self, file: IO[bytes], offset: int) -> None:
        self._file, self.offset = file, offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._scan = json.JSONDecoder().raw_decode
        self._text, self._at, self._ended = "", 0, False

    def next(self) -> str:
        """Return the next character that is no space, which comes next; "" at the end."""
        while True:
            end = _SPACE.match(self._text, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
            self.offset += end - self._at
            self._at = end
            if end < len(self._text):
                return self._text[end]
            if not self._more():
                return ""

    def value(self) -> bytes:
        """Return the JSON of the value that comes next.

        Raises:
          JSONDecodeError: it is none.
        """
        while True:
            try:
                _, end = self._scan(self._text, self._at)
                # A number may go on in the next piece.
                if end < len(self._text) or not self._more():
                    return self._text[self._at : end].encode(errors="surrogateescape")
            except json.JSONDecodeError:
                if len(self._text) - self._at > MAX_ROW_BYTES or not self._more():
                    raise

    def skip(self, num_bytes: int, text: str = "") -> None:
        """Pass over some bytes, which are this text, or one character."""
        self.offset += num_bytes
        self._at += len(text) or 1

    def _more(self) -> bool:
        """Read on, twice as much as there is; return whether there is something."""
        if self._ended:
            return False
        self._text = self._text[self._at :]
        self._at = 0
        piece = self._file.read(max(_CHUNK, len(self._text)))
        self._ended = not piece
        self._text += self._decoder.decode(piece, final=self._ended)
        return True


def _spans_lines(file: IO[bytes], begin: int) -> bool:
    """Return whether the first JSON object of a file goes on after its line."""
    file.seek(begin)
    while not (line := file.readline(MAX_ROW_BYTES)).strip():
        if not line:
            return False
    text = line.decode(errors="surrogateescape").rstrip()
    try:
        json.JSONDecoder().raw_decode(text.lstrip())
        return False
    except RecursionError:
        return False
    except json.JSONDecodeError as error:
        if error.pos < len(text.lstrip()):
            return False  # what is wrong is inside of the line
    more = text + "\n" + file.read(_CHUNK).decode(errors="surrogateescape").rstrip()
    try:
        json.JSONDecoder().raw_decode(more.lstrip())
        return True
    except RecursionError:
        return False
    except json.JSONDecodeError as error:  # or the piece that was read ends in it
        return error.pos >= len(more.lstrip()) or error.msg.startswith("Unterminated string")


def _written(lines: Iterable[tuple[int, bytes | RowError]], file: IO[bytes]) -> OpenRows:
    """Return rows that are written into a file while they are yielded."""

    def rows() -> Iterator[Place]:
        offset = 0
        for number, line in lines:
            if isinstance(line, RowError):
                yield 0, number, line
                continue
            file.write(line)
            yield offset, number, line
            offset += len(line)
        file.flush()

    return OpenRows(file, rows(), by_line=False)


def _table_lines(path: Path, file: IO[bytes], form: str) -> Iterator[tuple[int, bytes | RowError]]:
    """Yield the rows of a CSV or TSV file with a header as lines of JSON. Empty cells are absent.

    Raises:
      ValueError: the header names no columns of rows, or the file is no such table.
    """
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    # The module's own limit is 128 kB a cell, and one for the process.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_BYTES))
    try:
        first = text.readline(MAX_ROW_BYTES)
        text.seek(0)
        delimiter, header = _header(path, first, _DELIMITERS[form])
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        next(reader)
        number = 0
        for number, cells in enumerate(filter(None, reader), 1):
            if len(cells) != len(header):
                said = f"the row has {len(cells)} cells, and the header {len(header)}"
                yield number, RowError(f'{said}; put cells with {delimiter!r} inside into "..."')
                continue
            row = {name: cell for name, cell in zip(header, cells) if cell}
            if "prompt" in header and ("response" in row or "completion" in row):
                row.setdefault("prompt", "")  # a pair may have an empty prompt
            yield number, json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except csv.Error as error:
        raise ValueError(
            f"{path} is no {form[1:].upper()} near line {reader.line_num}: {error}; write it anew, "
            'with cells in "..." and "" for a quotation mark'
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no UTF-8 ({error.reason}); convert it: iconv -f LATIN1 -t UTF-8 FILE > NEW"
        ) from error
    finally:
        text.detach()


def table_suffix(head: bytes) -> str | None:
    """Return the suffix of a table of rows that begins with these bytes; None if it is none.

    >>> table_suffix(b"prompt,response\\n")
    '.csv'
    >>> table_suffix(b"text\\n")
    """
    lines = head.removeprefix(codecs.BOM_UTF8).decode(errors="replace").splitlines()[:1]
    for delimiter in _DELIMITERS[".csv"]:
        names = [x.strip().strip('"') for line in lines for x in line.split(delimiter)]
        if len(names) > 1 and {*names} <= {*KEYS, *FOREIGN_KEYS} and can_hold_rows(names):
            return ".tsv" if delimiter == "\t" else ".csv"
    return None


def _header(path: Path, line: str, delimiters: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return the delimiter of a table and the names of its columns."""
    names: list[str] = []
    for delimiter in delimiters:
        with contextlib.suppress(csv.Error, StopIteration):
            found = [x.strip() for x in next(csv.reader([line], delimiter=delimiter))]
            if can_hold_rows(tuple(found)):
                return delimiter, found
            names = names or found
    raise ValueError(f"{path}: {no_columns(names)}")


def _unpacked(path: Path, packed: IO[bytes], compression: str, into: IO[bytes]) -> IO[bytes]:
    """Unpack a file into another, and return that one."""
    import bz2
    import gzip
    import lzma
    import zlib

    head = packed.read(SNIFFED_BYTES)
    packed.seek(0)
    kind = wrong_kind(head)
    if kind is None or not kind.endswith(compression):
        raise ValueError(f"{path} is {_named(kind or 'not compressed; rename it', path)}")
    opened: Any
    if compression == ".zst":
        with extra("parquet", "files of Zstandard need", "; or unpack it (zstd -d)"):
            import pyarrow as pa
        opened = pa.input_stream(packed, compression="zstd")
    else:
        opened = {".gz": gzip, ".bz2": bz2, ".xz": lzma}[compression].open(packed, "rb")
    try:
        while piece := opened.read(_CHUNK):
            into.write(piece)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(
            f"{path} is cut short or damaged ({error}); download or write it anew"
        ) from error
    into.flush()
    into.seek(0)
    return into


def _named(kind: str, path: Path) -> str:
    return kind.replace("FILE", str(path))
