"""Rows of JSONL and Parquet files: which are good, which are named as bad, which are held out."""

from __future__ import annotations

import json
import os

import pytest
from tools.rows import HELLO, mixed_rows, stream_of, write_lines

from zeroxla.cli.data import bad_rows, row_files, row_readers
from zeroxla.cli.data.bad_rows import BadRows, RowError
from zeroxla.cli.data.row_files import RowFiles, are_rows
from zeroxla.cli.data.row_kinds import (
    KEYS,
    Conversation,
    Document,
    Pair,
    Preference,
    kind_of,
    row_hash,
    row_of,
)
from zeroxla.cli.data.row_values import read_object
from zeroxla.cli.data.sources import load_sources, with_weight

MANY = 1.0
USER, HI = HELLO
BYE = {**HI, "content": "Bye"}


def read_all(found):
    train = [found.read(i) for i in range(len(found))]
    return train + [found.read(i, valid=True) for i in range(found.num_valid)]


@pytest.fixture
def bad():
    return BadRows(0.0, lambda text: None)


class TestKinds:
    @pytest.mark.smoke
    def test_the_keys_of_a_row_say_its_kind(self, tmp_path, bad):
        tools = [{"name": "search"}]
        lines = [
            {"messages": HELLO, "tools": tools, "prompt": "ignored", "prompt_id": 7},
            {"prompt": "1 + 1 = ", "response": "2", "completion": "two", "text": "ignored"},
            {"prompt": "", "completion": "3", "response": None},
            {"text": "Once", "label": 0},
        ]
        found = read_all(RowFiles([write_lines(tmp_path / "a.jsonl", lines)], bad=bad))
        assert sorted(found, key=repr) == sorted(
            [
                Conversation(tuple(HELLO), tools),
                Pair("1 + 1 = ", "2"),
                Pair("", "3"),
                Document("Once"),
            ],
            key=repr,
        )

    @pytest.mark.parametrize(
        "forms",
        [
            {"prompt": [USER]},
            {"prompt": None},
            {"prompt": "Hello", "messages": HELLO, "score": 3},  # as some files on the hub
        ],
        ids=["prompt", "common beginning", "repeated text"],
    )
    def test_preferences_between_conversations_have_one_meaning(self, forms):
        answers = [[HI], [BYE, USER, HI]]
        if not isinstance(forms["prompt"], list):
            answers = [[USER, *answer] for answer in answers]
        tools = [{"name": "search"}]
        value = {**forms, "tools": tools, **dict(zip(KEYS, answers))}
        row = row_of(read_object(json.dumps(value).encode()))
        chosen, rejected = Conversation((USER, HI), tools, 1), (USER, BYE, USER, HI)
        assert row == Preference(chosen, Conversation(rejected, tools, 1))
        assert kind_of(row) == "ChatPreference"
        assert row_hash(row) != row_hash(Preference(row.rejected, row.chosen))

    def test_messages_with_calls_need_no_content(self):
        calls = {"role": "assistant", "tool_calls": [{"name": "search"}]}
        for content in ({}, {"content": None}):
            value = {"messages": [{**USER, "name": None}, {**calls, **content}]}
            row = row_of(read_object(json.dumps(value).encode()))
            assert row == Conversation((USER, {**calls, "content": ""}))

    def test_a_weight_of_1_and_labels_of_other_things_change_nothing(self):
        for value in (
            {"messages": [USER, {**HI, "weight": 1}], "weight": 70},
            {"messages": [USER, {**HI, "weight": 0}, USER, HI], "label": "maths"},
        ):
            assert row_of(value) == Conversation(tuple(value["messages"]))
        assert row_of({"prompt": "a", "response": "b", "weight": 1}) == Pair("a", "b")

    def test_a_table_for_kto_has_bad_rows(self, tmp_path):
        pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        import pyarrow.parquet as pq

        lines = [{"prompt": f"{i}", "completion": "a", "label": i % 2 == 0} for i in range(4)]
        pq.write_table(pa.Table.from_pylist(lines), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match='the row has "label": true'):
            RowFiles([tmp_path / "a.parquet"], bad=BadRows(MANY, print))

    def test_preferences_between_texts(self, tmp_path, bad):
        lines = [{"prompt": "", "chosen": "a", "rejected": "b", "text": "c"}] * 2
        found = RowFiles([write_lines(tmp_path / "a.jsonl", [*lines, {"text": "c"}])], bad=bad)
        assert found.kinds == {"Preference": 2, "Document": 1}
        assert {kind: place[-2:] for kind, place in found.firsts.items()} == {
            "Preference": ":1",
            "Document": ":3",
        }
        assert Preference(Pair("", "a"), Pair("", "b")) in read_all(found)

    def test_parquet_and_json_lines_give_the_same_rows(self, tmp_path, bad):
        pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        import pyarrow.parquet as pq

        lines, parquet = mixed_rows(600), tmp_path / "a.parquet"
        for kind in range(3):  # a table's columns are those of its first row
            own = lines[kind::3]
            pq.write_table(pa.Table.from_pylist(own), parquet, row_group_size=50)
            by_table = RowFiles([parquet], bad=bad)
            same = RowFiles([write_lines(tmp_path / "a.jsonl", own)], bad=bad)
            assert by_table.fingerprint == same.fingerprint
            assert read_all(by_table) == read_all(same)
            assert by_table.place(0).startswith(f"{parquet}: row ")

    def test_null_columns_of_a_table_count_as_absent(self, tmp_path, bad):
        pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        import pyarrow.parquet as pq

        lines = mixed_rows(30)
        keys = {key: None for line in lines for key in line}
        table = pa.Table.from_pylist([{**keys, **line} for line in lines])
        pq.write_table(table, tmp_path / "a.parquet")
        by_table = RowFiles([tmp_path / "a.parquet"], bad=bad)
        assert read_all(by_table) == read_all(
            RowFiles([write_lines(tmp_path / "a.jsonl", lines)], bad=bad)
        )

    def test_a_damaged_table(self, tmp_path, bad):
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing")
        with pytest.raises(ValueError, match=r"cannot read .*a\.parquet as a Parquet file"):
            RowFiles([tmp_path / "a.parquet"], bad=bad)

    def test_line_ends_blank_lines_and_a_byte_order_mark(self, tmp_path, bad):
        file = tmp_path / "a.json"
        file.write_bytes(
            b'\xef\xbb\xbf{"text": "one"}\r\n\n   \n{"text": "two \xe2\x82\xac"}\n{"text": "three"}'
        )
        found = RowFiles([file], bad=bad)
        assert {row.text for row in read_all(found)} == {"one", "two €", "three"}
        assert {found.place(i).rpartition(":")[2] for i in range(len(found))} < {"1", "4", "5"}


