"""Image batches: small colour images in, grain batches out, with a position that checkpoints.

The images are CIFAR-10, read from its files in either of their two forms, or, without files, the
digits that scikit-learn brings. A training batch is images drawn at random, resized to what the
network takes. Batch i depends on the seed and on i alone: the position is one integer, and a run
resumed there sees the same images.

Shapes: N images, H height, W width, B batch, S size that the network takes.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import pickle
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np

# AlexNet's smallest: of 62 pixels its last pooling would get 2, and it takes 3.
MIN_SIZE = 63
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_SIDE = 32
_PIXEL_BYTES = 3 * _SIDE * _SIDE
_RECORD_BYTES = 1 + _PIXEL_BYTES
_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
_TEST = "test_batch"
_SUFFIXES = {".bin": "cifar-10-batches-bin", "": "cifar-10-batches-py"}
_ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
_NUM_RECORDS = 10_000  # of one standard file


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """Images split into training and validation.

    Attributes:
      train, valid: uint8[N, 32, 32, 3].
      train_labels, valid_labels: int32[N], indices into `classes`.
      classes: what the labels mean.
      flips: whether a mirror image keeps its label.
      source: what was read, in words.
    """

    train: np.ndarray
    train_labels: np.ndarray
    valid: np.ndarray
    valid_labels: np.ndarray
    classes: tuple[str, ...]
    flips: bool
    source: str

    def fingerprint(self) -> str:
        """Return a hash of both splits; equal exactly when every batch is equal."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (self.train, self.train_labels, self.valid, self.valid_labels):
            digest.update(str(part.shape).encode())
            digest.update(np.ascontiguousarray(part).data)
        digest.update(bytes([self.flips]))
        return digest.hexdigest()


def load_images(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (), *, holdout: float = 0.05
) -> Images:
    """Read CIFAR-10, or the digits of scikit-learn.

    Args:
      paths: One folder or one .tar.gz that holds CIFAR-10: the binary form (data_batch_1.bin to
        data_batch_5.bin and test_batch.bin) or the Python form (the same names without .bin). In a
        folder the files, their usual subfolder or the archive itself are found. Of the two forms
        the binary one is taken. Empty: scikit-learn's 1797 digits, 8 x 8 grey, enlarged to 32 x 32
        and repeated over three channels.
      holdout: Share of the digits held out for validation, the last ones; between 0 and 1. Without
        effect on CIFAR-10, whose own test images are taken.

    Raises:
      ValueError: A file is missing, unreadable, truncated, holds labels above 9, or asks for
        anything but arrays.
      ImportError: Without paths, scikit-learn is not there.

    Cost: 3072 bytes of host memory per image (184 MB for CIFAR-10), up to three times that while
    reading. Nothing is written to disk.
    """
    if not 0 < holdout < 1:
        raise ValueError(f"holdout={holdout} must lie between 0 and 1; 0.05 is usual")
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    if len(paths) > 1:
        names = ", ".join(map(str, paths))
        raise ValueError(f"{names}: images are read from one folder or archive; name one of them")
    if not paths:
        return _digits(holdout)
    where, suffix, files = _find(Path(paths[0]).expanduser())
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
    return Images(
        train=np.concatenate(images[:-1]),
        train_labels=np.concatenate(labels[:-1]),
        valid=images[-1],
        valid_labels=labels[-1],
        classes=CLASSES,
        flips=True,
        source=f"CIFAR-10 from {where}",
    )


