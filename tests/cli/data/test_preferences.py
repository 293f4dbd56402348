"""Preferences in tokens: which targets count, what is cut, what is bad; and batches of them."""

from __future__ import annotations

import numpy as np
import pytest
from tools.rows import HELLO, preference_rows, write_lines

from zeroxla.cli.data.bad_rows import BadRows, RowError
from zeroxla.cli.data.chat_template import DEFAULT, ChatTemplate
from zeroxla.cli.data.mixture import RowStream
from zeroxla.cli.data.preferences import (
    PreferenceEncoder,
    preference_batches,
    validation_preference_batches,
)
from zeroxla.cli.data.row_encoder import RowEncoder
from zeroxla.cli.data.row_kinds import Document, Preference, row_of
from zeroxla.cli.data.sources import load_sources
from zeroxla.cli.data.vocabulary import Bytes

USER, HI = HELLO
BYE = {**HI, "content": "Bye"}
PLAIN = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
WITH_ROLE = (  # whose turn begins before the place where the assistant answers
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}[A]{{ m.content }}{% endgeneration %}{% else %}[{{ m.content }}]{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
)
CHANGED = "{% for m in messages %}[{{ m.content }}{{ messages | length }}]{% endfor %}"


def encoder_of(*, source=DEFAULT, length=64, **options):
    template = ChatTemplate(source, Bytes.special)
    return PreferenceEncoder(
        RowEncoder(vocabulary=Bytes(), template=template, length=length, **options)
    )


def encoded(value, **options):
    (found,) = encoder_of(**options).encode([row_of(value)])
    return found


def learned(row):
    """The text of a response's row, and of the targets that count."""
    return tuple(bytes(x.astype(np.uint8)).decode() for x in (row.tokens_T, counted(row)))


def counted(row):
    return row.tokens_T[row.counted_T]


class TestTargets:
    def test_of_texts_are_the_responses_with_their_ends(self):
        found = encoded({"prompt": "1 + 1 = ", "chosen": "2", "rejected": "11"})
        assert learned(found.chosen) == ("\x001 + 1 = 2\0", "2\0")
        assert learned(found.rejected) == ("\x001 + 1 = 11\0", "11\0")

    @pytest.mark.parametrize(
        ("source", "ends"),
        [
            (DEFAULT, ("Hi\0Hi\0", "Bye\0")),
            (PLAIN, ("[Hi][Hi]", "[Bye]")),
            (WITH_ROLE, ("[A]Hi[A]Hi", "[A]Bye")),
        ],
        ids=["marked", "by difference", "with the role"],
    )
    def test_of_conversations_are_the_turns_after_the_prompt(self, source, ends):
        given = [USER, HI, USER]
        value = {"chosen": [*given, HI, USER, HI], "rejected": [*given, BYE]}
        found = encoded(value, source=source, length=200)
        assert learned(found.chosen)[1] == ends[0]
        assert learned(found.rejected)[1] == ends[1]

    def test_of_conversations_with_tools(self):
        value = {"chosen": [USER, HI], "rejected": [USER, BYE], "tools": [{"name": "search"}]}
        found = encoded(value, source="{{ tools[0].name }}" + PLAIN)
        assert learned(found.chosen) == ("search[Hello][Hi]", "[Hi]")
        assert learned(found.rejected) == ("search[Hello][Bye]", "[Bye]")

    def test_a_template_that_writes_the_prompt_otherwise(self):
        value = {"chosen": [USER, HI, USER, HI], "rejected": [USER, BYE]}
        found = encoded(value, source=CHANGED)
        assert learned(found.chosen)[1] == "[Hi4][Hi4]"
        assert learned(found.rejected)[1] == "[Bye2]"

    def test_an_answer_that_cannot_be_found(self):
        value = {"chosen": [USER, HI], "rejected": [USER, {**BYE, "tool_calls": [{"name": "f"}]}]}
        found = encoded(value)
        assert isinstance(found, RowError)
        assert str(found).startswith('"rejected": message 1 of the assistant has "tool_calls"')

    def test_messages_of_an_answer_that_are_not_to_be_learned(self):
        value = {"chosen": [USER, {**HI, "weight": 0}, USER, HI], "rejected": [USER, BYE]}
        assert learned(encoded(value).chosen)[1] == "Hi\0"

    def test_a_row_of_another_kind(self):
        encoder = encoder_of()
        (found,) = encoder.encode([Document("a")])
        assert "it is no preference any more" in str(found)
        row = row_of({"prompt": "a", "chosen": "b", "rejected": "c"})
        assert isinstance(row, Preference)
        (found,) = encoder.rows.encode([row])
        assert "it is a preference" in str(found)