BAD = [
    ("{", "the row is no JSON"),
    ('{"text": "a"} {"text": "b"}', "the row is no JSON (Extra data at character 14)"),
    ("[1]", "the row is a JSON array, no object"),
    ('"text"', "the row is a JSON string"),
    ("12", "the row is a JSON number"),
    ("[" * 100_000, "the row is nested too deeply"),
    ({"message": 1}, 'and "chosen" with "rejected"; its keys: message'),
    ({}, "its keys: none"),
    ({"text": 1}, '"text" is a JSON number; it must be a string'),
    ({"text": ""}, '"text" is empty'),
    ({"text": None}, "its keys: none"),
    ('{"text": "\\ud800"}', "half of a surrogate pair"),
    ({"prompt": "a"}, 'the row has a "prompt", and neither "response" nor "completion"'),
    ({"prompt": "a", "response": ""}, '"response" is empty'),
    ({"prompt": HELLO, "response": "a"}, '"prompt" is a JSON array'),
    ({"messages": "Hello"}, '"messages" is a JSON string'),
    ({"messages": []}, '"messages" is a JSON array; it must be an array with messages'),
    ({"messages": ["Hello"]}, "message 0 is a JSON string, no object"),
    ({"messages": [{"content": "a"}]}, 'message 0 has no "role" that is a string'),
    (
        {"messages": [HELLO[0], {"role": "assistant"}]},
        'message 1 of the assistant has no "content"',
    ),
    ({"messages": [{"role": "user", "content": ["a"]}]}, 'message 0 of the user has no "content"'),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "message 0 of the user has no \"content\" that is text: a part of it is 'image'",
    ),
    ({"messages": [USER, {**HI, "weight": 0.5}]}, 'has "weight": 0.5; it must be 1, to be learned'),
    ({"messages": [USER, {**HI, "train": "no"}]}, "has \"train\": 'no'; it must be 1"),
    ({"messages": [USER, {**HI, "weight": 0}]}, "no message of the assistant is to be learned"),
    ({"messages": HELLO, "weight": 0}, 'the row has "weight": 0, so nothing of it is to be'),
    ({"prompt": "a", "completion": "b", "label": False}, 'the row has "label": false, which says'),
    ({"prompt": "a", "response": "b", "label": 1}, 'the row has "label": 1, which says whether'),
    ({"prompt": [USER], "completion": [HI], "label": True}, 'the row has "label": true'),
    ({"messages": HELLO, "kto_tag": True}, 'pairs with "chosen" and "rejected". Leave "'),
    ({"messages": HELLO[:1]}, "no message is of the assistant, so there is nothing to learn"),
    ({"messages": HELLO, "tools": "search"}, '"tools" is a JSON string; it must be an array'),
    ({"chosen": "a", "prompt": "b"}, 'the row has "chosen" and no "rejected"'),
    ({"rejected": "a", "chosen": None}, 'the row has "rejected" and no "chosen"'),
    ({"chosen": "a", "rejected": "b"}, 'as strings, and no "prompt"'),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are equal, so that nothing is preferred"),
    ({"prompt": "a", "chosen": "", "rejected": "b"}, '"chosen" is empty'),
    ({"prompt": "a", "chosen": 1, "rejected": 2}, '"chosen" is a JSON number'),
    ({"prompt": [USER], "chosen": "a", "rejected": "b"}, '"prompt" is a JSON array'),
    (
        {"prompt": "a", "chosen": "b", "rejected": [BYE]},
        '"chosen" is a JSON string and "rejected" a JSON array; both must be strings, or both',
    ),
    ({"chosen": HELLO, "rejected": HELLO}, "are equal, so that nothing is preferred"),
    ({"chosen": HELLO, "rejected": []}, '"rejected" is a JSON array; it must be an array with'),
    ({"chosen": [USER, {"role": 1}], "rejected": HELLO}, 'of "chosen" message 1 has no "role"'),
    ({"chosen": [HI], "rejected": [BYE]}, "no common beginning, which would be the prompt"),
    (
        {"chosen": HELLO, "rejected": [USER, {**USER, "content": "?"}]},
        'the first 1 messages of "chosen" and "rejected" are equal, and then they do not both',
    ),
    ({"chosen": HELLO, "rejected": [USER]}, "and then they do not both go on with a message"),
    (
        {"prompt": [USER], "chosen": HELLO, "rejected": [BYE]},
        'the first message of "chosen" is of the user, not of the assistant',
    ),
    ({"prompt": HELLO, "chosen": [HI], "rejected": [BYE]}, "the last message before the answers"),
    ({"prompt": "a", "chosen": HELLO, "rejected": [USER, BYE]}, '"prompt" is a string that no'),
    ({"prompt": [], "chosen": [HI], "rejected": [BYE]}, '"prompt" is a JSON array; it must be'),
    ({"chosen": HELLO, "rejected": [USER, BYE], "tools": 1}, '"tools" is a JSON number'),
]


