"""Text batches: files in, grain batches out, with a position that can be saved.

A corpus is one flat array of bytes: the documents in a fixed order, each after a 0 byte. Text holds
no 0 byte, so it marks the start of a document. A training batch consists of random crops of that
array, so a file may be shorter than a window. The crops of batch i depend on the seed and on i
alone. So the position is one integer, and a run that is resumed there sees the same bytes.

Shapes: B batch, L length, N bytes of a split.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zeroxla.cli.data.file_kinds import SNIFFED_BYTES, binary_kind
from zeroxla.cli.data.row_readers import form_of, table_suffix
from zeroxla.models.folders import POINTER, pointer_text
from zeroxla.program.extras import extra

if TYPE_CHECKING:
    import grain

SEPARATOR = 0
VOCABULARY = 256
# With at least so many files whole files are held out, with fewer the tail of each file.
MIN_FILES_TO_HOLD_OUT = 20
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Text split into training and validation bytes.

    Attributes:
      train, valid: uint8[N], the documents, each after a SEPARATOR; or the tokens of a vocabulary.
      num_train_files, num_valid_files: the number of files that contributed to each split.
      source: a description of the files that were read.
    """

    train: np.ndarray
    valid: np.ndarray
    num_train_files: int
    num_valid_files: int
    source: str

    def fingerprint(self) -> str:
        """Return a hash of both splits. It is equal exactly if every batch is equal."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (self.train, self.valid):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.data)
        return digest.hexdigest()


def load_corpus(paths: Sequence[str | os.PathLike[str]] = (), *, holdout: float = 0.05) -> Corpus:
    """Read text, and hold a part of it out for validation.

    With at least 20 files whole files are held out: those whose path, relative to the folder that
    was named, has a BLAKE2b hash in the lowest `holdout` of the range of hashes; at least one file.
    So a file keeps its side when other files come. With fewer than 20 files the last `holdout` of
    each file's bytes is held out.

    Args:
      paths: files and folders. Files are read as they are. Folders are searched for text files;
        hidden ones, `__pycache__`, `site-packages` and the like are skipped, and so are files with
        a NUL byte in their first 8192 bytes. Without paths: the `.py` files of the running Python's
        standard library.
      holdout: the share that is held out, between 0 and 1.

    Raises:
      ValueError: a path is missing or unreadable, is a file of another kind, a folder holds mostly
        files of rows, or no text was found.

    Cost: one byte of host memory per byte of text, twice that while reading.
    """
    if not 0 < holdout < 1:
        raise ValueError(f"holdout={holdout} must lie between 0 and 1; 0.05 is usual")
    if paths:
        documents = [d for path in paths for d in _read_path(Path(path).expanduser())]
        source = ", ".join(str(path) for path in paths)
    else:
        root = Path(sysconfig.get_path("stdlib"))
        documents = _read_folder(root, suffix=".py")
        source = f"the standard library of Python {sys.version_info.major}.{sys.version_info.minor}"
    if not any(content for _, content in documents):
        raise ValueError(f"{source}: every file is empty; name files or folders that hold text")

    train: list[bytes] = []
    valid: list[bytes] = []
    if len(documents) >= MIN_FILES_TO_HOLD_OUT:
        hashes = {key: _unit_hash(key) for key, _ in documents}
        # The file with the smallest hash is always held out, the one with the largest never.
        threshold = min(max(holdout, min(hashes.values())), np.nextafter(max(hashes.values()), 0))
        for key, content in documents:
            (valid if hashes[key] <= threshold else train).append(content)
    else:
        for _, content in documents:
            cut = len(content) - round(len(content) * holdout)
            train.append(content[:cut])
            valid.append(content[cut:])
    return Corpus(
        train=_join(train),
        valid=_join(valid),
        num_train_files=len(train),
        num_valid_files=len(valid),
        source=source,
    )


def training_batches(
    train_N: np.ndarray,
    *,
    batch: int,
    length: int,
    seed: int,
    shard_index: int = 0,
    shard_count: int = 1,
) -> grain.IterDataset:
    """Make an endless stream of random crops.

    Args:
      train_N: integers[N], such as `Corpus.train`.
      batch: B, the rows of the global batch.
      length: L. Each row has L + 1 integers: inputs and, shifted by one, targets.
      seed: chooses the crops.
      shard_index, shard_count: this process makes the rows [index * B / count, (index + 1) * B /
        count) of every global batch. The global batch does not depend on the count.

    Returns:
      A grain IterDataset of {"tokens": int32[B / count, L + 1]}. Its iterators have
      `get_state()` (a small dict that JSON can hold) and `set_state(state)`.

    Raises:
      ImportError: grain is not installed.
      ValueError: N is less than one batch, or B does not divide over the shards.
    """
    window = length + 1
    if batch < 1 or length < 1:
        raise ValueError(f"batch={batch} and length={length} must both be at least 1")
    if len(train_N) < batch * window:
        raise ValueError(
            f"the training text has {len(train_N)} tokens, fewer than one batch of "
            f"{batch} x {window} = {batch * window}; give more text, or a smaller batch or length"
        )
    if batch % shard_count or not 0 <= shard_index < shard_count:
        raise ValueError(
            f"batch of {batch} does not divide over {shard_count} shards (index {shard_index}); "
            f"use a multiple of {shard_count}"
        )
    rows = batch // shard_count
    source = _RandomCrops(
        train_N, batch, window, seed, slice(shard_index * rows, (shard_index + 1) * rows)
    )
    with extra("cli", "batches need"):  # here, because it takes long to import
        import grain
    # One thread and a short buffer: a batch takes well under a millisecond to cut.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return grain.MapDataset.source(source).to_iter_dataset(options)


def validation_batches(
    valid_N: np.ndarray, *, batch: int, length: int, num_batches: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield validation batches, the same ones each time: windows at equal distances over the text.

    Windows overlap if the text has fewer than B * num_batches * L bytes.

    Args:
      valid_N: integers[N], such as `Corpus.valid`.
      batch, length: as for `training_batches`.
      num_batches: the number of batches.

    Raises:
      ValueError: N is less than one window of L + 1 bytes.
    """
    window = length + 1
    if len(valid_N) < window:
        raise ValueError(
            f"the validation text has {len(valid_N)} tokens, fewer than one window of {window}; "
            "give more text, a larger held-out share, or a smaller length"
        )
    starts = np.linspace(0, len(valid_N) - window, num_batches * batch).astype(np.int64)
    for starts_B in starts.reshape(num_batches, batch):
        yield {"tokens": _crop(valid_N, starts_B, window)}


