"""Writes the rows of Parquet files as JSON lines, from which single rows can be read.

Parquet stores columns in groups of rows, often of a million. To read one row is to unpack a group,
so rows in random order would unpack each group again and again. The columns that training reads are
therefore written once into a temporary file, a row a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from zeroxla.cli.data.bad_rows import RowError
from zeroxla.cli.data.foreign_rows import FOREIGN_KEYS, can_hold_rows, no_columns
from zeroxla.cli.data.row_kinds import KEYS
from zeroxla.program.extras import extra

_BATCH = 256  # rows that are in memory at a time
_BUFFER_BYTES = 1 << 20  # of a column that is read at a time


def parquet_lines(path: Path, file: IO[bytes]) -> Iterator[tuple[int, bytes | RowError]]:
    """Yield the rows of a Parquet file, from number 1, as lines of JSON.

    Only columns that rows can have are read. A field of a struct that is null is left out: all rows
    of a column have the same fields, so null is how Parquet says that a row lacks one. A null in an
    array stays.

    Args:
      path: the file's name, for messages.
      file: the open file.

    Raises:
      ImportError: pyarrow is not installed.
      ValueError: the file cannot be read, or its columns hold no rows.

    Cost: memory for 256 rows and for a buffer of 1 MiB a column.
    """
    with extra("parquet", "Parquet files need"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        with pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False) as opened:
            names = opened.schema_arrow.names
            if not can_hold_rows(names):
                raise ValueError(f"{path}: {no_columns(names)}")
            columns = [name for name in names if name in (*KEYS, *FOREIGN_KEYS)]
            batches = opened.iter_batches(_BATCH, columns=columns, use_threads=False)
            rows = (row for part in batches for row in part.to_pylist(maps_as_pydicts="lossy"))
            for number, row in enumerate(rows, 1):
                try:
                    line = json.dumps(_there(row), ensure_ascii=False, default=_plain).encode()
                    yield number, line + b"\n"
                except UnicodeError as error:
                    yield number, RowError(f"the row is no UTF-8 ({error})")
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"cannot read {path} as a Parquet file: {error}") from error


def _there(value: Any) -> Any:
    """Return a value without the fields of structs that are null, at any depth."""
    if isinstance(value, dict):
        return {key: _there(x) for key, x in value.items() if x is not None}
    return [_there(x) for x in value] if isinstance(value, list) else value


def _plain(value: Any) -> str:
    """Return a value that JSON does not have as text: bytes are taken to be UTF-8."""
    return value.decode() if isinstance(value, bytes) else str(value)
