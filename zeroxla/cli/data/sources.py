"""Reads the files that `--data` names into weighted sources of rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from zeroxla.cli.data.bad_rows import BadRows
from zeroxla.cli.data.mixture import Source
from zeroxla.cli.data.row_files import RowFiles


def load_sources(
    names: Sequence[str | os.PathLike[str]],
    *,
    bad: BadRows,
    holdout: float = 0.05,
) -> list[Source]:
    """Read files of rows.

    Args:
      names: files. Without weights they are one source, in which every row is drawn equally often.
        With weights ("chat.jsonl=0.7", "code.parquet=0.3") each file is a source, and the weights
        are the shares of rows that are drawn from them; then each file needs one.
      bad: counts the rows that cannot be trained on.
      holdout: as for `RowFiles`.

    Raises:
      ValueError: a weight is missing, or as for `RowFiles`; or too many rows are bad.
      ImportError: as for `RowFiles`.
    """
    files = [with_weight(name) for name in names]
    unweighted = [str(path) for path, weight in files if weight is None]
    if unweighted and len(unweighted) < len(files):
        raise ValueError(
            f"{unweighted[0]} has no weight, and other files have one; give each file a weight, as "
            f"in {unweighted[0]}=0.5, or none"
        )
    if unweighted:
        groups = [([path for path, _ in files], 1.0)]
    else:
        groups = [([path], weight) for path, weight in files if weight is not None]
    sources = [
        Source(RowFiles(paths, bad=bad, holdout=holdout), weight) for paths, weight in groups
    ]
    bad.check()
    return sources


def with_weight(name: str | os.PathLike[str]) -> tuple[Path, float | None]:
    """Return the file that a name says, and its weight; None if the name has none.

    If there is a file of this very name, it is that file.

    >>> with_weight("chat.jsonl=0.7")
    (PosixPath('chat.jsonl'), 0.7)
    >>> with_weight("chat.jsonl")
    (PosixPath('chat.jsonl'), None)

    Raises:
      ValueError: the weight is not above 0, or infinite.
    """
    path, sign, text = os.fspath(name).rpartition("=")
    if not sign or Path(name).expanduser().exists():
        return Path(name), None
    try:
        weight = float(text)
    except ValueError:
        return Path(name), None  # it will be missed under this name
    if not 0 < weight < float("inf"):
        raise ValueError(f"{path} has the weight {text}; give one above 0, such as {path}=0.5")
    return Path(path), weight