class TestBadRows:
    @pytest.mark.parametrize(("line", "reason"), BAD, ids=[reason[-30:] for _, reason in BAD])
    def test_are_named_with_their_line(self, tmp_path, line, reason):
        good = [{"text": f"good {i}"} for i in range(3)]
        file = write_lines(tmp_path / "a.jsonl", [good[0], line, *good[1:]])
        named = []
        bad = BadRows(MANY, named.append)
        found = RowFiles([file], bad=bad)
        assert len(found) + found.num_valid == 3
        assert (bad.rows, len(bad.found)) == (4, 1)
        (text,) = named
        assert text.startswith(f"{file}:2: ")
        assert reason in text

    def test_bytes_that_are_no_text(self, tmp_path):
        file = tmp_path / "a.jsonl"
        file.write_bytes(b'{"text": "one"}\n{"text": "\xff"}\n{"text": "two"}\n')
        bad = BadRows(MANY, print)
        RowFiles([file], bad=bad)
        assert "no UTF-8" in bad.found[f"{file}:2"]

    def test_a_line_that_is_too_long_is_one_bad_row(self, tmp_path, monkeypatch):
        monkeypatch.setattr(row_readers, "MAX_ROW_BYTES", 1 << 20)
        long = {"text": "a" * (3 << 20)}
        lines = [{"text": "one"}, long, {"text": "two"}, {"text": "three"}]
        bad = BadRows(MANY, print)
        found = RowFiles([write_lines(tmp_path / "a.jsonl", lines)], bad=bad)
        assert list(bad.found.values()) == ["the line is longer than 1 MiB"]
        assert {row.text for row in read_all(found)} == {"one", "two", "three"}

    def test_too_many_are_an_error_that_names_some(self, tmp_path):
        lines = [{"text": f"{i}"} for i in range(97)] + ["x", "y", "z"]
        file = write_lines(tmp_path / "a.jsonl", lines)
        load_sources([file], bad=BadRows(0.03, print))
        with pytest.raises(
            ValueError, match=r"3 of 100 rows are bad, more than the share of 0\.02"
        ):
            load_sources([file], bad=BadRows(0.02, lambda text: None))

    def test_only_the_first_are_named(self, tmp_path):
        lines = [{"text": "one"}, {"text": "two"}] + ["x"] * 30
        named = []
        bad = BadRows(MANY, named.append)
        RowFiles([write_lines(tmp_path / "a.jsonl", lines)], bad=bad)
        assert len(named) == bad_rows.NUM_NAMED + 1
        assert "the next ones are counted, not named" in named[-1]
        assert bad.summary == "30 bad rows"

    def test_a_share_out_of_range(self):
        with pytest.raises(ValueError, match=r"a share of 1\.5 bad rows must lie between 0 and 1"):
            BadRows(1.5, print)

    def test_a_file_that_changes_after_it_was_read(self, tmp_path, bad):
        file = write_lines(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(50)])
        found = RowFiles([file], bad=bad)
        with file.open("r+b") as opened:
            opened.write(b"x" * os.path.getsize(file))
        with pytest.raises(RowError, match="no JSON"):
            found.read(0)
        assert len(found) > 40


