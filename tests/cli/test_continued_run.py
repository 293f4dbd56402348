"""`--resume auto`: one command that begins a run, and goes on with it at each later start."""

from __future__ import annotations

import json

import pytest

from zeroxla.cli.continued_run import continued
from zeroxla.cli.errors import UsageError
from zeroxla.cli.read_options import read_options
from zeroxla.cli.rlhf.checks import FREE as RLHF_FREE
from zeroxla.cli.rlhf.options import RlhfOptions
from zeroxla.cli.train.checks import FREE as TRAIN_FREE
from zeroxla.cli.train.options import TrainOptions

KINDS = {"train": (TrainOptions, TRAIN_FREE), "rlhf": (RlhfOptions, RLHF_FREE)}


def started(command, *arguments):
    """Return the options of a job that is started with these words."""
    kind, free = KINDS[command]
    return continued(command, arguments, read_options(command, arguments, kind), free)


@pytest.fixture(params=list(KINDS))
def command(request, monkeypatch):
    for name in ("ZEROXLA_RESTART", "ZEROXLA_STARTED"):
        monkeypatch.delenv(name, raising=False)
    return request.param


def test_it_begins_a_run_and_goes_on_with_it(command, tmp_path):
    run = tmp_path / "run"
    words = ["--resume", "auto", f"--run={run}", "--width=16", "--steps=7"]
    first = started(command, *words)
    assert (first.output.resume, first.output.run) == (False, run)
    # It ends before its first checkpoint, and is started again.
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"command": command, "options": first.to_dict()}))
    assert started(command, *words).output.resume is False
    (run / "checkpoints" / "5").mkdir()
    again = started(command, *words)
    assert (again.output.resume, again.output.run) == ("auto", run)
    assert again.to_dict() | {"output": None} == first.to_dict() | {"output": None}
    with pytest.raises(UsageError, match="--width is 16 there and 32 here"):
        started(command, *words, "--width=32")


def test_it_does_not_begin_beside_a_run_that_cannot_be_read(command, tmp_path):
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds no run to resume"):
        started(command, "--resume", "auto", f"--run={tmp_path}")


def test_it_needs_a_folder_that_the_next_start_finds(command):
    with pytest.raises(UsageError, match="--resume auto without --run: the next start would not f"):
        started(command, "--resume", "auto")


def test_without_a_word_it_goes_on_as_ever(command, tmp_path):
    with pytest.raises(UsageError, match="holds no run to resume"):
        started(command, "--resume", f"--run={tmp_path}")


def test_another_word_is_refused(command, capsys):
    with pytest.raises(SystemExit) as ended:
        started(command, "--resume", "always", "--run=x")
    assert ended.value.code == 2
    assert "always: write --resume, or --resume auto" in capsys.readouterr().err
