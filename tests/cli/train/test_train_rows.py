"""`zeroxla train` on rows: what it prints, records and keeps, how it resumes, what it refuses."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from tools.hugging_face import hub_folder
from tools.quick import quick_compilation  # noqa: F401
from tools.rows import mixed_rows, write_lines
from tools.train import check_refused, copy_at, train, train_as_a_user, values

from zeroxla.cli.data.chat_template import DEFAULT, read_template
from zeroxla.cli.train import model
from zeroxla.cli.train.make_task import make_task
from zeroxla.cli.train.options import RowsOptions, TextOptions, TrainOptions
from zeroxla.cli.train.rows import RowsTask
from zeroxla.cli.train.text import TextTask
from zeroxla.models import GPT

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = ["--layers", 1, "--width", 16, "--heads", 2, "--length", 48, "--batch", 8]
TINY += ["--sample-bytes", 8, "--eval-batches", 2, "--prompt", "Hello"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("data") / "rows.jsonl", [*mixed_rows(300), "bad"])


@pytest.fixture(scope="module")
def finished(file, tmp_path_factory):
    """The folder of a run of 6 steps with checkpoints at 4 and 6, and what was printed."""
    run = tmp_path_factory.mktemp("finished") / "run"
    told = ["--run", run, "--data", file, *TINY, "--steps", 6, "--save-every", 4]
    return run, train_as_a_user(*told)


class TestRun:
    @pytest.mark.smoke
    def test_says_what_it_read_and_names_bad_rows(self, finished, file):
        run, printed = finished
        assert f"warning: {file}:301: the row is no JSON" in printed
        assert "100 conversations, 100 pairs, 100 documents, 1 bad rows" in printed
        assert "chat template: zeroxla's own, because the model brings none" in printed
        record = json.loads((run / "config.json").read_text())["rows"]
        assert record["train_rows"] + record["valid_rows"] == 300
        assert (run / "chat_template.jinja").read_text() == DEFAULT

    def test_counts_targets(self, finished):
        targets = values(finished[0], "targets")
        assert list(targets) == list(range(1, 7))
        assert all(8 <= number < 8 * 48 for number in targets.values())

    def test_resumes_bit_for_bit(self, finished, tmp_path):
        run = copy_at(finished[0], tmp_path, 4)
        assert train("--resume", "--run", run) == 0
        for name in ("loss", "targets", "valid_loss"):
            assert values(run, name) == values(finished[0], name)

    @pytest.mark.slow
    def test_rows_that_changed_are_not_resumed(self, file, tmp_path, capsys):
        run, copy = tmp_path / "run", shutil.copy(file, tmp_path / "rows.jsonl")
        assert train("--run", run, "--data", copy, *TINY, "--steps", 1) == 0
        write_lines(tmp_path / "rows.jsonl", mixed_rows(299))
        capsys.readouterr()
        assert train("--resume", "--run", run, "--steps", 2) == 2
        assert "rows" in capsys.readouterr().err


def options_of(file, **rows):
    return TrainOptions(
        text=TextOptions(data=(str(file),), batch=8, length=48), rows=RowsOptions(**rows)
    )


class TestTask:
    def test_validation_is_the_same_each_time(self, file):
        task = make_task(options_of(file), None, print)
        assert isinstance(task, RowsTask)
        one, other = list(task.validation()), list(task.validation())
        assert all(np.array_equal(x["tokens"], y["tokens"]) for x, y in zip(one, other))
        assert task.guess > 0

    def test_the_suffix_says_what_the_data_is(self, file, tmp_path):
        text = tmp_path / "rows.txt"
        shutil.copy(file, text)
        assert isinstance(make_task(options_of(text), None, print), TextTask)

    def test_an_islands_rows_come_in_another_order(self, file):
        task = make_task(options_of(file), None, print)
        one, other = (iter(task.training(0, 1, slot)) for slot in (0, 3))
        assert not np.array_equal(next(one)["tokens"], next(other)["tokens"])
        one.close()
        other.close()

    def test_the_prompt_is_what_a_user_says(self, file):
        task = make_task(options_of(file), None, print)
        asked = bytes(task.encoded_prompt("Hello")).decode()
        assert asked == "\0<|user|>\nHello\n<|assistant|>\n"

    def test_packing_waits_for_a_model_that_takes_segments(self, file, monkeypatch):
        class Segmented(GPT):
            def __call__(self, tokens_BL, *, segments_BL=None, positions_BL=None, **others):
                raise NotImplementedError

        assert model.takes_segments(Segmented)
        packed = options_of(file, packing=True)
        monkeypatch.setattr(model, "takes_segments", lambda kind: False)
        with pytest.raises(ValueError, match="--packing: this model takes no segments"):
            make_task(packed, None, print)
        monkeypatch.setattr(model, "takes_segments", lambda kind: True)
        task = make_task(packed, None, print)
        batches = iter(task.training(0, 1))
        for batch in (next(batches), next(iter(task.validation()))):
            assert set(batch) == {"tokens", "mask", "segments", "positions"}
        batches.close()

    def test_the_folders_template_and_tokens_are_used_and_kept(self, tmp_path):
        tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
        init = hub_folder(tmp_path / "init", "d_gpt2")
        said = json.loads((init / "config.json").read_text())
        words = {"<s>": 0, "Hello": 1, "Hi": 2, "yes": 3, "<unk>": 4}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        made.save(str(init / "tokenizer.json"))
        (init / "config.json").write_text(
            json.dumps({**said, "bos_token_id": 0, "eos_token_id": 1})
        )
        template = "{% for m in messages %}{{ m.content }} {% endfor %}"
        several = {"default": template, "tool_use": "{{ tools[0] }}" + template}
        named = [{"name": name, "template": source} for name, source in several.items()]
        config = {"chat_template": named, "bos_token": "<s>"}
        (init / "tokenizer_config.json").write_text(json.dumps(config))
        file = write_lines(tmp_path / "a.jsonl", mixed_rows(60)[::3])
        usual = options_of(file)
        length = TextOptions(data=(str(file),), batch=8, length=8)
        options = TrainOptions(text=length, rows=usual.rows, model=model.ModelOptions(init=init))
        task = make_task(options, None, print)
        assert f"chat template: {init}" in task.source
        batch = next(task.validation())
        assert batch["tokens"][0, :2].tolist() == [4, 2]  # what was said, and "Hi"
        assert batch["mask"][0].tolist() == [1, *[0] * 7]
        run = tmp_path / "run"
        run.mkdir()
        task.keep(run)
        shutil.rmtree(init)
        again = make_task(options, run, print)
        assert again.record() == task.record()
        assert (run / "chat_template.jinja").read_text() == template
        assert read_template(run / "chat_template.jinja") == several


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--max-bad-rows", 0], "1 of 301 rows are bad, more than the share of 0.0"),
            (["--max-bad-rows", 2], "--max-bad-rows 2.0 is a share: at most 1"),
            (["--chat-template", "none.jinja"], "cannot read the chat template none.jinja"),
        ],
    )
    def test_options(self, file, tmp_path, monkeypatch, capsys, arguments, message):
        monkeypatch.chdir(tmp_path)
        check_refused(["--data", file, *TINY, *arguments], message, capsys)

    def test_options_of_rows_beside_text(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "a.txt").write_text("text " * 1000)
        told = ["--data", "a.txt", *TINY, "--packing", "--too-long", "bad"]
        check_refused(told, "--packing, --too-long: without effect on text", capsys)

    def test_a_template_beside_rows_without_conversations(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        write_lines(tmp_path / "a.jsonl", mixed_rows(60)[1::3])
        (tmp_path / "a.jinja").write_text(DEFAULT)
        told = ["--data", "a.jsonl", *TINY, "--chat-template", "a.jinja"]
        check_refused(told, "without effect, because no row is a conversation", capsys)

    def test_no_file(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        check_refused(["--data", "a.jsonl=0.5", *TINY], "cannot read a.jsonl: No such file", capsys)