LONG = {"prompt": "abcd", "chosen": "efgh", "rejected": "exyz"}


class TestTooLong:
    def test_responses_are_cut_at_their_ends(self):
        found = encoded(LONG, length=7)
        assert not isinstance(found, RowError)
        chosen, rejected = (row.window(7) for row in (found.chosen, found.rejected))
        assert learned(chosen) == ("\0abcdefg", "efg")
        assert learned(rejected) == ("\0abcdexy", "exy")

    @pytest.mark.parametrize(
        ("length", "options", "reason"),
        [
            (7, {"too_long": "bad"}, '"chosen": the row has 10 bytes, more than the 8 of a'),
            (5, {}, 'the first 6 bytes of "chosen" and "rejected", with the prompt, are equal'),
            (4, {}, '"chosen": the first 5 of its 10 bytes hold nothing to learn'),
        ],
    )
    def test_a_row_that_compares_nothing_is_bad(self, length, options, reason):
        found = encoded(LONG, length=length, **options)
        assert isinstance(found, RowError)
        assert reason in str(found)

    def test_one_response_that_is_too_long(self):
        row = {**LONG, "rejected": "e"}
        found = encoded(row, length=7, too_long="bad")
        assert str(found).startswith('"chosen": the row has 10 bytes')
        row = {**LONG, "chosen": "e"}
        found = encoded(row, length=7, too_long="bad")
        assert str(found).startswith('"rejected": the row has 10 bytes')


def stream_of(file, seed=0):
    bad = BadRows(0.0, print)
    return RowStream(load_sources([file], bad=bad, holdout=0.2), encoder_of(length=24), bad, seed)


@pytest.fixture
def file(tmp_path):
    return write_lines(tmp_path / "preferences.jsonl", preference_rows(60))


class TestBatches:
    def test_hold_both_responses(self, file):
        batches = iter(preference_batches(stream_of(file), batch=4))
        batch = next(batches)
        assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
            "chosen": ((4, 25), np.int32),
            "rejected": ((4, 25), np.int32),
            "chosen_mask": ((4, 24), np.float32),
            "rejected_mask": ((4, 24), np.float32),
        }
        for i in range(4):
            texts = [
                bytes(batch[side][i, 1:][batch[f"{side}_mask"][i] > 0].astype(np.uint8))
                for side in ("chosen", "rejected")
            ]
            assert texts[0].replace(b"yes", b"") == b"\0"
            assert b"xyzw".startswith(texts[1].removesuffix(b"\0"))
        state = batches.get_state()
        rest = [next(batches) for _ in range(3)]
        batches.close()
        again = iter(preference_batches(stream_of(file), batch=4))
        again.set_state(state)
        for want in rest:
            assert all(np.array_equal(x, want[name]) for name, x in next(again).items())
        again.close()

    def test_do_not_depend_on_the_number_of_shards(self, file):
        whole, *parts = (
            iter(preference_batches(stream_of(file), batch=4, shard_index=i, shard_count=n))
            for i, n in ((0, 1), (0, 2), (1, 2))
        )
        want, made = next(whole), [next(part) for part in parts]
        for name, x in want.items():
            assert np.array_equal(np.concatenate([part[name] for part in made]), x)
        for each in (whole, *parts):
            each.close()

    def test_validation_ends_with_empty_pairs(self, file):
        stream = stream_of(file)
        held_out = sum(source.rows.num_valid for source in stream.sources)
        size = held_out - 1
        found = list(validation_preference_batches(stream, batch=size, num_batches=9))
        counts = [int(batch["chosen_mask"].any(axis=1).sum()) for batch in found]
        assert counts == [size, 1]
