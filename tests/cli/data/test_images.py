"""The image pipeline: what is read and refused, and that a position replays bit-exactly."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import sys

import numpy as np
import pytest
from tools.cifar import as_python_2, make_planes, write_archive, write_binary, write_python
from tools.quick import thinned

from zeroxla.cli.data.images import MIN_SIZE, image_batches, load_images, validation_image_batches


def check_contents(found):
    """Compare with the pixels that were written, one at a time."""
    assert found.train.shape == (15, 32, 32, 3)
    assert found.valid.shape == (3, 32, 32, 3)
    assert {found.train.dtype, found.valid.dtype} == {np.dtype(np.uint8)}
    assert {found.train_labels.dtype, found.valid_labels.dtype} == {np.dtype(np.int32)}
    for seed in range(6):
        labels, planes = make_planes(seed)
        images, kept = (
            (found.train[3 * seed :][:3], found.train_labels[3 * seed :][:3])
            if seed < 5
            else (found.valid, found.valid_labels)
        )
        assert kept.tolist() == labels
        for row, column, colour in ((0, 0, 0), (0, 31, 0), (31, 0, 1), (5, 7, 2)):
            plane = planes[:, colour * 1024 + row * 32 + column]
            np.testing.assert_array_equal(images[:, row, column, colour], plane)
    assert found.classes[:2] == ("airplane", "automobile")
    assert found.flips


class Hostile:
    """Its pickle runs a command when it is loaded by the standard unpickler."""

    def __reduce__(self):
        return os.system, ("touch hacked",)


class TestCifar10:
    @pytest.mark.smoke
    def test_binary_form(self, tmp_path):
        check_contents(load_images([write_binary(tmp_path / "data")]))

    @pytest.mark.parametrize("protocol", range(6))
    def test_python_form(self, tmp_path, protocol):
        def dump(found):
            return pickle.dumps(found, protocol=protocol)

        check_contents(load_images([write_python(tmp_path, dump)]))

    def test_python_form_as_python_2_wrote_it(self, tmp_path):
        check_contents(load_images([write_python(tmp_path, as_python_2)]))

    def test_python_form_with_text_keys(self, tmp_path):
        check_contents(load_images([write_python(tmp_path, text=True)]))

    def test_python_form_with_arrays_of_labels_in_another_order(self, tmp_path):
        def dump(found):
            labels = np.array(found[b"labels"], ">i8")
            return pickle.dumps({b"labels": labels, b"data": np.asfortranarray(found[b"data"])})

        check_contents(load_images([write_python(tmp_path, dump)]))

    def test_python_form_by_the_names_of_numpy_1(self, tmp_path):
        def protocol_2(found):
            content = pickle.dumps(found, protocol=2)
            assert b"numpy._core.multiarray" in content
            return content.replace(b"numpy._core", b"numpy.core")

        def protocol_5(found):
            content = pickle.dumps(found, protocol=5)
            content = content[:2] + content[11:]  # without the one frame, which has a length
            assert b"\x13numpy._core.numeric" in content
            return content.replace(b"\x13numpy._core.numeric", b"\x12numpy.core.numeric")

        check_contents(load_images([write_python(tmp_path / "2", protocol_2)]))
        check_contents(load_images([write_python(tmp_path / "5", protocol_5)]))

    @pytest.mark.parametrize(
        ("write", "name"),
        [(write_binary, "cifar-10-batches-bin"), (write_python, "cifar-10-batches-py")],
    )
    def test_usual_subfolder_and_archive(self, tmp_path, write, name):
        folder = write(tmp_path / "data" / name)
        whole = load_images([tmp_path / "data"])
        check_contents(whole)
        check_contents(load_images(write_archive(tmp_path / "any.tar.gz", folder)))

        (tmp_path / "fetched").mkdir()
        form = "binary" if write is write_binary else "python"
        write_archive(tmp_path / "fetched" / f"cifar-10-{form}.tar.gz", folder)
        found = load_images(str(tmp_path / "fetched"))
        assert found.fingerprint() == whole.fingerprint()
        assert f"cifar-10-{form}.tar.gz" in found.source

    def test_a_changed_pixel_changes_the_fingerprint(self, tmp_path):
        before = load_images(write_binary(tmp_path)).fingerprint()
        file = tmp_path / "data_batch_2.bin"
        content = bytearray(file.read_bytes())
        content[7] ^= 1
        file.write_bytes(content)
        assert load_images(tmp_path).fingerprint() != before


class TestBadFiles:
    def test_missing_path(self, tmp_path):
        with pytest.raises(ValueError, match=r"cannot read .*nowhere: there is no such file"):
            load_images([tmp_path / "nowhere"])

    def test_folder_without_images(self, tmp_path):
        with pytest.raises(ValueError, match=r"holds no file of CIFAR-10; name the folder or"):
            load_images([tmp_path])

    @pytest.mark.parametrize(("write", "suffix"), [(write_binary, ".bin"), (write_python, "")])
    def test_missing_files_are_named(self, tmp_path, write, suffix):
        write(tmp_path)
        for name in ("data_batch_4", "test_batch"):
            (tmp_path / (name + suffix)).unlink()
        with pytest.raises(
            ValueError, match=rf"lacks data_batch_4{suffix}, test_batch{suffix}; CIFAR-10 is five"
        ):
            load_images([tmp_path])

    @pytest.mark.parametrize("num_bytes", [0, 100, 2 * 3073 + 1])
    def test_truncated_binary_file(self, tmp_path, num_bytes):
        file = write_binary(tmp_path) / "data_batch_3.bin"
        file.write_bytes(file.read_bytes()[:num_bytes])
        message = rf"data_batch_3\.bin has {num_bytes} bytes, .* a standard file has 30730000"
        with pytest.raises(ValueError, match=message):
            load_images([tmp_path])

    @pytest.mark.parametrize("num_bytes", [0, 100, 9000])
    def test_truncated_python_file(self, tmp_path, num_bytes):
        file = write_python(tmp_path) / "test_batch"
        file.write_bytes(file.read_bytes()[:num_bytes])
        with pytest.raises(ValueError, match=f"test_batch of {num_bytes} bytes is not a whole pi"):
            load_images([tmp_path])

    def test_truncated_archive(self, tmp_path):
        file = write_archive(tmp_path / "a.tar.gz", write_binary(tmp_path / "data"))
        file.write_bytes(file.read_bytes()[:20000])
        with pytest.raises(ValueError, match=r"a\.tar\.gz of 20000 bytes as a \.tar\.gz"):
            load_images([file])

    def test_archive_of_something_else(self, tmp_path):
        (tmp_path / "a.tar.gz").write_bytes(gzip.compress(b"no archive" * 100))
        with pytest.raises(ValueError, match=r"a\.tar\.gz of \d+ bytes as a \.tar\.gz"):
            load_images([tmp_path / "a.tar.gz"])

    def test_label_out_of_range(self, tmp_path):
        file = write_binary(tmp_path) / "data_batch_5.bin"
        content = bytearray(file.read_bytes())
        content[3073] = 10
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"data_batch_5\.bin labels image 1 with 10; CIFAR-10"):
            load_images([tmp_path])

    def test_negative_label(self, tmp_path):
        def dump(found):
            return pickle.dumps(found | {b"labels": [0, 0, -1]})

        with pytest.raises(ValueError, match="data_batch_1 labels image 2 with -1"):
            load_images([write_python(tmp_path, dump)])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({b"labels": [1, 2]}, r"holds uint8\[3, 3072\] as data and int64\[2\] as labels"),
            ({b"labels": [0.5] * 3}, r"float64\[3\] as labels"),
            ({b"data": np.zeros((3, 3072))}, r"holds float64\[3, 3072\] as data"),
            ({b"data": np.zeros((3, 32), np.uint8)}, r"holds uint8\[3, 32\] as data"),
            ({b"data": [1, 2, 3]}, r"holds <class 'list'> as data"),
        ],
    )
    def test_other_contents(self, tmp_path, change, message):
        def dump(found):
            return pickle.dumps(found | change)

        with pytest.raises(ValueError, match=message):
            load_images([write_python(tmp_path, dump)])

    def test_several_paths(self, tmp_path):
        with pytest.raises(ValueError, match="a, b: images are read from one folder or archive"):
            load_images(["a", "b"])

    @pytest.mark.parametrize("holdout", [0, 1, -0.1])
    def test_holdout(self, holdout):
        with pytest.raises(ValueError, match=f"holdout={holdout} must lie between 0 and 1"):
            load_images(holdout=holdout)


class TestMaliciousPickle:
    @pytest.mark.parametrize("protocol", range(6))
    def test_refused_and_not_run(self, tmp_path, protocol, monkeypatch):
        monkeypatch.chdir(tmp_path)

        def dump(found):
            return pickle.dumps(found | {b"filenames": Hostile()}, protocol=protocol)

        with pytest.raises(ValueError, match=r"asks for \w+\.system, .* may be malicious"):
            load_images([write_python(tmp_path / "data", dump)])
        assert not (tmp_path / "hacked").exists()

    @pytest.mark.parametrize(
        "found", [print, slice(1), np.zeros(2, object), np.int64, np.random.default_rng]
    )
    def test_only_arrays_and_plain_values(self, tmp_path, found):
        def dump(fields):
            return pickle.dumps(fields | {b"data": found})

        with pytest.raises(ValueError, match=r"asks for|is not a whole pickle"):
            load_images([write_python(tmp_path, dump)])

    def test_another_encoding(self, tmp_path):
        content = b"c_codecs\nencode\n(V1\nVzip\ntR."
        with pytest.raises(ValueError, match="asks for the encoding zip"):
            load_images([write_python(tmp_path, lambda _: content)])


class TestDigits:
    def test_real_images_in_three_channels(self):
        datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn brings the digits")
        found = load_images(holdout=0.1)
        assert found.train.shape == (1617, 32, 32, 3)
        assert found.valid.shape == (180, 32, 32, 3)
        assert found.train.dtype == np.uint8
        assert found.train.max() == 255
        assert found.train_labels.dtype == np.int32
        assert set(found.train_labels) == set(found.valid_labels) == set(range(10))
        assert found.classes == tuple("0123456789")
        assert not found.flips
        images = np.concatenate([found.train, found.valid])
        np.testing.assert_array_equal(images[..., 0], images[..., 1])
        np.testing.assert_array_equal(images[..., 0], images[..., 2])
        original = datasets.load_digits()
        labels = np.concatenate([found.train_labels, found.valid_labels])
        np.testing.assert_array_equal(labels, original.target)
        # A corner pixel of the enlarged image is nearest to the original's corner.
        corners = np.rint(original.images[:, 0, 0] * 255 / 16)
        np.testing.assert_array_equal(images[:, 0, 0, 0], corners)
        assert found.fingerprint() == load_images(holdout=0.1).fingerprint()
        assert load_images(holdout=0.2).fingerprint() != found.fingerprint()

    def test_smallest_holdout_is_one_image(self):
        pytest.importorskip("sklearn.datasets", reason="scikit-learn brings the digits")
        assert len(load_images(holdout=1e-9).valid) == 1
        assert len(load_images(holdout=1 - 1e-9).train) == 1

    def test_without_scikit_learn(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "sklearn", None)
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
        with pytest.raises(ImportError, match=r"pip install 'zeroxla\[images\]'"):
            load_images()


def bilinear(image, size):
    """Each target pixel by the formula, in float64: half-pixel centres, edges repeated."""
    image = image.astype(np.float64) / 127.5 - 1
    height, width, channels = image.shape
    out = np.empty((size, size, channels))
    for i in range(size):
        y = min(max((i + 0.5) * height / size - 0.5, 0.0), height - 1.0)
        top = int(y)
        bottom = min(top + 1, height - 1)
        for j in range(size):
            x = min(max((j + 0.5) * width / size - 0.5, 0.0), width - 1.0)
            left = int(x)
            right = min(left + 1, width - 1)
            out[i, j] = (
                (1 - (y - top)) * (1 - (x - left)) * image[top, left]
                + (1 - (y - top)) * (x - left) * image[top, right]
                + (y - top) * (1 - (x - left)) * image[bottom, left]
                + (y - top) * (x - left) * image[bottom, right]
            )
    return out


@pytest.fixture
def some():
    """50 random images, each with its own label."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (50, 32, 32, 3), dtype=np.uint8)
    return pixels, np.arange(50, dtype=np.int32)


