"""Image batches: small colour images in, grain batches out, with a position that can be saved.

The images are CIFAR-10, or, without its files, the digits that scikit-learn brings. A training
batch consists of images that are drawn at random and resized for the network. Batch i depends on
the seed and on i alone. So the position is one integer, and a run that is resumed there sees the
same images.

Shapes: N images, H height, W width, B batch, S the network's image size.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zeroxla.cli.data.cifar import CLASSES, SIDE, read_cifar10
from zeroxla.program.extras import extra

if TYPE_CHECKING:
    import grain

# AlexNet's smallest size: with 62 pixels its last pooling would get 2 pixels, and it needs 3.
MIN_SIZE = 63


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """Images split into training and validation.

    Attributes:
      train, valid: uint8[N, 32, 32, 3].
      train_labels, valid_labels: int32[N], indices into `classes`.
      classes: the names of the classes.
      flips: whether a mirror image keeps its label.
      source: a description of the files that were read.
    """

    train: np.ndarray
    train_labels: np.ndarray
    valid: np.ndarray
    valid_labels: np.ndarray
    classes: tuple[str, ...]
    flips: bool
    source: str

    def fingerprint(self) -> str:
        """Return a hash of both splits. It is equal exactly if every batch is equal."""
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
      paths: one folder or one .tar.gz that holds CIFAR-10: the binary form (data_batch_1.bin to
        data_batch_5.bin and test_batch.bin) or the Python form (the same names without .bin). In a
        folder the files, their usual subfolder or the archive itself are found. If both forms are
        there, the binary one is read. Without paths: scikit-learn's 1797 digits, 8 x 8 grey,
        enlarged to 32 x 32 and repeated over three channels.
      holdout: share of the digits that is held out for validation, between 0 and 1; the last digits
        are. It has no effect on CIFAR-10, which has test images of its own.

    Raises:
      ValueError: a file is missing, unreadable or truncated, holds labels above 9, or asks for
        anything but arrays.
      ImportError: without paths, scikit-learn is not installed.

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
    where, train, test = read_cifar10(Path(paths[0]))
    return Images(
        train=train.images,
        train_labels=train.labels,
        valid=test.images,
        valid_labels=test.labels,
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
      images: uint8[N, H, W, 3], such as `Images.train`.
      labels: int32[N], such as `Images.train_labels`.
      batch: B, the rows of the global batch.
      size: S, the height and width of the network's images; at least 63.
      seed: chooses the images.
      flips: mirror each image left to right with probability 1/2, as `Images.flips` allows.
      shard_index, shard_count: this process makes the rows [index * B / count, (index + 1) * B /
        count) of every global batch. The global batch does not depend on the count.

    Returns:
      A grain IterDataset of {"image": float32[B / count, S, S, 3], "label": int32[B / count]}. Its
      iterators have `get_state()` (a small dict that JSON can hold) and `set_state(state)`. Pixels
      lie between -1 and 1: 0 becomes -1 and 255 becomes 1. Images are resized bilinearly about
      pixel centres, without antialiasing, as is right for enlarging.

    Raises:
      ImportError: grain is not installed.
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
    with extra("cli", "batches need"):  # here, because it takes long to import
        import grain
    # One thread, as for text, and a short buffer: 128 images of 224 pixels are 77 MB.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return grain.MapDataset.source(source).to_iter_dataset(options)


def validation_image_batches(
    images: np.ndarray, labels: np.ndarray, *, batch: int, size: int = 224, num_batches: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield validation batches, the same ones each time: images at equal distances, none mirrored.

    If B * num_batches is N, each image comes once; if it is more, some come again.

    Args:
      images: uint8[N, H, W, 3], such as `Images.valid`.
      labels: int32[N], such as `Images.valid_labels`.
      batch, size: as for `image_batches`.
      num_batches: the number of batches.

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

    It multiplies and adds elements in a fixed order, because the rounding of a matrix product
    depends on the BLAS that is installed. It works image by image, so that one stays in the cache,
    and resizes along the width first, while there are few rows.
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
    """Return the two source pixels around each of S target pixels, and the second one's share."""
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
    with extra("images", "the digits need", ", or name the folder that holds CIFAR-10"):
        from sklearn.datasets import load_digits
    digits: Any = load_digits()
    # Grey levels are 0 to 16. `_resize` turns 0 to 255 into -1 to 1.
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    grey = _resize(grey, np.zeros(len(grey), bool), SIDE)
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
