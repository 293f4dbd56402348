"""The length of sequences: what a run says about rows that are longer, and where the default is
from. Counts are made here with the tokenizer itself, and the template written by hand."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from tools.chat_folder import write_chat_folder
from tools.quick import quick_compilation  # noqa: F401
from tools.rows import mixed_rows, write_lines
from tools.train import train, values

from zeroxla.cli.data import row_lengths
from zeroxla.cli.train import length as length_module
from zeroxla.cli.train.make_task import make_task
from zeroxla.cli.train.model import ModelOptions
from zeroxla.cli.train.options import LoraOptions, RowsOptions, TextOptions, TrainOptions

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytestmark = pytest.mark.usefixtures("quick_compilation")

WORDS = random.Random(0)


def some_text(most: int) -> str:
    return "".join(WORDS.choice("abcdé€ ") for _ in range(WORDS.randint(1, most)))


def chat(question: str, answer: str) -> dict:
    said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": said}


CHATS = [chat(some_text(60), some_text(400)) for _ in range(150)]
CHATS += [chat(some_text(3000), "late"), chat("€", "b" * 2000)]
TEXTS = [{"text": some_text(300)} for _ in range(80)] + [{"text": "c" * 1500}]
PREFERENCES = [
    {"prompt": f"{i}", "chosen": some_text(90), "rejected": some_text(300)} for i in range(60)
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder whose model was trained for 512 tokens."""
    folder = tmp_path_factory.mktemp("hub")
    return write_chat_folder(folder / "base", layers=1, width=16, heads=2, length=512)


def written(row: dict) -> list[str]:
    """Return the texts of which a row's tokens are made, by hand."""
    if "text" in row:
        return [row["text"]]
    if "chosen" in row:
        return [row["prompt"] + max(row["chosen"], row["rejected"], key=lambda x: len(x.encode()))]
    said = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in row["messages"]]
    return ["".join(said)]


def counted(hub, rows: list[dict]) -> list[int]:
    """Return the tokens of rows. This model has a token for the end of a document, which begins
    one, too."""
    made = tokenizers.Tokenizer.from_file(str(hub / "tokenizer.json"))
    framed = [0 if "messages" in row else 2 for row in rows]
    return [
        sum(len(made.encode(text, add_special_tokens=False).ids) for text in written(row)) + more
        for row, more in zip(rows, framed)
    ]


def task_of(tmp_path, hub, rows, *, length=None, lora=None, batch=8, **more):
    file = write_lines(tmp_path / "rows.jsonl", rows)
    options = TrainOptions(
        text=TextOptions(data=(str(file),), batch=batch, length=length, holdout=0.2),
        rows=RowsOptions(**{"max_bad_rows": 1.0, **more}),
        model=ModelOptions(init=hub),
        lora=LoraOptions(lora_rank=lora),
    )
    return make_task(options, None, print)


def numbers(text: str) -> list[float]:
    return [float(x.replace(",", "")) for x in re.findall(r"\d[\d,]*\.?\d*", text)]


def median(lengths: list[int]) -> int:
    return round(float(np.median(lengths)))


class TestReport:
    @pytest.mark.parametrize(
        ("rows", "options", "fate"),
        [
            (CHATS, {"length": 128}, "are cut at their end (--too-long cut); 1 of these hold"),
            (CHATS, {"length": 128, "too_long": "bad"}, "are dropped as bad rows (--too-long bad)"),
            (CHATS, {"length": 256, "packing": True}, "are cut at their end"),
            (TEXTS, {"length": 64}, "give a window at another random place each time"),
            (TEXTS, {"length": 64, "packing": True}, "are cut into pieces, and nothing is lost"),
            (PREFERENCES, {"length": 96, "lora": 2}, "are cut at their end"),
            ([*CHATS, *TEXTS], {"length": 200}, "documents give a window"),
        ],
        ids=["cut", "bad", "packed", "windows", "pieces", "preferences", "mixed"],
    )
    def test_is_right_against_a_count(self, tmp_path, hub, rows, options, fate):
        said = task_of(tmp_path, hub, rows, **options).source.partition("\nLength: ")[2]
        lengths, size = counted(hub, rows), options["length"] + 1
        longer = [x for x in lengths if x > size]
        assert longer, "the case shows nothing"
        assert numbers(said)[:8] == [
            *(options["length"], len(rows), median(lengths), max(lengths), len(longer)),
            *(pytest.approx(100 * len(longer) / len(rows), abs=0.05), size, median(longer)),
        ]
        assert fate in said

    def test_of_rows_that_all_fit(self, tmp_path, hub):
        short = [row for row in CHATS if counted(hub, [row])[0] <= 481]
        said = task_of(tmp_path, hub, short, length=480).source
        assert "; none is longer than a sequence, which takes 481." in said
        assert "Length: 480 (--length)." in said

    def test_of_many_rows_is_of_a_sample_and_says_so(self, tmp_path, hub, monkeypatch):
        monkeypatch.setattr(row_lengths, "SAMPLE_ROWS", 40)
        said = task_of(tmp_path, hub, CHATS, length=128).source
        assert f"40 rows (a random sample of {len(CHATS)}) have " in said
        monkeypatch.setattr(row_lengths, "SAMPLE_BYTES", 2000)
        found = numbers(task_of(tmp_path, hub, CHATS, length=128).source.partition("--length")[2])
        assert 1 <= found[0] < 40

    @pytest.mark.parametrize("too_long", ["cut", "bad"])
    def test_too_many_rows_that_it_makes_bad_end_the_run_before_it_begins(
        self, tmp_path, hub, too_long
    ):
        rows = [chat("a" * (300 + i), "b") for i in range(3)] + [
            chat("a", "b" * i) for i in range(60)
        ]
        with pytest.raises(ValueError, match=rf"3 of 63 rows .*--too-long {too_long}\)") as caught:
            task_of(tmp_path, hub, rows, length=128, too_long=too_long, max_bad_rows=0.04)
        assert "the 129 tokens of a sequence" in str(caught.value)
        task = task_of(tmp_path, hub, rows, length=128, too_long=too_long, max_bad_rows=0.05)
        assert task.options.text.length == 128

    def test_names_a_length_that_the_model_was_not_trained_for(self, tmp_path, hub):
        said = task_of(tmp_path, hub, TEXTS, length=1024).source
        assert "Length: 1,024 (--length; the model was trained for 512)" in said