def prompt_of(row):
    if isinstance(row.chosen, Pair):
        return row.chosen.prompt
    return row.chosen.messages[0]["content"]


class TestHeldOut:
    def test_a_row_keeps_its_side_when_others_come(self, tmp_path, bad):
        lines = mixed_rows(900)
        before = RowFiles([write_lines(tmp_path / "a.jsonl", lines[:600])], bad=bad, holdout=0.1)
        after = RowFiles([write_lines(tmp_path / "b.jsonl", lines[::-1])], bad=bad, holdout=0.1)
        sides = [
            {repr(found.read(i, valid=True)) for i in range(found.num_valid)}
            for found in (before, after)
        ]
        assert 30 < len(sides[0]) < 100
        assert sides[0] <= sides[1]
        assert before.fingerprint != after.fingerprint

    def test_equal_rows_are_on_one_side(self, tmp_path, bad, monkeypatch):
        """In whatever order their places come into the tables."""
        monkeypatch.setattr(row_files, "_FLUSHED", 7)
        lines = [{"text": f"text {i % 100}", "id": i} for i in range(1000)]
        found = RowFiles([write_lines(tmp_path / "a.jsonl", lines)], bad=bad, holdout=0.2)
        train = {found.read(i).text for i in range(len(found))}
        valid = {found.read(i, valid=True).text for i in range(found.num_valid)}
        assert not train & valid
        assert len(train) + len(valid) == 100

    @pytest.mark.parametrize("chat", [False, True])
    def test_preferences_of_one_prompt_are_on_one_side(self, tmp_path, bad, chat):
        lines = []
        for i in range(300):
            prompt, texts = f"question {i % 60}", (f"good {i}", f"bad {i}")
            given = [{"role": "user", "content": prompt}]
            answers = [[{"role": "assistant", "content": text}] for text in texts]
            row = {"prompt": given if chat else prompt}
            lines.append(row | dict(zip(("chosen", "rejected"), answers if chat else texts)))
        found = RowFiles([write_lines(tmp_path / "a.jsonl", lines)], bad=bad, holdout=0.2)
        asked = [
            {prompt_of(found.read(i, valid=valid)) for i in range(number)}
            for valid, number in ((False, len(found)), (True, found.num_valid))
        ]
        assert len(asked[0]) + len(asked[1]) == 60
        assert 3 < len(asked[1]) < 30

    @pytest.mark.parametrize("holdout", [1e-12, 1 - 1e-12])
    def test_all_of_a_prompt_change_sides(self, tmp_path, bad, holdout):
        lines = [
            {"prompt": f"{i % 3}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(12)
        ]
        found = RowFiles([write_lines(tmp_path / "a.jsonl", lines)], bad=bad, holdout=holdout)
        assert sorted([len(found), found.num_valid]) == [4, 8]
        assert len({row.chosen.response for row in read_all(found)}) == 12

    def test_preferences_of_no_prompt_are_split_as_rows(self, tmp_path, bad):
        lines = [{"prompt": "", "chosen": f"{i}", "rejected": f"-{i}"} for i in range(200)]
        found = RowFiles([write_lines(tmp_path / "a.jsonl", lines)], bad=bad, holdout=0.2)
        assert 20 < found.num_valid < 60

    def test_one_prompt_is_split_nevertheless(self, tmp_path, bad):
        lines = [{"prompt": "a", "chosen": f"{i}", "rejected": f"-{i}"} for i in range(5)]
        found = RowFiles([write_lines(tmp_path / "a.jsonl", lines)], bad=bad)
        assert sorted([len(found), found.num_valid]) == [1, 4]

    @pytest.mark.parametrize("holdout", [1e-12, 1 - 1e-12])
    def test_at_least_one_row_is_on_each_side(self, tmp_path, bad, holdout):
        file = write_lines(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(5)])
        found = RowFiles([file], bad=bad, holdout=holdout)
        assert sorted([len(found), found.num_valid]) == [1, 4]
        assert len({row.text for row in read_all(found)}) == 5

    def test_one_row_is_too_few(self, tmp_path, bad):
        with pytest.raises(ValueError, match=r"1 good rows; give at least two, one to train on"):
            RowFiles([write_lines(tmp_path / "a.jsonl", [{"text": "a"}])], bad=bad)

    def test_holdout_out_of_range(self, tmp_path, bad):
        with pytest.raises(ValueError, match=r"holdout=1\.5"):
            RowFiles([tmp_path / "a.jsonl"], bad=bad, holdout=1.5)