class TestTraining:
    @pytest.mark.smoke
    def test_shapes_and_the_image_of_each_label(self, some):
        images, labels = some
        batch = next(iter(image_batches(images, labels, batch=8, size=64, seed=0)))
        assert batch["image"].shape == (8, 64, 64, 3)
        assert batch["image"].dtype == np.float32
        assert batch["label"].shape == (8,)
        assert batch["label"].dtype == np.int32
        for image, label in zip(batch["image"], batch["label"]):
            # 64 is 2 x 32: each block of 2 x 2 target pixels lies about one source pixel.
            blocks = image.reshape(32, 2, 32, 2, 3).mean(axis=(1, 3))
            source = images[label] / 127.5 - 1
            assert np.corrcoef(blocks.ravel(), source.ravel())[0, 1] > 0.8

    def test_224_is_the_default(self, some):
        assert next(iter(image_batches(*some, batch=1, seed=0)))["image"].shape[1:3] == (224, 224)

    @pytest.mark.parametrize("size", thinned([63], slow=[100, 224]))
    def test_resize_is_bilinear(self, some, size):
        images, labels = some
        batch = next(iter(image_batches(images, labels, batch=2, size=size, seed=0)))
        expected = np.stack([bilinear(images[label], size) for label in batch["label"]])
        np.testing.assert_allclose(batch["image"], expected, rtol=0, atol=1e-6)

    def test_resize_of_images_that_are_not_square(self):
        image = np.random.default_rng(1).integers(0, 256, (1, 20, 31, 3), dtype=np.uint8)
        labels = np.zeros(1, np.int32)
        batch = next(iter(image_batches(image, labels, batch=1, size=63, seed=0)))
        np.testing.assert_allclose(batch["image"][0], bilinear(image[0], 63), rtol=0, atol=1e-6)

    def test_pixels_lie_between_minus_one_and_one(self):
        ends = np.stack([np.zeros((32, 32, 3), np.uint8), np.full((32, 32, 3), 255, np.uint8)])
        (batch,) = validation_image_batches(
            ends, np.arange(2, dtype=np.int32), batch=2, size=63, num_batches=1
        )
        assert (batch["image"][0] == -1).all()
        assert (batch["image"][1] == 1).all()

    def test_seed_chooses_the_images(self, some):
        def first(seed):
            return next(iter(image_batches(*some, batch=8, size=63, seed=seed)))

        np.testing.assert_array_equal(first(0)["image"], first(0)["image"])
        assert not np.array_equal(first(0)["label"], first(1)["label"])

    def test_every_image_comes(self, some):
        iterator = iter(image_batches(*some, batch=32, size=63, seed=0))
        assert {int(n) for _ in range(12) for n in next(iterator)["label"]} == set(range(50))

    def test_position_resumes_bit_exactly_through_json(self, some):
        dataset = image_batches(*some, batch=4, size=63, seed=3, flips=True)
        iterator = iter(dataset)
        for _ in range(5):
            next(iterator)
        position = json.dumps(iterator.get_state())
        expected = [next(iterator) for _ in range(3)]

        other = iter(dataset)
        other.set_state(json.loads(position))
        for batch in expected:
            found = next(other)
            np.testing.assert_array_equal(found["image"], batch["image"])
            np.testing.assert_array_equal(found["label"], batch["label"])
        assert not np.array_equal(expected[0]["label"], expected[1]["label"])

    @pytest.mark.parametrize("shard_count", [2, 4])
    def test_shards_together_are_the_global_batch(self, some, shard_count):
        def take(**shard):
            batches = image_batches(*some, batch=8, size=63, seed=1, flips=True, **shard)
            iterator = iter(batches)
            return [next(iterator) for _ in range(3)]

        parts = [take(shard_index=i, shard_count=shard_count) for i in range(shard_count)]
        for whole, *pieces in zip(take(), *parts, strict=True):
            for key in ("image", "label"):
                joined = np.concatenate([piece[key] for piece in pieces])
                np.testing.assert_array_equal(whole[key], joined)

    def test_half_of_the_images_are_mirrored_if_asked_for(self, some):
        def take(flips):
            iterator = iter(image_batches(*some, batch=16, size=63, seed=0, flips=flips))
            batches = [next(iterator) for _ in range(4)]
            return (np.concatenate([b[key] for b in batches]) for key in ("image", "label"))

        (plain, labels), (mirrored, same_labels) = take(False), take(True)
        np.testing.assert_array_equal(labels, same_labels)
        turned = [not np.array_equal(a, b) for a, b in zip(plain, mirrored)]
        assert 16 < sum(turned) < 48
        for before, after, was_turned in zip(plain, mirrored, turned):
            expected = before[:, ::-1] if was_turned else before
            np.testing.assert_allclose(after, expected, rtol=0, atol=1e-6)