def image_batches(
    images: np.ndarray,
    labels: np.ndarray,
    *,
    batch: int,
    size: int = 224,
    seed: int,
    flips: bool = False,
    shard_index: int = 0,
    shard_count: int = 1,
) -> grain.IterDataset:
    """Make an endless stream of random images, drawn with replacement.

    Args:
      images: uint8[N, H, W, 3], `Images.train`.
      labels: int32[N], `Images.train_labels`.
      batch: B, rows of the global batch.
      size: S, the height and width that the network takes; at least 63.
      seed: Chooses the images.
      flips: Mirror each image left to right with probability 1/2; `Images.flips`.
      shard_index, shard_count: This process makes rows [index * B / count, (index + 1) * B / count)
        of every global batch, which does not depend on the count.

    Returns:
      A grain IterDataset of {"image": float32[B / count, S, S, 3], "label": int32[B / count]}. Its
      iterators have `get_state()` (a small dict that JSON can hold) and `set_state(state)`. Pixels
      lie between -1 and 1: 0 gives -1 and 255 gives 1. They are resized bilinearly about pixel
      centres, without antialiasing: for enlarging.

    Raises:
      ValueError: S is below 63, images and labels do not fit together, or B does not divide over
        the shards.

    Cost: some 0.3 ms of one core per image of 224 pixels; 3 batches of host memory.
    """
    _check(images, labels, batch, size)
    if batch % shard_count or not 0 <= shard_index < shard_count:
        raise ValueError(
            f"batch of {batch} does not divide over {shard_count} shards (index {shard_index}); "
            f"use a multiple of {shard_count}"
        )
    rows = batch // shard_count
    source = _RandomImages(
        images,
        labels,
        batch,
        size,
        seed,
        flips,
        slice(shard_index * rows, (shard_index + 1) * rows),
    )
    # One thread, as in zeroxla.data, and a short buffer: 128 images of 224 pixels are 77 MB.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return grain.MapDataset.source(source).to_iter_dataset(options)


def validation_image_batches(
    images: np.ndarray, labels: np.ndarray, *, batch: int, size: int = 224, num_batches: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the same `num_batches` batches each time: images at equal distances, none mirrored.

    With B * num_batches = N each image comes once; with more, some come again.

    Args:
      images: uint8[N, H, W, 3], `Images.valid`.
      labels: int32[N], `Images.valid_labels`.
      batch, size: As for `image_batches`.
      num_batches: How many.

    Raises:
      ValueError: S is below 63, or images and labels do not fit together.
    """
    _check(images, labels, batch, size)
    chosen = np.linspace(0, len(images) - 1, num_batches * batch).astype(np.int64)
    for chosen_B in chosen.reshape(num_batches, batch):
        yield _make(images, labels, chosen_B, np.zeros(batch, bool), size)


@dataclass(frozen=True, slots=True)
class _RandomImages:
    """A grain random-access source: element i is batch i of the endless stream."""

    images: np.ndarray
    labels: np.ndarray
    batch: int
    size: int
    seed: int
    flips: bool
    rows: slice

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        # Philox is counter-based: batch `index` is drawn without drawing those before it. Every
        # shard draws for all B rows and makes its own.
        generator = np.random.Generator(np.random.Philox(key=[self.seed, index]))
        chosen_B = generator.integers(0, len(self.images), size=self.batch)
        mirrored_B = (generator.integers(0, 2, size=self.batch) == 1) & self.flips
        return _make(
            self.images, self.labels, chosen_B[self.rows], mirrored_B[self.rows], self.size
        )


def _make(
    images: np.ndarray, labels: np.ndarray, chosen_B: np.ndarray, mirrored_B: np.ndarray, size: int
) -> dict[str, np.ndarray]:
    return {
        "image": _resize(images[chosen_B], mirrored_B, size),
        "label": labels[chosen_B].astype(np.int32),
    }


def _resize(pixels_BHWC: np.ndarray, mirrored_B: np.ndarray, size: int) -> np.ndarray:
    """Return float32[B, S, S, C] between -1 and 1.

    Products and sums of elements in a fixed order: a matrix product would be rounded by whatever
    BLAS there is. Image by image, which stays in the cache; rows first, while there are few.
    """
    num_images, height, width, channels = pixels_BHWC.shape
    left_S, right_S, share_S = _neighbours(width, size)
    top_S, bottom_S, weight_S = _neighbours(height, size)
    share_S1, weight_S1 = share_S[:, None], weight_S[:, None]
    out = np.empty((num_images, size, size * channels), np.float32)
    for image, pixels_HWC, mirrored in zip(out, pixels_BHWC, mirrored_B):
        x_HWC = pixels_HWC.astype(np.float32) / np.float32(127.5) - np.float32(1)
        if mirrored:
            x_HWC = x_HWC[:, ::-1]
        x_HSC = x_HWC.take(left_S, 1)
        x_HSC += (x_HWC.take(right_S, 1) - x_HSC) * share_S1
        x_HR = x_HSC.reshape(height, size * channels)
        x_SR = x_HR.take(top_S, 0)
        np.add(x_SR, (x_HR.take(bottom_S, 0) - x_SR) * weight_S1, out=image)
    return out.reshape(num_images, size, size, channels)


@functools.cache
def _neighbours(length: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for S target pixels the two source pixels about each, and the share of the second."""
    centres_S = np.clip((np.arange(size) + 0.5) * length / size - 0.5, 0, length - 1)
    first_S = centres_S.astype(np.int64)
    second_S = np.minimum(first_S + 1, length - 1)
    return first_S, second_S, (centres_S - first_S).astype(np.float32)


def _check(images: np.ndarray, labels: np.ndarray, batch: int, size: int) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or not images.size:
        raise ValueError(
            f"images are {images.dtype}{list(images.shape)}; give uint8[N, H, W, 3], N at least 1"
        )
    if labels.shape != images.shape[:1]:
        raise ValueError(
            f"{len(images)} images have labels of shape {list(labels.shape)}; give one label each"
        )
    if size < MIN_SIZE:
        raise ValueError(
            f"size={size} is too small for AlexNet, whose last pooling would have nothing to pool; "
            f"use {MIN_SIZE} at least, 224 is usual"
        )
    if batch < 1:
        raise ValueError(f"batch={batch} must be at least 1")


def _digits(holdout: float) -> Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits need the package scikit-learn; pip install 'zeroxla[images]', or name the "
            "folder that holds CIFAR-10"
        ) from error
    digits: Any = load_digits()
    # Grey levels 0 to 16; the resize gives -1 to 1 of 0 to 255.
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    grey = _resize(grey, np.zeros(len(grey), bool), _SIDE)
    images = np.rint((grey + 1) * 127.5).astype(np.uint8).repeat(3, axis=3)
    labels = digits.target.astype(np.int32)
    cut = len(images) - min(max(round(len(images) * holdout), 1), len(images) - 1)
    return Images(
        train=images[:cut],
        train_labels=labels[:cut],
        valid=images[cut:],
        valid_labels=labels[cut:],
        classes=tuple(map(str, range(10))),
        flips=False,
        source=f"the {len(images)} digits of scikit-learn",
    )