class TestSources:
    def test_weights_stand_behind_the_names(self, tmp_path):
        named = tmp_path / "a=0.5"
        named.write_text("x")
        assert with_weight(named) == (named, None)
        assert with_weight("a.jsonl=2") == (type(named)("a.jsonl"), 2.0)
        assert with_weight("a=b.jsonl") == (type(named)("a=b.jsonl"), None)
        for weight in ("0", "-1", "inf", "nan"):
            with pytest.raises(ValueError, match="give one above 0, such as"):
                with_weight(f"a.jsonl={weight}")

    def test_files_without_weights_are_one_source(self, tmp_path, bad):
        files = [
            write_lines(tmp_path / f"{name}.jsonl", [{"text": f"{name}{i}"} for i in range(50)])
            for name in "ab"
        ]
        (source,) = load_sources(files, bad=bad)
        assert len(source.rows) + source.rows.num_valid == 100
        assert {source.rows.place(i).rpartition(":")[0] for i in range(len(source.rows))} == set(
            map(str, files)
        )

    def test_a_weight_for_some_files_only(self, tmp_path, bad):
        files = [write_lines(tmp_path / f"{n}.jsonl", [{"text": n}, {"text": "x"}]) for n in "ab"]
        with pytest.raises(ValueError, match=r"b\.jsonl has no weight, and other files have one"):
            load_sources([f"{files[0]}=1", files[1]], bad=bad)

    def test_shares_are_the_weights(self, tmp_path):
        names = []
        for name, weight, number in (("a", 0.7, 30), ("b", 0.2, 500), ("c", 0.1, 60)):
            lines = [{"text": f"{name} {i}"} for i in range(number)]
            names.append(f"{write_lines(tmp_path / f'{name}.jsonl', lines)}={weight}")
        drawn = [chr(row.tokens_T[1]) for row in stream_of(*names).rows(range(2000))]
        for letter, share in (("a", 0.7), ("b", 0.2), ("c", 0.1)):
            assert drawn.count(letter) / 2000 == pytest.approx(share, rel=0.01)

    def test_each_has_an_order_of_its_own(self, tmp_path):
        lines = [[{"text": f"{name}{i:02}"} for i in range(40)] for name in "ab"]
        files = [write_lines(tmp_path / f"{x[0]['text']}.jsonl", x) for x in lines]
        stream = stream_of(*(f"{file}=0.5" for file in files), holdout=1e-12)
        files = [source.rows for source in stream.sources]
        numbers = {rows.read(i).text: i for rows in files for i in range(len(rows))}
        drawn = [bytes(row.tokens_T[1:4].astype("u1")).decode() for row in stream.rows(range(60))]
        orders = [[numbers[text] for text in drawn if text[0] == name] for name in "ab"]
        assert len(orders[0]) == len(orders[1]) == 30
        assert orders[0] != orders[1]

    def test_every_row_comes_before_the_first_one_comes_again(self, tmp_path):
        file = write_lines(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(100)])
        stream = stream_of(file)
        number = len(stream.sources[0].rows)
        rounds = [
            [bytes(row.tokens_T.astype("u1")) for row in stream.rows(range(first, first + number))]
            for first in (0, number)
        ]
        assert len(set(rounds[0])) == number
        assert set(rounds[0]) == set(rounds[1])
        assert rounds[0] != rounds[1]
        assert stream_of(file, seed=1).rows(range(3))[0].tokens_T.tolist() != list(rounds[0][0])


