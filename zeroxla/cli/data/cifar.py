"""Reads CIFAR-10's files: the binary or the Python form, in a folder or in an archive.

The Python form is pickled. It is read without calling anything that a pickle names.
"""

from __future__ import annotations

import functools
import io
import pickle
import tarfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
SIDE = 32
_PIXEL_BYTES = 3 * SIDE * SIDE
_RECORD_BYTES = 1 + _PIXEL_BYTES
_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
_TEST = "test_batch"
_SUFFIXES = {".bin": "cifar-10-batches-bin", "": "cifar-10-batches-py"}
_ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
_NUM_RECORDS = 10_000  # in a standard file


class Split(NamedTuple):
    """Images, uint8[N, 32, 32, 3], and their labels, int32[N]."""

    images: np.ndarray
    labels: np.ndarray


def read_cifar10(path: Path) -> tuple[Path, Split, Split]:
    """Read CIFAR-10.

    Args:
      path: a folder or a .tar.gz. In a folder the files, their usual subfolder or the archive are
        found. If both forms are there, the binary one is read.

    Returns:
      The place of the files, the images to train on, and the images to test on.

    Raises:
      ValueError: a file is missing, unreadable or truncated, holds labels above 9, or asks for
        anything but arrays.
    """
    where, suffix, files = _find(path.expanduser())
    missing = [name + suffix for name in (*_TRAIN, _TEST) if name + suffix not in files]
    if missing:
        raise ValueError(
            f"{where} holds {', '.join(sorted(files))} but lacks {', '.join(missing)}; CIFAR-10 is "
            "five files to train on and one to test: fetch it anew"
        )
    decode = _decode_binary if suffix else _decode_python
    parts = [
        decode(files[name + suffix](), f"{where}: {name + suffix}") for name in (*_TRAIN, _TEST)
    ]
    images, labels = zip(*parts, strict=True)
    train = Split(np.concatenate(images[:-1]), np.concatenate(labels[:-1]))
    return where, train, Split(images[-1], labels[-1])


def _find(path: Path) -> tuple[Path, str, Mapping[str, Callable[[], bytes]]]:
    """Find the files of one form. Return their place, their suffix, and a function by name that
    reads each file that is there."""
    if not path.exists():
        raise ValueError(f"cannot read {path}: there is no such file or folder; correct the path")
    places = [path]
    if path.is_dir():
        places += [path / name for name in (*_SUFFIXES.values(), *_ARCHIVES)]
    for place in places:
        if place.is_dir():
            found = {file.name: functools.partial(_read, file) for file in _list(place)}
        elif place.exists():
            found = _read_archive(place)
        else:
            continue
        for suffix in _SUFFIXES:
            files = {n + suffix: found[n + suffix] for n in (*_TRAIN, _TEST) if n + suffix in found}
            if files:
                return place, suffix, files
    raise ValueError(
        f"{path} holds no file of CIFAR-10; name the folder or the .tar.gz with data_batch_1.bin "
        "to data_batch_5.bin and test_batch.bin, or with the same names without .bin"
    )


def _list(folder: Path) -> list[Path]:
    try:
        return [file for file in folder.iterdir() if file.is_file()]
    except OSError as error:
        raise ValueError(f"cannot read the folder {folder}: {error.strerror}") from error


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}; correct the path") from error


def _read_archive(file: Path) -> dict[str, Callable[[], bytes]]:
    """Read the batches of a .tar.gz into memory."""
    wanted = {name + suffix for name in (*_TRAIN, _TEST) for suffix in _SUFFIXES}
    found = {}
    try:
        with tarfile.open(file, "r:gz") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                if member.isfile() and name in wanted:
                    stream = archive.extractfile(member)
                    assert stream is not None, member
                    found[name] = functools.partial(bytes, stream.read())
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise ValueError(
            f"cannot read {file} of {file.stat().st_size} bytes as a .tar.gz ({error}); that of "
            "CIFAR-10 has about 170000000: fetch it anew, or name a folder"
        ) from error
    return found