def _find(path: Path) -> tuple[Path, str, Mapping[str, Callable[[], bytes]]]:
    """Find one form's files: where, their suffix, and how to read each that is there."""
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
    """Return the images and labels of records of a label and three planes of pixels."""
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
        # Python 2 wrote the standard files, whose keys become bytes.
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
    except Exception as error:  # whatever a damaged pickle leads to
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
    """Return uint8[N, 32, 32, 3] of uint8[N, 3 x 32 x 32], and checked labels."""
    wrong = np.flatnonzero((labels < 0) | (labels >= len(CLASSES)))
    if wrong.size:
        first = wrong[0]
        raise ValueError(
            f"{what} labels image {first} with {labels[first]}; CIFAR-10 has labels 0 to "
            f"{len(CLASSES) - 1}: is this another data set, or a damaged file?"
        )
    images = planes.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels.astype(np.int32)


class _Refused(pickle.UnpicklingError):
    """A pickle asks for something that is no array."""


class _OnlyArrays(pickle.Unpickler):
    """An unpickler that calls nothing of what a pickle names: arrays become `_Array`s."""

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
    """What a pickle says of a dtype: a code such as "u1", and the byte order."""

    def __init__(self, code: str | bytes, *_: Any):
        self.code = code.decode() if isinstance(code, bytes) else code
        self.order = "|"

    def __setstate__(self, state: tuple[Any, ...]):
        self.order = state[1].decode() if isinstance(state[1], bytes) else state[1]


class _Array:
    """What a pickle says of an array."""

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