class TestFiles:
    def test_missing(self, tmp_path, bad):
        with pytest.raises(ValueError, match=r"cannot read .*a\.jsonl: No such file"):
            RowFiles([tmp_path / "a.jsonl"], bad=bad)

    def test_another_suffix(self, tmp_path, bad):
        with pytest.raises(ValueError, match=r"a\.jsonl\.lz4 ends with \.lz4; rows are read from"):
            RowFiles([tmp_path / "a.jsonl.lz4"], bad=bad)

    def test_rows_and_text_do_not_mix(self):
        assert are_rows(["a.jsonl", "b.json", "c.parquet", "d.CSV", "e.tsv.zst"])
        assert not are_rows(["a.txt", "folder", "b.txt.gz"])
        assert not are_rows([])
        with pytest.raises(ValueError, match=r"a\.jsonl holds rows and folder does not"):
            are_rows(["a.jsonl", "folder"])

    def test_rows_are_json_whatever_their_order_of_keys(self, tmp_path, bad):
        said, tools = [{**x, "name": "x"} for x in HELLO], [{"name": "search"}]
        chat = {"messages": said, "tools": tools}
        turned = {"messages": [dict(reversed(x.items())) for x in said], "tools": tools}
        one = [{"prompt": "a", "response": "b"}, chat]
        other = [json.loads('{"response": "b", "prompt": "a", "id": 3}'), turned]
        without = [one[0], {"messages": said}]
        found = [
            RowFiles([write_lines(tmp_path / f"{i}.jsonl", lines)], bad=bad).fingerprint
            for i, lines in enumerate((one, other, without))
        ]
        assert found[0] == found[1] != found[2]