def _decode_binary(content: bytes, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels of binary records: a label, then three planes of pixels."""
    if not content or len(content) % _RECORD_BYTES:
        raise ValueError(
            f"{what} has {len(content)} bytes, which is not a number of whole images of "
            f"{_RECORD_BYTES} bytes; a standard file has {_NUM_RECORDS * _RECORD_BYTES}: fetch it "
            "anew"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD_BYTES)
    return _decode(records[:, 1:], records[:, 0], what)


def _decode_python(content: bytes, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels of a pickled dict with "data" and "labels"."""
    try:
        # Python 2 wrote the standard files. Their keys become bytes.
        found = _OnlyArrays(io.BytesIO(content), encoding="bytes").load()
        fields = {key.decode() if isinstance(key, bytes) else key: x for key, x in found.items()}
        data, labels = fields["data"], fields["labels"]
        data = data.array() if isinstance(data, _Array) else data
        labels = np.array(labels.array() if isinstance(labels, _Array) else labels)
    except _Refused as error:
        raise ValueError(
            f"{what} asks for {error}, which images have no need of; it may be malicious: do not "
            "load it, and fetch CIFAR-10 anew"
        ) from error
    except Exception as error:  # a damaged pickle can lead to any error
        raise ValueError(
            f"{what} of {len(content)} bytes is not a whole pickle of images ({error!r}); a "
            "standard file has about 31000000: fetch it anew"
        ) from error
    shape = [len(labels), _PIXEL_BYTES]
    fits = isinstance(data, np.ndarray) and data.dtype == np.uint8 and list(data.shape) == shape
    if not fits or labels.ndim != 1 or labels.dtype.kind not in "iu" or not labels.size:
        seen = f"{data.dtype}{list(data.shape)}" if isinstance(data, np.ndarray) else type(data)
        raise ValueError(
            f"{what} holds {seen} as data and {labels.dtype}{list(labels.shape)} as labels; "
            f"CIFAR-10 has uint8[N, {_PIXEL_BYTES}] and N whole numbers"
        )
    return _decode(data, labels, what)


def _decode(planes: np.ndarray, labels: np.ndarray, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Turn planes uint8[N, 3 x 32 x 32] into images uint8[N, 32, 32, 3], and check the labels."""
    wrong = np.flatnonzero((labels < 0) | (labels >= len(CLASSES)))
    if wrong.size:
        first = wrong[0]
        raise ValueError(
            f"{what} labels image {first} with {labels[first]}; CIFAR-10 has labels 0 to "
            f"{len(CLASSES) - 1}: is this another data set, or a damaged file?"
        )
    images = planes.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels.astype(np.int32)


class _Refused(pickle.UnpicklingError):
    """A pickle asks for something other than arrays."""


class _OnlyArrays(pickle.Unpickler):
    """An unpickler that calls nothing that a pickle names. Arrays become `_Array`s."""

    def find_class(self, module: str, name: str) -> Any:
        # numpy.core is what NumPy 1 called numpy._core.
        stands_for = {
            ("numpy", "ndarray"): _Array,
            ("numpy", "dtype"): _Dtype,
            ("numpy.core.multiarray", "_reconstruct"): _Array,
            ("numpy.core.numeric", "_frombuffer"): _Array.of,
            ("_codecs", "encode"): _latin1,  # how protocols 0 to 2 write bytes
        }
        try:
            return stands_for[module.replace("numpy._core", "numpy.core"), name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None


class _Dtype:
    """A pickled dtype: a code such as "u1", and the byte order."""

    def __init__(self, code: str | bytes, *_: Any):
        self.code = code.decode() if isinstance(code, bytes) else code
        self.order = "|"

    def __setstate__(self, state: tuple[Any, ...]):
        self.order = state[1].decode() if isinstance(state[1], bytes) else state[1]


class _Array:
    """A pickled array: its shape, dtype, order and bytes."""

    def __init__(self, *_: Any):
        self.__setstate__((1, (0,), _Dtype("u1"), False, b""))

    def __setstate__(self, state: tuple[Any, ...]):
        _, self.shape, self.dtype, self.fortran, self.content = state

    @staticmethod
    def of(content: bytes, dtype: _Dtype, shape: tuple[int, ...], order: str) -> _Array:
        array = _Array()
        array.__setstate__((1, shape, dtype, order == "F", content))
        return array

    def array(self) -> np.ndarray:
        dtype = np.dtype(self.dtype.order + self.dtype.code)
        flat = np.frombuffer(self.content, dtype)
        return flat.reshape(self.shape, order="F" if self.fortran else "C")


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise _Refused(f"the encoding {encoding}")
    return text.encode("latin1")
