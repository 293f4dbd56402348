"""Checksums of a checkpoint's files: they find files that were cut, lost or changed, by name.

Each process sums the files that it wrote, from the page cache. The first process sums the rest, the
other processes' sums included. Nothing here knows what the files hold.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REST = "rest"
"""Name of the sums that are written last, over all files that no other sums cover."""

_PREFIX = "checksums"
_BLOCK = 4 << 20
_THREADS = 4


def write_sums(folder: Path, name: str, files: Iterable[Path]) -> None:
    """Write sizes and CRC-32 sums of files of the folder to its `checksums.NAME.json`.

    Raises:
      OSError: a file cannot be read, or the sums cannot be written.
    """
    files = sorted(files)
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = dict(zip([f.relative_to(folder).as_posix() for f in files], pool.map(_sum, files)))
    text = json.dumps(sums, indent=0)
    whole = {"crc32": zlib.crc32(text.encode()), "files": text}
    _sums_file(folder, name).write_text(json.dumps(whole))


def sum_rest(folder: Path) -> None:
    """Write the sums of all files of the folder that have none yet.

    Raises:
      OSError: for the reasons of `write_sums`.
    """
    known = {name for file in folder.glob(f"{_PREFIX}.*.json") for name in _read(file)}
    files = (file for file in folder.rglob("*") if file.is_file())
    rest = [file for file in files if file.relative_to(folder).as_posix() not in known]
    write_sums(folder, REST, rest)


def find_damage(folder: Path, *, part: int = 0, parts: int = 1) -> str | None:
    """Describe the damage to a file of the folder; return None if all files are as written.

    Args:
      folder: a folder with the sums of its files.
      part, parts: look at every `parts`-th file, beginning with number `part`.

    Cost: reads the files.
    """
    sums: dict[str, list[int]] = {}
    for file in (_sums_file(folder, REST), *sorted(folder.glob(f"{_PREFIX}.*.json"))):
        try:
            sums |= _read(file)
        except OSError as error:
            return f"{file} cannot be read: {error.strerror}"
        except ValueError as error:
            return f"{file} cannot be read: {error}"
    mine = sorted(sums.items())[part::parts]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda entry: _compare(folder / entry[0], *entry[1]), mine)
        return next((damage for damage in found if damage), None)


def _sums_file(folder: Path, name: str) -> Path:
    return folder / f"{_PREFIX}.{name}.json"


def _read(file: Path) -> dict[str, list[int]]:
    try:
        whole = json.loads(file.read_text())
        text = whole["files"]
        if zlib.crc32(text.encode()) == whole["crc32"]:
            return json.loads(text)
    except (ValueError, KeyError, TypeError):
        pass  # reported below, whatever the file holds
    raise ValueError("it does not hold what was written")


def _compare(file: Path, size: int, crc: int) -> str | None:
    try:
        there = file.stat().st_size
        if there != size:
            return f"{file} has {there} bytes, and {size} were written"
        return None if _sum(file)[1] == crc else f"{file} does not hold what was written"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"


def _sum(file: Path) -> tuple[int, int]:
    size = crc = 0
    with file.open("rb", buffering=0) as opened:
        while block := opened.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc
