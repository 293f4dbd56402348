"""Batches of rows: what counts, which rows come, how a position goes on; packed and unpacked."""

from __future__ import annotations

import collections
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tools.packed_attention import reference_loss, reference_params
from tools.rows import HELLO, mixed_rows, stream_of, write_lines

from zeroxla.cli.data.packing import fill_of, pack, packed_batches, packed_validation_batches
from zeroxla.cli.data.row_batches import padded, row_batches, validation_row_batches
from zeroxla.cli.data.row_encoder import TokenRow
from zeroxla.cli.train.island import move_to

MAKERS = {
    "unpacked": lambda stream, **options: row_batches(stream, batch=8, **options),
    "packed": lambda stream, **options: packed_batches(stream, batch=8, window=24, **options),
}
both = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@pytest.fixture
def file(tmp_path):
    return write_lines(tmp_path / "a.jsonl", mixed_rows(300))


def take(dataset, number, state=None, skip=0):
    """Return some batches of a dataset, and the state after them."""
    batches = iter(dataset)
    if state is not None:
        batches.set_state(json.loads(json.dumps(state)))
    found = [next(batches) for _ in range(number)]
    state = batches.get_state()
    batches.close()
    return found[skip:], state


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert one.keys() == other.keys()
        for name, x in one.items():
            assert x.dtype == other[name].dtype
            np.testing.assert_array_equal(x, other[name])


def text_of(tokens):
    return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")


class TestTargets:
    def counted(self, tmp_path, row, **options):
        """Return the whole text of a row's batch, and the targets that count."""
        file = write_lines(tmp_path / "a.jsonl", [row, row])
        ((batch,), _) = take(row_batches(stream_of(file, **options), batch=1), 1)
        tokens, mask = batch["tokens"][0], batch["mask"][0]
        return text_of(tokens), text_of(tokens[1:][mask != 0])

    @pytest.mark.smoke
    def test_of_a_conversation_are_the_assistants(self, tmp_path):
        text, counted = self.counted(tmp_path, {"messages": HELLO}, length=40)
        assert text.startswith("\0<|user|>\nHello\n<|assistant|>\nHi\0\n")
        assert counted == "Hi\0"

    def test_of_a_pair_are_the_responses(self, tmp_path):
        row = {"prompt": "1 + 1 = ", "response": "2"}
        assert self.counted(tmp_path, row, length=12) == ("\x001 + 1 = 2\0\0\0", "2\0")

    def test_of_a_document_are_all_but_the_first(self, tmp_path):
        assert self.counted(tmp_path, {"text": "Once"}, length=5) == ("\0Once\0", "Once\0")

    def test_a_long_pair_is_cut_or_bad(self, tmp_path):
        row = {"prompt": "ab", "response": "cdefgh"}
        assert self.counted(tmp_path, row, length=4) == ("\0abcd", "cd")
        with pytest.raises(ValueError, match="10 bytes, more than the 5 of a sequence"):
            self.counted(tmp_path, row, length=4, too_long="bad")
        whole = self.counted(tmp_path, row, length=9, too_long="bad")
        assert whole == ("\0abcdefgh\0", "cdefgh\0")

    def test_of_a_long_document_a_window_at_any_place(self, tmp_path):
        file = write_lines(tmp_path / "a.jsonl", [{"text": "abcdefghij" * 3}] * 2)
        stream = stream_of(file, length=6)
        (row,) = stream.rows([0])
        assert text_of(row.window(6, 0.0).tokens_T) == "\0abcdef"
        assert text_of(row.window(6, 1.0).tokens_T) == "efghij\0"
        found, _ = take(row_batches(stream, batch=8), 8)
        starts = {bytes(row.astype(np.uint8)) for batch in found for row in batch["tokens"]}
        assert len(starts) > 8
        assert all(batch["mask"].all() for batch in found)

    def test_of_a_packed_long_document_each_is_learned_once(self, tmp_path):
        text = "".join(chr(48 + i) for i in range(70))
        file = write_lines(tmp_path / "a.jsonl", [{"text": text}, {"text": text}])
        stream = stream_of(file, length=16)
        pieces = stream.rows([0])[0].pieces(16)
        assert "".join(text_of(piece.tokens_T[piece.counted_T]) for piece in pieces) == f"{text}\0"
        assert all(len(piece.tokens_T) <= 17 for piece in pieces)
        assert not any(piece.counted_T[0] for piece in pieces)
        ((batch,), _) = take(packed_batches(stream, batch=len(pieces), window=1), 1)
        learned = batch["tokens"][:, 1:][batch["mask"] != 0]
        assert sorted(text_of(learned)) == sorted(f"{text}\0")


class TestPosition:
    @both
    @pytest.mark.smoke
    def test_goes_on_with_the_same_batches(self, file, make):
        whole, _ = take(make(stream_of(file)), 30)
        for number in (0, 1, 7, 16, 29):
            begun, state = take(make(stream_of(file)), number)
            assert_equal(begun, whole[:number])
            rest, _ = take(make(stream_of(file)), 30 - number, state)
            assert_equal(rest, whole[number:])

    @both
    def test_can_be_moved_to_a_number_of_batches(self, file, make):
        """As an island does that comes later."""
        whole, _ = take(make(stream_of(file)), 12)
        batches = iter(make(stream_of(file)))
        move_to(batches, 9)
        assert_equal([next(batches) for _ in range(3)], whole[9:])
        assert batches.get_state()["next_index"] == 12
        batches.close()

    @both
    def test_another_seed_gives_other_batches(self, file, make):
        one, _ = take(make(stream_of(file)), 1)
        other, _ = take(make(stream_of(file, seed=2**40 + 1)), 1)
        assert not np.array_equal(one[0]["tokens"], other[0]["tokens"])
        assert stream_of(file).draw(3) != stream_of(file, seed=1).draw(3)

    @both
    @pytest.mark.parametrize("count", [2, 4])
    def test_batches_do_not_depend_on_the_number_of_processes(self, file, make, count):
        whole, _ = take(make(stream_of(file)), 10)
        parts = [
            take(make(stream_of(file), shard_index=index, shard_count=count), 10)[0]
            for index in range(count)
        ]
        joined = [
            {name: np.concatenate([part[name] for part in batch]) for name in batch[0]}
            for batch in zip(*parts)
        ]
        assert_equal(joined, whole)

    @both
    def test_a_batch_that_does_not_divide(self, file, make):
        with pytest.raises(ValueError, match="batch of 8 does not divide over 3 shards"):
            make(stream_of(file), shard_count=3)

    @both
    def test_survives_kills(self, file, make, tmp_path, request):
        """Every batch is the same, in whatever process it was made."""
        kind = request.node.callspec.id
        expected = {
            str(i): str(batch["tokens"].tolist())
            for i, batch in enumerate(take(make(stream_of(file)), 12)[0])
        }
        made, kills = [], 0
        for stop_after in (2, 5, 12):
            process = subprocess.Popen(
                [sys.executable, "-c", DRAW, kind, str(file), str(tmp_path / "position")],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            for line in process.stdout:
                made.append(line.strip().split("=", 1))
                if len(made) >= stop_after and kills < 2:
                    os.kill(process.pid, signal.SIGKILL)
                    kills += 1
                    break
            made += [line.strip().split("=", 1) for line in process.stdout]
            process.stdout.close()
            process.wait()
        assert process.returncode == 0
        assert {number for number, _ in made} == set(expected)
        assert all(expected[number] == tokens for number, tokens in made)


DRAW = """
import json, pathlib, sys
from tools.rows import stream_of
from zeroxla.cli.data.packing import packed_batches
from zeroxla.cli.data.row_batches import row_batches

def draw(kind, file, saved):
    stream = stream_of(file)
    packed = kind == "packed"
    made = packed_batches(stream, batch=8, window=24) if packed else row_batches(stream, batch=8)
    batches, first = iter(made), 0
    if saved.exists():
        state = json.loads(saved.read_text())
        batches.set_state(state)
        first = state["next_index"]
    for number in range(first, 12):
        print(f"{number}={next(batches)['tokens'].tolist()}", flush=True)
        new = saved.with_suffix(".new")
        new.write_text(json.dumps(batches.get_state()))
        new.replace(saved)
    batches.close()

draw(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]))
"""


class TestBadRows:
    def write(self, tmp_path, number):
        long = {"prompt": "p" * 60, "response": "never reached"}
        good = [{"prompt": f"{i}", "response": "r" * (1 + i % 9)} for i in range(97)]
        return write_lines(tmp_path / "a.jsonl", [*good, *[long] * number])

    @both
    def test_rows_without_targets_are_named_and_others_take_their_place(self, tmp_path, make):
        file, named = self.write(tmp_path, 3), []
        found, _ = take(make(stream_of(file, limit=0.1, report=named.append)), 40)
        assert all(batch["mask"].any(axis=1).all() for batch in found)
        assert 1 <= len(named) <= 3
        assert all("the first 49 of its 75 bytes hold nothing to learn" in text for text in named)
        assert all(Path(text.partition(":")[0]) == file for text in named)
        again, _ = take(make(stream_of(file, limit=0.1)), 40)
        assert_equal(again, found)

    def test_substitutes_are_drawn_one_by_one(self, tmp_path):
        file = self.write(tmp_path, 97)
        rows = stream_of(file, limit=1.0).rows(range(100))
        times = collections.Counter(bytes(row.tokens_T) for row in rows)
        assert max(times.values()) < 10

    @both
    def test_too_many_are_an_error(self, tmp_path, make):
        file = self.write(tmp_path, 3)
        batches = iter(make(stream_of(file, limit=0.01)))
        with pytest.raises(ValueError, match=r"rows are bad, more than the share of 0\.01"):
            collections.deque(itertools.islice(batches, 100))
        batches.close()

    def test_that_are_all_there_is_are_an_error(self, tmp_path):
        long = [{"prompt": "p" * 60, "response": f"{i}"} for i in range(9)]
        stream = stream_of(write_lines(tmp_path / "a.jsonl", long), limit=1.0)
        with pytest.raises(ValueError, match=r"100 rows that were drawn .* hold nothing to learn"):
            stream.rows([0])
        with pytest.raises(ValueError, match="none of the held-out rows can be used"):
            list(validation_row_batches(stream, batch=1, num_batches=1))

    def test_that_are_held_out_are_named_and_counted(self, tmp_path):
        file, named = self.write(tmp_path, 97), []
        stream = stream_of(file, limit=1.0, holdout=0.3, report=named.append)
        held_out = stream.sources[0].rows
        places = {held_out.place(i, valid=True) for i in range(held_out.num_valid)}
        left = stream.validation(1000)
        assert 0 < len(left) < len(places)
        assert {text.rpartition(": ")[0] for text in named[:20]} <= places
        with pytest.raises(ValueError, match=r"rows are bad, more than the share of 0\.01"):
            stream_of(file, limit=0.01, holdout=0.3).validation(1000)


class TestPacked:
    @pytest.fixture
    def batches(self, file):
        return take(packed_batches(stream_of(file, length=96), batch=8, window=64), 12)[0]

    @pytest.mark.smoke
    def test_keep_the_contract(self, batches):
        for batch in batches:
            assert {name: x.dtype.name for name, x in batch.items()} == {
                **{"tokens": "int32", "mask": "int8", "segments": "int32", "positions": "int32"}
            }
            assert batch["tokens"].shape == (8, 97)
            assert {batch[name].shape for name in ("mask", "segments", "positions")} == {(8, 96)}
            for segments, positions, mask in zip(
                batch["segments"], batch["positions"], batch["mask"]
            ):
                found = segments[segments != 0]
                assert not segments[len(found) :].any()  # padding is at the end
                assert (np.diff(found) >= 0).all()
                assert list(dict.fromkeys(found)) == list(range(1, found[-1] + 1))
                for number in range(1, found[-1] + 1):
                    own = positions[segments == number]
                    assert own.tolist() == list(range(len(own)))
                # A target after the last input of a segment is the first token of the next one.
                borders = np.flatnonzero(np.diff(segments) != 0)
                assert not mask[borders].any()
                assert set(np.unique(mask)) <= {0, 1}

    def test_hold_every_row_once_in_a_round(self, file):
        """And the batches of a round are not sorted by the lengths of their rows."""
        stream = stream_of(file, length=96)
        rows = len(stream.sources[0].rows)
        found, _ = take(packed_batches(stream, batch=8, window=rows), 20)
        texts, longest = [], []
        for batch in found:
            for tokens, segments in zip(batch["tokens"], batch["segments"]):
                own = [text_of(tokens[:-1][segments == i]) for i in range(1, segments.max() + 1)]
                texts += own
                longest.append(max(map(len, own)))
        for first in (0, rows):
            assert len(set(texts[first : first + rows])) == rows
        assert longest[:40] != sorted(longest[:40], reverse=True)

    def test_loss_is_that_of_unpacked_rows(self, batches):
        params = reference_params(96)
        for batch in batches[:3]:
            rows = []
            for tokens, mask, segments in zip(batch["tokens"], batch["mask"], batch["segments"]):
                for number in range(1, segments.max() + 1):
                    (own,) = np.nonzero(segments == number)
                    counted = np.concatenate([[0], mask[own]]).astype(bool)
                    rows.append(TokenRow(tokens[own[0] : own[-1] + 2], counted))
            unpacked = padded(rows, len(rows), 96)
            packed_loss, unpacked_loss = (
                jax.jit(reference_loss)(params, x) for x in (batch, unpacked)
            )
            assert len(rows) > 16
            assert unpacked["mask"].sum() == batch["mask"].sum()
            assert abs(packed_loss - unpacked_loss) < 1e-5
            mixed = {**batch, "segments": np.ones_like(batch["segments"])}
            assert abs(jax.jit(reference_loss)(params, mixed) - unpacked_loss) > 1e-3

    def test_no_length_is_lost_and_no_bin_overflows(self):
        lengths = np.random.default_rng(0).integers(1, 9, 500).tolist()
        bins = pack(lengths, 17)
        assert sorted(i for numbers in bins for i in numbers) == list(range(500))
        sums = [sum(lengths[i] for i in numbers) for numbers in bins]
        assert max(sums) <= 17
        assert len(bins) <= 1.02 * sum(lengths) / 17
        assert pack([], 17) == []
        assert pack([8, 9, 8], 17) == [[0, 1], [2]]

    @pytest.mark.parametrize(("median", "sigma"), [(30, 1.0), (75, 0.8)])
    def test_fill_sequences_of_lognormal_lengths(self, tmp_path, median, sigma):
        lengths = np.random.default_rng(0).lognormal(np.log(median), sigma, 4000).astype(int)
        lines = [{"prompt": "", "response": f"{i}".ljust(n, ".")} for i, n in enumerate(lengths)]
        file = write_lines(tmp_path / "a.jsonl", lines)
        found, _ = take(packed_batches(stream_of(file, length=256), batch=32), 16)
        assert np.mean([fill_of(batch) for batch in found]) > 0.98


class TestValidation:
    def batches(self, file, make, **options):
        return list(make(stream_of(file, holdout=0.2), **options))

    def test_is_always_the_same_and_over_the_same_targets(self, file):
        unpacked, again, packed = (
            self.batches(file, make, batch=8, num_batches=3)
            for make in (validation_row_batches, validation_row_batches, packed_validation_batches)
        )
        assert_equal(unpacked, again)
        assert sum(x["mask"].sum() for x in packed) == sum(x["mask"].sum() for x in unpacked)
        assert len(packed) <= len(unpacked) == 3

    def test_of_few_rows_ends_with_empty_ones(self, tmp_path):
        file = write_lines(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(10)])
        (batch,) = validation_row_batches(stream_of(file), batch=8, num_batches=4)
        assert batch["mask"].any(axis=1).sum() < 8
        assert batch["tokens"].shape == (8, 49)

    def test_is_taken_by_the_weights_at_equal_distances(self, tmp_path):
        names = []
        for name, weight in (("a", 0.6), ("b", 0.2), ("c", 0.2)):
            lines = [{"text": f"{name}{i:03}"} for i in range(200)]
            names.append(f"{write_lines(tmp_path / f'{name}.jsonl', lines)}={weight}")
        stream = stream_of(*names, holdout=0.3)
        found = [text_of(row.tokens_T[1:5]) for row in stream.validation(20)]
        assert [text[0] for text in found] == [*"a" * 12, *"b" * 4, *"c" * 4]
        numbers = [int(text[1:]) for text in found[:12]]
        assert numbers == sorted(numbers)
        assert max(np.diff(numbers)) < 50 < 150 < numbers[-1]
        assert len(stream.validation(3)) == 3  # of 2 + 1 + 1

    def test_takes_no_row_to_train_on(self, file):
        stream = stream_of(file, holdout=0.2)
        rows = stream.sources[0].rows
        train = {bytes(x.tokens_T) for x in stream.rows(range(len(rows)))}
        assert not train & {bytes(x.tokens_T) for x in stream.validation(1000)}
        assert len(stream.validation(1000)) == rows.num_valid