class TestValidation:
    def test_batches_are_fixed_and_span_the_images(self, some):
        first, second = (
            list(validation_image_batches(*some, batch=5, size=63, num_batches=3)) for _ in range(2)
        )
        assert [b["image"].shape for b in first] == [(5, 63, 63, 3)] * 3
        for a, b in zip(first, second):
            np.testing.assert_array_equal(a["image"], b["image"])
        labels = np.concatenate([b["label"] for b in first])
        assert len(set(labels)) == 15
        assert (labels[0], labels[-1]) == (0, 49)
        np.testing.assert_allclose(
            first[0]["image"][0], bilinear(some[0][0], 63), rtol=0, atol=1e-6
        )

    def test_each_image_once_or_again(self, some):
        batches = validation_image_batches(*some, batch=10, size=63, num_batches=5)
        assert [int(n) for b in batches for n in b["label"]] == list(range(50))
        (batch,) = validation_image_batches(
            some[0][:2], some[1][:2], batch=8, size=63, num_batches=1
        )
        assert set(batch["label"]) == {0, 1}


class TestBadArguments:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"size": 62}, "size=62 is too small for AlexNet, .* use 63 at least"),
            ({"batch": 0}, "batch=0 must be at least 1"),
            ({"shard_count": 3}, "batch of 4 does not divide over 3 shards"),
            ({"shard_index": 2, "shard_count": 2}, r"over 2 shards \(index 2\)"),
        ],
    )
    def test_of_the_batches(self, some, change, message):
        options = {"batch": 4, "size": 63, "seed": 0} | change
        with pytest.raises(ValueError, match=message):
            image_batches(*some, **options)

    @pytest.mark.parametrize(
        ("images", "labels", "message"),
        [
            (np.zeros((2, 32, 32, 3), np.float32), np.zeros(2), r"are float32\[2, 32, 32, 3\]"),
            (np.zeros((2, 32, 32), np.uint8), np.zeros(2), r"are uint8\[2, 32, 32\]"),
            (np.zeros((2, 3, 32, 32), np.uint8), np.zeros(2), r"are uint8\[2, 3, 32, 32\]"),
            (np.zeros((0, 32, 32, 3), np.uint8), np.zeros(0), r"N at least 1"),
            (np.zeros((2, 32, 32, 3), np.uint8), np.zeros(3), r"2 images have labels of shape \[3"),
        ],
    )
    def test_of_the_arrays(self, images, labels, message):
        with pytest.raises(ValueError, match=message):
            image_batches(images, labels, batch=1, size=63, seed=0)
        with pytest.raises(ValueError, match=message):
            next(validation_image_batches(images, labels, batch=1, size=63, num_batches=1))

    def test_size_for_validation(self, some):
        with pytest.raises(ValueError, match="size=32 is too small"):
            next(validation_image_batches(*some, batch=1, size=32, num_batches=1))


def test_smallest_size_is_what_alexnet_can_pool():
    def remains(size):
        size = (size + 2 * 2 - 11) // 4 + 1  # convolution of 11, stride 4, padding 2
        for _ in range(3):  # poolings of 3, stride 2; the convolutions between keep the size
            size = (size - 3) // 2 + 1
        return size

    assert remains(MIN_SIZE) == 1
    assert remains(MIN_SIZE - 1) == 0
