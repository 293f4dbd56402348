"""Writes the rows of Parquet files as JSON lines, from which single rows can be read.

Parquet stores columns in groups of rows, often of a million. To read one row is to unpack a group,
so rows in random order would unpack each group again and again. The columns that training reads are
therefore written once into a temporary file, a row a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from zeroxla.cli.data.row_kinds import KEYS
from zeroxla.program.extras import extra

_BATCH = 256  # rows that are in memory at a time
_BUFFER_BYTES = 1 << 20  # of a column that is read at a time


def parquet_lines(path: Path) -> Iterator[bytes]:
    """Yield the rows of a Parquet file as lines of JSON.

    Only the columns of `KEYS` are read. A file without any of them yields objects without keys.

    Raises:
      ImportError: pyarrow is not installed.
      ValueError: the file cannot be read.

    Cost: memory for 256 rows and for a buffer of 1 MiB a column.
    """
    with extra("parquet", "Parquet files need"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        with pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            columns = [name for name in file.schema_arrow.names if name in KEYS]
            for batch in file.iter_batches(_BATCH, columns=columns, use_threads=False):
                for row in batch.to_pylist():
                    yield json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n"
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"cannot read {path} as a Parquet file: {error}") from error
