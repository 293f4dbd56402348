"""Tells by its first bytes what a file is that is no text, and what to do with it."""

from __future__ import annotations

import re

from zeroxla.models.folders import POINTER

SNIFFED_BYTES = 8192
"""The number of first bytes that are looked at."""

_PACKED = "unpack it, or end its name with"
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (rb"PK\x03\x04", "a zip archive or a spreadsheet; unpack it, or save the sheet as CSV"),
    (rb"\x1f\x8b", f"compressed with gzip; {_PACKED} .gz"),
    (rb"BZh[1-9]1AY&SY", f"compressed with bzip2; {_PACKED} .bz2"),
    (rb"\xfd7zXZ\x00", f"compressed with xz; {_PACKED} .xz"),
    (rb"\x28\xb5\x2f\xfd", f"compressed with Zstandard; {_PACKED} .zst"),
    (rb"7z\xbc\xaf|Rar!\x1a", "an archive; unpack it"),
    (rb"(?s:.{257})ustar", "a tar archive; unpack it"),
    (rb"PAR1[^ -~]", "a Parquet file; end its name with .parquet"),
    (
        rb"ARROW1\x00|\xff\xff\xff\xff",
        'an Arrow file; write it as Parquet: python -c "from datasets import Dataset; '
        "Dataset.from_file('FILE').to_parquet('rows.parquet')\"",
    ),
    (
        rb"(?s:\x89PNG|\xff\xd8\xff|GIF8[79]a|RIFF.{4}(WEBP|WAVE|AVI )|BM.{4}\x00{4}|ID3)",
        "an image or a sound, and no text",
    ),
    (rb"%PDF-", "a PDF; extract its text first"),
    (rb"\x93NUMPY", "an array of NumPy, and no text"),
    (rb"SQLite format 3\x00", "a database of SQLite; export its table as CSV"),
    (rb"\x89HDF", "an HDF5 file, and no text"),
    (rb"\xd0\xcf\x11\xe0", "a document of Microsoft Office; save it as CSV or text"),
    (rb"GGUF[^ -~]", "a GGUF file of weights, and no text"),
    (rb"\x80[\x02-\x05]", "a pickle of Python, which can run code and is not read"),
    (rb"\xff\xfe|\xfe\xff", "text in UTF-16; convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW"),
)
_PAGE = re.compile(rb"\s*<(!doctype html|html|\?xml)", re.IGNORECASE)


def binary_kind(head: bytes) -> str | None:
    """Return what a file is that begins with these bytes, if it is no text, and the remedy.

    >>> binary_kind(b"%PDF-1.7")
    'a PDF; extract its text first'
    """
    if head.startswith(POINTER):
        return (
            "a pointer of Git LFS and not the file itself; run `git lfs pull` in its folder (after "
            "`git lfs install`)"
        )
    return next((kind for magic, kind in _MAGIC if re.match(magic, head)), None)


def wrong_kind(head: bytes) -> str | None:
    """Return what a file is that begins with these bytes, if it cannot hold rows as text, and the
    remedy.

    >>> wrong_kind(b"<!DOCTYPE html><html>")
    'a page of HTML or XML, perhaps an error of a download; look at it, and download the file anew'
    """
    if kind := binary_kind(head):
        return kind
    if _PAGE.match(head):
        return (
            "a page of HTML or XML, perhaps an error of a download; look at it, and download the "
            "file anew"
        )
    if b"\0" in head:
        return "binary, and no text"
    return None
