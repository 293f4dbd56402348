"""The text pipeline: what is read, what is held out, and that a position replays bit-exactly."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from zeroxla.cli.data.text import (
    SEPARATOR,
    load_corpus,
    training_batches,
    unigram_entropy,
    validation_batches,
)


@pytest.fixture
def folder(tmp_path):
    """30 small text files in nested folders, and things that must not be read."""
    for i in range(30):
        file = tmp_path / f"part{i % 3}" / f"file{i:02d}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"document {i}: " + "abcdefghij"[: i % 10] * 20 + "\n")
    (tmp_path / ".hidden.txt").write_text("HIDDEN")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("HIDDEN")
    (tmp_path / "part0" / "image.bin").write_bytes(b"\x89PNG\0\0BINARY")
    return tmp_path


@pytest.fixture
def bytes_N():
    return np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)


class TestLoadCorpus:
    def test_default_is_the_standard_library(self):
        corpus = load_corpus()
        assert len(corpus.train) > 5_000_000
        assert 0.01 < len(corpus.valid) / len(corpus.train) < 0.2
        assert b"import sys" in corpus.train.tobytes()

    @pytest.mark.smoke
    def test_reads_text_files_in_a_fixed_order_and_nothing_else(self, folder):
        corpus = load_corpus([folder])
        text = corpus.train.tobytes() + corpus.valid.tobytes()
        assert all(f"document {i}:".encode() in text for i in range(30))
        assert b"HIDDEN" not in text
        assert b"BINARY" not in text
        assert corpus.num_train_files + corpus.num_valid_files == 30
        assert corpus.fingerprint() == load_corpus([str(folder)]).fingerprint()

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("a.arrow", b"ARROW1\0\0", "an Arrow file; write it as Parquet"),
            ("a.txt.gz", b"\x1f\x8b\x08", "compressed with gzip"),
            ("a.txt", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
            ("a.txt", b"prompt,response\nHello,Hi\n", "a table of rows, .* end it with .csv"),
            ("a.txt", b'"instruction"\t"output"\r\n', "a table of rows, .* end it with .tsv"),
            ("a.txt", "text".encode("utf-16"), "text in UTF-16; convert it: iconv"),
        ],
    )
    def test_a_file_of_another_kind_is_named(self, tmp_path, name, content, said):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name) as caught:
            load_corpus([tmp_path / name])
        assert re.search(said, str(caught.value))

    def test_a_text_that_begins_like_a_table_is_a_text(self, tmp_path):
        (tmp_path / "a.txt").write_text("system, input, and text\nare words, too\n" * 9)
        assert load_corpus([tmp_path / "a.txt"]).num_train_files == 1

    def test_a_pointer_of_git_lfs_in_a_folder_is_named(self, folder):
        (folder / "z.txt").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid\n")
        with pytest.raises(ValueError, match=r"z\.txt is a pointer of Git LFS"):
            load_corpus([folder])

    @pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "train-00000.parquet"])
    def test_a_folder_of_rows_is_not_taken_for_text(self, tmp_path, name):
        """As the data sets of the hub are: a README beside tables, which alone would be learned."""
        (tmp_path / "README.md").write_text("a page about the rows")
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / name).write_bytes(b"PAR1\0" * 100 if "parquet" in name else b"{}" * 99)
        with pytest.raises(ValueError, match=r"name these files: --data .*/data/\*\."):
            load_corpus([tmp_path])
        (tmp_path / "README.md").write_text("a long page" * 100)
        assert b"a long page" in load_corpus([tmp_path]).train.tobytes()

    def test_every_document_starts_after_a_separator(self, folder):
        corpus = load_corpus([folder])
        documents = corpus.train.tobytes().split(b"\0")
        assert documents[0] == b""
        assert len(documents) - 1 == corpus.num_train_files
        assert all(d.startswith(b"document ") for d in documents[1:])

    def test_held_out_files_do_not_move_when_a_file_is_added(self, folder):
        def held_out():
            return set(load_corpus([folder], holdout=0.3).valid.tobytes().split(b"\0"))

        before = held_out()
        (folder / "another.txt").write_text("document new\n")
        assert len(before) > 2
        assert before <= held_out()

    def test_at_least_one_file_is_held_out_and_one_is_kept(self, folder):
        assert load_corpus([folder], holdout=1e-9).num_valid_files == 1
        assert load_corpus([folder], holdout=1 - 1e-9).num_train_files == 1

    def test_one_file_gives_its_tail(self, tmp_path):
        file = tmp_path / "book.md"
        file.write_bytes(b"x" * 950 + b"y" * 50)
        corpus = load_corpus([file])
        assert corpus.train.tobytes() == b"\0" + b"x" * 950
        assert corpus.valid.tobytes() == b"\0" + b"y" * 50

    def test_several_paths_are_joined(self, tmp_path):
        (tmp_path / "a").write_bytes(b"a" * 100)
        (tmp_path / "b").write_bytes(b"b" * 100)
        corpus = load_corpus([tmp_path / "a", tmp_path / "b"])
        assert corpus.train.tobytes() == b"\0" + b"a" * 95 + b"\0" + b"b" * 95

    def test_a_changed_byte_changes_the_fingerprint(self, folder):
        before = load_corpus([folder]).fingerprint()
        file = folder / "part1" / "file01.txt"
        file.write_bytes(file.read_bytes().replace(b"1", b"2"))
        assert load_corpus([folder]).fingerprint() != before

    def test_missing_path_is_named(self, tmp_path):
        with pytest.raises(ValueError, match=r"cannot read .*nowhere: No such file"):
            load_corpus([tmp_path / "nowhere"])

    def test_unreadable_file_in_a_folder_is_named(self, folder):
        (folder / "dangling.txt").symlink_to(folder / "nothing")
        with pytest.raises(ValueError, match=r"cannot read .*dangling\.txt"):
            load_corpus([folder])

    def test_empty_folder(self, tmp_path):
        with pytest.raises(ValueError, match="holds no visible file"):
            load_corpus([tmp_path])

    def test_folder_of_binary_files(self, tmp_path):
        (tmp_path / "a.png").write_bytes(b"\x89PNG\0")
        with pytest.raises(ValueError, match="holds 1 files, but none is text"):
            load_corpus([tmp_path])

    def test_empty_files(self, tmp_path):
        (tmp_path / "a.txt").write_bytes(b"")
        with pytest.raises(ValueError, match="every file is empty"):
            load_corpus([tmp_path / "a.txt"])

    def test_holdout_out_of_range(self, folder):
        with pytest.raises(ValueError, match=r"holdout=1\.5"):
            load_corpus([folder], holdout=1.5)


class TestTrainingBatches:
    @pytest.mark.smoke
    def test_shape_dtype_and_content(self, bytes_N):
        batch = next(iter(training_batches(bytes_N, batch=4, length=16, seed=0)))
        assert list(batch) == ["tokens"]
        assert batch["tokens"].shape == (4, 17)
        assert batch["tokens"].dtype == np.int32
        text = bytes_N.tobytes()
        assert all(bytes(row.astype(np.uint8)) in text for row in batch["tokens"])

    def test_deterministic_by_seed(self, bytes_N):
        def first(seed):
            return next(iter(training_batches(bytes_N, batch=4, length=16, seed=seed)))

        np.testing.assert_array_equal(first(0)["tokens"], first(0)["tokens"])
        assert not np.array_equal(first(0)["tokens"], first(1)["tokens"])

    @pytest.mark.smoke
    def test_position_resumes_bit_exactly_through_json(self, bytes_N):
        dataset = training_batches(bytes_N, batch=4, length=16, seed=3)
        iterator = iter(dataset)
        for _ in range(5):
            next(iterator)
        position = json.dumps(iterator.get_state())
        expected = [next(iterator)["tokens"] for _ in range(3)]

        other = iter(dataset)
        other.set_state(json.loads(position))
        for tokens in expected:
            np.testing.assert_array_equal(next(other)["tokens"], tokens)
        assert not np.array_equal(expected[0], expected[1])

    def test_every_window_is_reachable_and_no_more(self):
        bytes_N = np.arange(20, dtype=np.uint8)
        iterator = iter(training_batches(bytes_N, batch=2, length=7, seed=0))
        starts = {int(row[0]) for _ in range(200) for row in next(iterator)["tokens"]}
        assert starts == set(range(13))

    @pytest.mark.parametrize("shard_count", [2, 4])
    def test_shards_together_are_the_global_batch(self, bytes_N, shard_count):
        def take(**shard):
            iterator = iter(training_batches(bytes_N, batch=8, length=16, seed=1, **shard))
            return [next(iterator)["tokens"] for _ in range(3)]

        parts = [take(shard_index=i, shard_count=shard_count) for i in range(shard_count)]
        for whole, *pieces in zip(take(), *parts, strict=True):
            np.testing.assert_array_equal(whole, np.concatenate(pieces))

    def test_documents_shorter_than_a_window(self, tmp_path):
        for i in range(40):
            (tmp_path / f"{i:02d}").write_text(f"short {i}")
        corpus = load_corpus([tmp_path])
        batch = next(iter(training_batches(corpus.train, batch=2, length=64, seed=0)))
        assert (batch["tokens"] == SEPARATOR).sum(axis=1).min() >= 5

    def test_fewer_bytes_than_one_batch(self, bytes_N):
        with pytest.raises(ValueError, match=r"has 5000 tokens, fewer than one batch of 64 x 129"):
            training_batches(bytes_N, batch=64, length=128, seed=0)

    def test_batch_that_does_not_divide_over_shards(self, bytes_N):
        with pytest.raises(ValueError, match="batch of 6 does not divide over 4 shards"):
            training_batches(bytes_N, batch=6, length=16, seed=0, shard_count=4)

    def test_size_zero(self, bytes_N):
        with pytest.raises(ValueError, match="batch=0"):
            training_batches(bytes_N, batch=0, length=16, seed=0)


class TestValidation:
    def test_batches_are_fixed_and_span_the_text(self):
        bytes_N = np.arange(250, dtype=np.uint8)
        first, second = (
            list(validation_batches(bytes_N, batch=4, length=9, num_batches=3)) for _ in range(2)
        )
        assert [b["tokens"].shape for b in first] == [(4, 10)] * 3
        np.testing.assert_array_equal(first[1]["tokens"], second[1]["tokens"])
        assert first[0]["tokens"][0, 0] == 0
        assert first[-1]["tokens"][-1, -1] == 249

    def test_text_of_exactly_one_window(self):
        (batch,) = validation_batches(
            np.arange(10, dtype=np.uint8), batch=2, length=9, num_batches=1
        )
        np.testing.assert_array_equal(batch["tokens"], np.arange(10)[None].repeat(2, 0))

    def test_text_shorter_than_one_window(self):
        with pytest.raises(ValueError, match="has 9 tokens, fewer than one window of 10"):
            list(validation_batches(np.zeros(9, np.uint8), batch=2, length=9, num_batches=1))

    def test_unigram_entropy_against_known_values(self):
        assert unigram_entropy(np.zeros(10, np.uint8)) == 0
        uniform = np.arange(256, dtype=np.uint8)
        assert unigram_entropy(uniform) == pytest.approx(np.log(256), rel=1e-15)
        p = 0.25
        expected = -(p * np.log(p) + (1 - p) * np.log(1 - p))
        assert unigram_entropy(np.array([7, 9, 9, 9], np.uint8)) == pytest.approx(expected)