def unigram_entropy(tokens_N: np.ndarray) -> float:
    """Return the entropy of the tokens' frequencies in nats: the loss of the best constant guess.

    It is computed in float64.
    """
    counts = np.bincount(tokens_N).astype(np.float64)
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


@dataclass(frozen=True, slots=True)
class _RandomCrops:
    """A grain random-access source: element i is batch i of the endless stream."""

    bytes_N: np.ndarray
    batch: int
    window: int
    seed: int
    rows: slice

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        # Philox is counter-based: batch `index` is drawn without drawing those before it. Every
        # shard draws all B starts and cuts its own rows.
        generator = np.random.Generator(np.random.Philox(key=[self.seed, index]))
        starts_B = generator.integers(0, len(self.bytes_N) - self.window + 1, size=self.batch)
        return {"tokens": _crop(self.bytes_N, starts_B[self.rows], self.window)}


def _crop(bytes_N: np.ndarray, starts_B: np.ndarray, window: int) -> np.ndarray:
    return bytes_N[starts_B[:, None] + np.arange(window)].astype(np.int32)


def _join(contents: list[bytes]) -> np.ndarray:
    separator = bytes([SEPARATOR])
    return np.frombuffer(b"".join(separator + c for c in contents), dtype=np.uint8)


def _unit_hash(key: str) -> float:
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _read_path(path: Path) -> list[tuple[str, bytes]]:
    if path.is_dir():
        return _read_folder(path)
    content = _read_file(path)
    if kind := binary_kind(content[:SNIFFED_BYTES]):
        raise ValueError(f"{path} is {kind.replace('FILE', str(path))}")
    if suffix := table_suffix(content[:SNIFFED_BYTES]):
        raise ValueError(
            f"{path} is a table of rows, and its name is that of a text; end it with {suffix}"
        )
    return [(path.name, content)]


def _read_folder(root: Path, suffix: str = "") -> list[tuple[str, bytes]]:
    """Read a folder's text files as (path relative to the folder, content), sorted by path."""
    documents = []
    num_files = row_bytes = text_bytes = 0
    rows: list[Path] = []
    for file in _walk(root):
        special = file.exists() and not file.is_file()  # a pipe or socket: reading could block
        if special or not file.name.endswith(suffix):
            continue
        num_files += 1
        content = _read_file(file)
        if content.startswith(POINTER):
            raise ValueError(pointer_text(file))
        form = form_of(file)
        is_text = b"\0" not in content[:SNIFFED_BYTES]  # Git's own rule
        if form is not None and form[0] != ".json":  # which is no sign of rows in a folder
            rows.append(file)
            row_bytes += len(content)
        elif is_text:
            text_bytes += len(content)
        if is_text:
            documents.append((file.relative_to(root).as_posix(), content))
    if row_bytes > text_bytes:
        raise ValueError(
            f"most of the folder {root} are files of rows, such as {rows[0]}, and a folder is read "
            f"as text; name these files: --data {rows[0].parent}/*{''.join(rows[0].suffixes)}"
        )
    if not documents:
        found = (
            f"holds no {suffix or 'visible'} file"
            if num_files == 0
            else f"holds {num_files} files, but none is text (each has a NUL byte near its start)"
        )
        raise ValueError(f"the folder {root} {found}; name files or folders that hold text")
    return documents


def _walk(root: Path) -> list[Path]:
    def fail(error: OSError):
        raise ValueError(f"cannot read the folder {error.filename}: {error.strerror}") from error

    files = []
    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = [
            s for s in subfolders if not s.startswith(".") and s not in _SKIPPED_FOLDERS
        ]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(
            f"cannot read {file}: {error.strerror}; correct the path, or leave it out"
        ) from error