class TestDefault:
    def test_is_the_99th_percentile_of_the_rows(self, tmp_path, hub):
        rows = [chat("a", "b" * i) for i in range(1, 301)]
        task = task_of(tmp_path, hub, rows)
        lengths = counted(hub, rows)
        found = task.options.text.length
        assert found % 64 == 0
        assert found - 64 < np.percentile(lengths, 99) - 1 <= found
        assert sum(x <= found + 1 for x in lengths) >= 0.99 * len(lengths)
        assert next(task.validation())["tokens"].shape[1] == found + 1

    def test_is_at_most_the_models_context(self, tmp_path, hub):
        task = task_of(tmp_path, hub, [chat("a", "b" * 900)] * 2 + CHATS[:20])
        assert task.options.text.length == 512
        assert (
            "Length: 512 (the model's context; the 99th percentile of the rows is 9" in task.source
        )

    def test_is_at_most_what_fits_into_memory(self, tmp_path, hub, monkeypatch):
        monkeypatch.setattr(length_module, "SIMULATED_BYTES", 34 * 16 * 200)  # a layer of width 16
        task = task_of(tmp_path, hub, CHATS)
        assert task.options.text.length == 192
        assert "--accumulate or a smaller --batch makes room" in task.source
        assert task_of(tmp_path, hub, CHATS, batch=64).options.text.length == 64

    def test_is_that_of_preferences(self, tmp_path, hub):
        task = task_of(tmp_path, hub, PREFERENCES, lora=2)
        longest = max(counted(hub, PREFERENCES))
        assert longest - 1 <= task.options.text.length < longest + 63
        assert task.settings.length == task.options.text.length + 1

    def test_of_text_is_the_models_if_it_has_learned(self, tmp_path, hub):
        (tmp_path / "a.txt").write_text("text " * 4000)
        for init, length in ((None, 128), (hub, 512)):
            options = TrainOptions(
                text=TextOptions(data=(str(tmp_path / "a.txt"),), batch=8),
                model=ModelOptions(init=init),
            )
            task = make_task(options, None, print)
            assert task.options.text.length == length
            assert f"; sequences of {length} (the " in task.source

    def test_is_what_the_first_process_decides(self, monkeypatch):
        first = [320, "the 99th percentile", "a report"]
        monkeypatch.setattr(length_module, "on_first", lambda topic, decide: None)
        monkeypatch.setattr(
            length_module, "exchange", lambda topic, text: [json.dumps(first), text]
        )
        found, report = length_module.agreed(lambda: pytest.fail("not the first process"))
        assert (found.tokens, found.source, report) == tuple(first)


@pytest.mark.slow
def test_a_run_records_its_length_and_keeps_it(tmp_path, capsys):
    rows = [*mixed_rows(60), {"text": "long " * 30}]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    shape = ["--layers", 1, "--width", 16, "--heads", 2, "--batch", 8, "--eval-batches", 1]
    told = ["--run", tmp_path / "run", "--data", file, *shape, "--sample-bytes", 4]
    assert train(*told, "--steps", 1) == 0
    assert "Length: 192 (the 99th percentile of the rows). 61 rows have " in capsys.readouterr().out
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["options"]["text"]["length"] == 192
    assert train("--resume", "--run", tmp_path / "run", "--steps", 2) == 0
    assert list(values(tmp_path / "run", "loss")) == [1, 2]
    assert "Length:" not in capsys.readouterr().out
