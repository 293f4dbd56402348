"""Trackers: how they are named, what they are told, and that one which fails costs nothing."""

from __future__ import annotations

import sys
import textwrap

import pytest

from zeroxla.cli.named_object import named_object
from zeroxla.cli.run_folder import RunFolder
from zeroxla.cli.tracking.tensorboard import TensorBoardEvents
from zeroxla.cli.tracking.tracker import TrackedRun
from zeroxla.cli.tracking.trackers import Trackers
from zeroxla.program.extras import MissingExtraError

OWN = """
    class Mine:
        def __init__(self):
            self.told = []
        def begin(self, run):
            self.told.append((run.name, run.step, run.config["seed"]))
        def log(self, step, values):
            if step == 2:
                raise OSError("no network")
            self.told.append((step, dict(values)))
        def end(self, finished):
            self.told.append(finished)

    class Deaf:
        def begin(self, run): ...

    class Needy(Mine):
        def __init__(self, address): ...

    class Late(Mine):
        def begin(self, run):
            raise ConnectionError("no server")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working folder, with a module of a user's own trackers."""
    (tmp_path / "my_trackers.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("my_trackers", None)


def run_in(folder):
    return TrackedRun(
        name="run",
        path=folder.path,
        command="train",
        config={"seed": 3},
        step=0,
        files=folder.files,
    )


def test_one_that_fails_is_told_once_and_the_others_go_on(here):
    warnings = []
    trackers = Trackers.make(["my_trackers:Mine", "tensorboard"], warnings.append)
    mine, events = trackers._named.values()
    assert isinstance(events, TensorBoardEvents)
    folder = RunFolder.create(here / "run", {})
    trackers.begin(run_in(folder))
    for step in (1, 2, 3):
        trackers.log(step, {"loss": step / 2})
    trackers.end(True)
    assert mine.told == [("run", 0, 3), (1, {"loss": 0.5})]
    (warning,) = warnings
    assert "--track my_trackers:Mine failed and gets no more metrics: OSError: no net" in warning
    assert "metrics.jsonl has all of them" in warning


def test_the_end_is_told_once(here):
    trackers = Trackers.make(["my_trackers.py:Mine"], print)
    (mine,) = trackers._named.values()
    trackers.log(1, {})
    trackers.end(False)
    trackers.end(True)
    assert mine.told == [(1, {}), False]


def test_one_that_cannot_begin_ends_the_run_and_those_that_have_begun(here):
    trackers = Trackers.make(["my_trackers:Mine", "my_trackers:Late"], print)
    mine, late = trackers._named.values()
    with pytest.raises(ValueError, match=r"--track my_trackers:Late cannot begin: Connection"):
        trackers.begin(run_in(RunFolder.create(here / "run", {})))
    assert mine.told == [("run", 0, 3), False]
    trackers.end(False)
    assert late.told == []
    assert mine.told == [("run", 0, 3), False]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "tensorbord",
            "'tensorbord' is no tracker; give tensorboard, wandb, aim, or MODULE:CL",
        ),
        ("my_trackers:Nobody", "my_trackers has no 'Nobody'"),
        ("not_there:Mine", "there is no module 'not_there'"),
        ("not_there.py:Mine", "there is no file not_there.py"),
        ("my_trackers:Deaf", "has no method 'log'; a tracker has begin"),
        ("my_trackers:Needy", "cannot be made without arguments: TypeError"),
    ],
)
def test_names_that_stand_for_no_tracker(here, name, message):
    with pytest.raises(ValueError, match=message):
        Trackers.make([name], print)


@pytest.mark.parametrize("name", ["wandb", "aim"])
def test_a_package_that_is_missing_is_named_with_its_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"--track {name} needs the package {name}; pip"):
        Trackers.make([name], print)


def test_a_name_without_an_object():
    with pytest.raises(ValueError, match="names no object; give MODULE:NAME"):
        named_object("model", "--track")


def test_a_module_that_lacks_a_package_says_which(here):
    (here / "lacking.py").write_text("import not_installed_at_all")
    with pytest.raises(ModuleNotFoundError, match="not_installed_at_all"):
        named_object("lacking:Thing", "--track")
