"""The run folders of islands, and what an island that starts again takes from them."""

from __future__ import annotations

import json

import pytest

from zeroxla.cli.continued_run import continued, newest_run
from zeroxla.cli.errors import UsageError
from zeroxla.cli.islands.folders import folder_of, folder_of_options, island_folders, saved_at
from zeroxla.cli.main import main
from zeroxla.cli.read_options import read_options
from zeroxla.cli.run_folder import RunFolder
from zeroxla.cli.train.checks import FREE
from zeroxla.cli.train.options import TrainOptions

ISLAND = ["--outer=diloco", "--islands=2", "--width=16", "--heads=2"]


def options_of(*arguments: str) -> TrainOptions:
    return read_options("train", arguments, TrainOptions)


def resumed(*arguments: str, slot: int | None) -> TrainOptions:
    return continued("train", arguments, options_of(*arguments), FREE, slot)


@pytest.fixture
def run(tmp_path):
    """A run of islands 0 and 10, of which 0 has a checkpoint."""
    for slot in (10, 0):
        folder = tmp_path / "run" / f"island-{slot}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(
            json.dumps({"command": "train", "options": options_of(*ISLAND).to_dict()})
        )
    (tmp_path / "run" / "island-0" / "checkpoints" / "5").mkdir(parents=True)
    return tmp_path / "run"


def test_each_island_has_a_folder(run, tmp_path):
    assert folder_of(run, None) == run
    assert folder_of(run, 3) == run / "island-3"
    (run / "island-x").mkdir()
    (run / "island-4").mkdir()  # without a config
    assert island_folders(run) == [run / "island-0", run / "island-10"]
    assert folder_of_options(run, 10) == run / "island-10"
    assert folder_of_options(run, 4) == folder_of_options(run, None) == run / "island-0"
    assert saved_at(run) is not None
    assert saved_at(tmp_path) is None
    assert newest_run(tmp_path) == run


def test_an_island_with_a_checkpoint_resumes(run):
    found = resumed("--resume", f"--run={run}", slot=0)
    assert (found.output.resume, found.output.run) == (True, run)
    assert (found.model.width, found.outer.outer) == (16, "diloco")


@pytest.mark.parametrize("slot", [10, 4])
def test_an_island_without_one_begins_anew_with_the_run_s_options(run, slot):
    found = resumed("--resume", f"--run={run}", slot=slot)
    assert (found.output.resume, found.output.run) == (False, run)
    assert (found.model.width, found.outer.outer) == (16, "diloco")


def test_the_first_start_of_an_island_may_ask_to_resume(tmp_path):
    """So a command that is started again and again need not change."""
    found = resumed("--resume", f"--run={tmp_path / 'new'}", *ISLAND, slot=1)
    assert (found.output.resume, found.output.run) == (False, tmp_path / "new")
    assert found.model.width == 16


def test_an_island_that_its_launcher_starts_again_resumes(run, monkeypatch):
    monkeypatch.setenv("ZEROXLA_RESTART", "1")
    monkeypatch.setenv("ZEROXLA_STARTED", "now")
    assert resumed(f"--run={run}", *ISLAND, slot=0).output.resume
    assert not resumed(f"--run={run}", *ISLAND, slot=10).output.resume


def test_all_islands_are_started_again_with_the_run_s_number(run):
    found = resumed("--resume", f"--run={run}", slot=None)
    assert (found.output.resume, found.outer.islands) == (True, 2)
    assert resumed("--resume", f"--run={run}", "--islands=3", slot=None).outer.islands == 3
    with pytest.raises(UsageError, match="--width is 16 there and 32 here"):
        resumed("--resume", f"--run={run}", "--width=32", slot=None)


def test_islands_that_may_be_started_again_and_again(run, tmp_path):
    begun = resumed("--resume", "auto", f"--run={run}", *ISLAND, slot=None)
    assert (begun.output.resume, begun.outer.islands) == ("auto", 2)
    assert resumed("--resume", "auto", f"--run={run}", *ISLAND, slot=0).output.resume == "auto"
    assert resumed("--resume", "auto", f"--run={run}", *ISLAND, slot=10).output.resume is False
    for slot in (None, 0):
        new = resumed("--resume", "auto", f"--run={tmp_path / 'new'}", *ISLAND, slot=slot)
        assert (new.output.resume, new.output.run) == (False, tmp_path / "new")


def test_a_folder_that_holds_no_run_is_no_run_of_islands(tmp_path):
    with pytest.raises(UsageError, match="holds no run to resume"):
        resumed("--resume", f"--run={tmp_path}", slot=None)


def test_islands_are_exported_one_by_one(run, capsys):
    assert main(["export", str(run)]) == 2
    assert "name the folder of one of its islands: island-0, island-10" in capsys.readouterr().err


def test_a_folder_in_the_way_is_named_as_the_user_did(run):
    with pytest.raises(ValueError, match=rf"island-0 already holds a run; .* --run {run}, or cho"):
        RunFolder.create(run / "island-0", {}, named=run)
