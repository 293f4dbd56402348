"""Files of rows in every form: the same rows, whatever file they come in; other files are named."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest
from tools.rows import HELLO, stream_of, write_lines

from zeroxla.cli.data import row_readers
from zeroxla.cli.data.bad_rows import BadRows
from zeroxla.cli.data.prompt_rows import prompt_rows
from zeroxla.cli.data.row_batches import row_batches
from zeroxla.cli.data.row_files import RowFiles

ODD = ['two\nlines, and a "quote"', "tab\tand ; and |", "€ 𝄞 \u2028", "  spaces  ", '{"a": [1]}']
PAIRS = [{"prompt": f"{i} {text}", "response": f"{text} {i}"} for i in range(12) for text in ODD]
CHATS = [{"messages": [{**HELLO[0], "content": f"{i} {x}"}, HELLO[1]]} for i, x in enumerate(ODD)]


def lines_of(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def array_of(rows, indent=None):
    return json.dumps(rows, ensure_ascii=False, indent=indent).encode()


def table_of(rows, delimiter):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*rows[0]], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def parquet_of(rows):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=7)
    return file.getvalue()


def zstandard(data):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    file = pa.BufferOutputStream()
    with pa.CompressedOutputStream(file, "zstd") as packed:
        packed.write(data)
    return file.getvalue().to_pybytes()


def read(path, **bad):
    found = RowFiles([path], bad=BadRows(bad.get("limit", 0.0), lambda text: None), holdout=0.2)
    return found, [found.read(i) for i in range(len(found))]


FORMS = {
    "a.json": lambda: array_of(PAIRS),
    "pretty.json": lambda: array_of(PAIRS, 2),
    "array.jsonl": lambda: b"\xef\xbb\xbf\n " + array_of(PAIRS, 1) + b"\n\n",
    "jq.json": lambda: b"\n".join(array_of(row, 1) for row in PAIRS),
    "a.ndjson": lambda: lines_of(PAIRS),
    "a.csv": lambda: table_of(PAIRS, ","),
    "mark.CSV": lambda: b"\xef\xbb\xbf" + table_of(PAIRS, ","),
    "semicolon.csv": lambda: table_of(PAIRS, ";"),
    "a.tsv": lambda: table_of(PAIRS, "\t"),
    "a.parquet": lambda: parquet_of(PAIRS),
    "a.jsonl.gz": lambda: (
        gzip.compress(lines_of(PAIRS)[:500]) + gzip.compress(lines_of(PAIRS)[500:])
    ),
    "a.jsonl.bz2": lambda: bz2.compress(lines_of(PAIRS)),
    "a.json.xz": lambda: lzma.compress(array_of(PAIRS, 2)),
    "a.jsonl.zst": lambda: zstandard(lines_of(PAIRS)),
    "a.csv.gz": lambda: gzip.compress(table_of(PAIRS, ",")),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return read(write_lines(tmp_path_factory.mktemp("lines") / "a.jsonl", PAIRS))


class TestForms:
    @pytest.mark.smoke
    @pytest.mark.parametrize("name", FORMS)
    def test_hold_the_same_rows_in_the_same_order(self, tmp_path, expected, name, monkeypatch):
        monkeypatch.setattr(row_readers, "_CHUNK", 64)  # rows that several pieces hold
        (tmp_path / name).write_bytes(FORMS[name]())
        found, rows = read(tmp_path / name)
        assert rows == expected[1]
        assert found.fingerprint == expected[0].fingerprint
        assert found.num_valid == expected[0].num_valid > 1

    @pytest.mark.parametrize("name", ["pretty.json", "a.csv.gz", "a.parquet"])
    def test_resume_exactly(self, tmp_path, name):
        (tmp_path / name).write_bytes(FORMS[name]())
        batches, others = (iter(row_batches(stream_of(tmp_path / name), batch=4)) for _ in range(2))
        for _ in range(3):
            next(batches)
        others.set_state(batches.get_state())
        assert np.array_equal(next(batches)["tokens"], next(others)["tokens"])
        batches.close()
        others.close()

    def test_empty_cells_of_a_table_are_absent(self, tmp_path):
        rows = [
            {"prompt": "", "response": "a", "text": ""},
            {"prompt": "", "response": "", "text": "b"},
            {"prompt": "c", "response": "d", "text": ""},
        ]
        (tmp_path / "a.csv").write_bytes(table_of(rows, ","))
        found, _ = read(tmp_path / "a.csv")
        assert found.kinds == {"Pair": 2, "Document": 1}

    def test_messages_of_a_table_are_json(self, tmp_path):
        cells = [{"messages": json.dumps(row["messages"])} for row in CHATS]
        (tmp_path / "a.csv").write_bytes(table_of(cells, ","))
        assert read(tmp_path / "a.csv")[0].fingerprint == (
            read(write_lines(tmp_path / "a.jsonl", CHATS))[0].fingerprint
        )

    def test_fields_of_a_table_that_are_null_are_absent_at_any_depth(self, tmp_path):
        call = {"name": "f", "id": None, "arguments": {"x": 1, "y": None, "z": [None, 2]}}
        said = {"role": "assistant", "content": "", "tool_calls": [call], "name": None}
        rows = [{"messages": [{**HELLO[0], "content": str(i)}, said]} for i in range(3)]
        (tmp_path / "a.parquet").write_bytes(parquet_of(rows))
        (_, learned) = read(tmp_path / "a.parquet")[1][0].messages
        arguments = {"x": 1, "z": [None, 2]}
        assert learned["tool_calls"] == [{"name": "f", "arguments": arguments}]
        assert "name" not in learned

    def test_bytes_of_a_table_are_text(self, tmp_path):
        rows = [{"text": f"{i} €".encode()} for i in range(3)] + [{"text": b"\xff"}]
        (tmp_path / "a.parquet").write_bytes(parquet_of(rows))
        found, rows = read(tmp_path / "a.parquet", limit=0.5)
        assert {row.text[1:] for row in rows} == {" €"}
        assert len(rows) + found.num_valid == 3

    def test_one_bad_row_of_a_form_is_named_alone(self, tmp_path):
        bad = [*PAIRS[:5], {"prompt": 1, "response": "a"}, *PAIRS[5:]]
        (tmp_path / "a.json").write_bytes(array_of(bad, 1))
        (tmp_path / "a.csv").write_bytes(table_of(PAIRS[:6], ",") + b"too,many,cells\r\n")
        for name, row in (("a.json", 6), ("a.csv", 7)):
            named = []
            RowFiles([tmp_path / name], bad=BadRows(0.5, named.append))
            (text,) = named
            assert text.startswith(f"{tmp_path / name}: row {row}: ")

    def test_prompts_come_in_all_of_them(self, tmp_path):
        (tmp_path / "a.json").write_bytes(array_of([{"prompt": "a"}, {"prompt": "b", "id": 3}], 1))
        rows = list(prompt_rows(tmp_path / "a.json", BadRows(0.0, print)))
        assert [row.asks for row in rows] == ["a", "b"]
        assert rows[1].fields == {"prompt": "b", "id": 3}


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.jsonl", lines_of(PAIRS))
    return file.getvalue()


def in_tar():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.jsonl"), io.BytesIO())
    return file.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 42\n"
LOG = b"".join(b"line %d of a log\n" % i for i in range(30))
OTHERS = {
    ("pointer.jsonl", "git lfs pull"): lambda: POINTER,
    ("pointer.parquet", "git lfs pull"): lambda: POINTER,
    ("pointer.jsonl.gz", "git lfs pull"): lambda: POINTER,
    ("table.jsonl", "Parquet file; end its name with .parquet"): lambda: parquet_of(PAIRS),
    ("packed.jsonl", "gzip; unpack it, or end its name with .gz"): lambda: gzip.compress(LOG),
    ("bare.jsonl.gz", "not compressed"): lambda: lines_of(PAIRS),
    ("short.jsonl.gz", "cut short or damaged"): lambda: gzip.compress(lines_of(PAIRS))[:-50],
    ("short.jsonl.xz", "cut short or damaged"): lambda: lzma.compress(lines_of(PAIRS))[:-50],
    ("archive.json", "a zip archive"): zipped,
    ("archive.jsonl", "a tar archive"): in_tar,
    ("archive.jsonl.gz", "a tar archive"): lambda: gzip.compress(in_tar()),
    ("image.jsonl", "an image"): lambda: b"\x89PNG\r\n\x1a\n" + bytes(20),
    ("stream.jsonl", "an Arrow file"): lambda: b"\xff\xff\xff\xff\x10\x00\x00\x00",
    ("page.jsonl", "HTML"): lambda: b"\n<!DOCTYPE html><html>Sign in</html>",
    ("page.csv", "HTML"): lambda: b"<html>Sign in</html>",
    ("wide.jsonl", "UTF-16"): lambda: lines_of(PAIRS).decode().encode("utf-16"),
    ("table.json", "none of its first 20 rows"): lambda: table_of(PAIRS, ","),
    ("log.jsonl", "none of its first 20 rows"): lambda: LOG,
    ("keys.jsonl", "its keys: question, answer"): lambda: lines_of(
        [{"question": "a", "answer": "b"}] * 3
    ),
    ("keys.csv", "its columns are no rows to train on ('a', 'b')"): lambda: b"a,b\n1,2\n",
    ("latin.csv", "no UTF-8"): lambda: "text\nvergn\xfcgt\n".encode("latin-1"),
    ("quotes.csv", "is no CSV near line"): lambda: b'text\n"a\nb\n',
    ("short.json", "row 60"): lambda: array_of(PAIRS)[:-9],
    ("comma.json", "ends after row 60"): lambda: array_of(PAIRS)[:-1],
    ("broken.json", "breaks after row 60"): lambda: array_of(PAIRS)[:-1] + b'{"prompt": 1}]',
    ("arrays.jsonl", "If each line is an array of messages"): lambda: b"[]\n[1]\n",
}


class TestOthers:
    @pytest.mark.parametrize(("name", "said"), OTHERS, ids=[name for name, _ in OTHERS])
    def test_are_named_in_one_line(self, tmp_path, name, said):
        (tmp_path / name).write_bytes(OTHERS[name, said]())
        named = []
        with pytest.raises(ValueError, match=r".") as caught:
            RowFiles([tmp_path / name], bad=BadRows(0.01, named.append))
        text = str(caught.value)
        assert str(tmp_path / name) in text
        assert said in text
        assert "\n" not in text
        assert not named

    def test_a_table_without_columns_of_rows_is_named(self, tmp_path):
        (tmp_path / "a.parquet").write_bytes(parquet_of([{"label": 1}]))
        with pytest.raises(ValueError, match=r"a\.parquet: its columns are no rows .*'label'"):
            read(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.jsonl.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path, name, monkeypatch):
    monkeypatch.setattr(row_readers, "_CHUNK", 1 << 16)
    row = {"prompt": "a" * 1000, "response": "b" * 1000}
    rows = [row] * 4000
    data = {"a.json": array_of(rows, 1), "a.csv": table_of(rows, ",")}
    (tmp_path / name).write_bytes(data.get(name) or gzip.compress(lines_of(rows), 1))
    del data
    tracemalloc.start()
    found = RowFiles([tmp_path / name], bad=BadRows(0.0, print))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.read(3).prompt == "a" * 1000
    assert most < 6e6  # of 8 MB; three quarters are the places that wait to be written
