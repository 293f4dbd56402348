"""Weights & Biases and Aim: the calls that a run makes; what is stored, if they are installed."""

from __future__ import annotations

import itertools
import math
import sys
from types import SimpleNamespace

import pytest

from zeroxla.cli.run_folder import RunFolder
from zeroxla.cli.tracking.tracker import TrackedRun


def run_in(folder, step=0):
    return TrackedRun(
        name="run",
        path=folder.path,
        command="train",
        config={"a": 1},
        step=step,
        files=folder.files,
    )


def test_weights_and_biases(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs the extra wandb")
    from zeroxla.cli.tracking.weights_and_biases import ID, WeightsAndBiases

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = RunFolder.create(tmp_path / "run", {})
    names = []
    for step in (0, 2):
        tracker = WeightsAndBiases()
        tracker.begin(run_in(folder, step))
        names.append(tracker._run.id)
        tracker.log(step + 1, {"loss": 0.5})
        assert tracker._run.summary["loss"] == 0.5
        assert dict(tracker._run.config)["a"] == 1
        tracker.end(True)
    assert names == [(folder.path / ID).read_text().strip()] * 2  # it went on with the same run


def test_aim(tmp_path, monkeypatch):
    aim = pytest.importorskip("aim", reason="needs the extra aim")
    from zeroxla.cli.tracking.aim_repository import HASH, AimRepository

    monkeypatch.setenv("AIM_REPO", str(tmp_path))
    folder = RunFolder.create(tmp_path / "run", {})
    for step in (0, 2):
        tracker = AimRepository()
        tracker.begin(run_in(folder, step))
        tracker.log(step + 1, {"loss": 0.5 + step, "grad_norm": math.nan})
        tracker.end(True)
    # Opened for writing: Aim shows readers only what its server has indexed.
    run = aim.Run((folder.path / HASH).read_text().strip(), repo=str(tmp_path))
    assert aim.Repo(str(tmp_path)).list_all_runs() == [run.hash]  # it went on with the same run
    assert run["config"]["a"] == 1
    values = {m.name: list(m.values.sparse_numpy()[1]) for m in run.metrics()}
    assert values == {"loss": [0.5, 2.5]}


class StandIn:
    """A run of either package, which notes what it is told."""

    ids = itertools.count()

    def __init__(self, **options):
        self.told, self.options, self.values = [], options, {}
        self.id = self.hash = f"new{next(self.ids)}"

    def __setitem__(self, name, value):
        self.values[name] = value

    def define_metric(self, name, **options):
        self.values[name] = options

    def log(self, values):
        self.told.append(values)

    def track(self, value, name, step):
        self.told.append({"step": step, name: value})

    def finish(self, exit_code):
        self.values["exit"] = exit_code

    def close(self):
        self.values["closed"] = True


def told(tracker, folder, step, finished):
    """Tell a tracker about a step after `step` others; return the run that it has made."""
    tracker.begin(run_in(folder, step))
    tracker.log(step + 1, {"loss": 0.5, "grad_norm": math.inf})
    tracker.end(finished)
    return tracker._run


@pytest.mark.parametrize("finished", [True, False])
def test_what_weights_and_biases_is_told(finished, tmp_path, monkeypatch):
    from zeroxla.cli.tracking.weights_and_biases import ID, WeightsAndBiases

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=StandIn))
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    folder = RunFolder.create(tmp_path / "run", {})
    runs = [told(WeightsAndBiases(), folder, step, finished) for step in (0, 3, 0)]
    wanted = {"project": "mine", "name": "run", "job_type": "train", "config": {"a": 1}}
    assert all(wanted.items() <= run.options.items() for run in runs)
    # The second one goes on with the first; the third begins anew in the same folder.
    assert [run.options["id"] for run in runs] == [None, runs[0].id, None]
    assert [run.options["resume"] for run in runs] == [None, "allow", None]
    assert (folder.path / ID).read_text().strip() == runs[2].id
    assert runs[1].told == [{"step": 4, "loss": 0.5, "grad_norm": math.inf}]
    assert runs[1].values["*"] == {"step_metric": "step"}
    assert runs[1].values["exit"] == (0 if finished else 1)


@pytest.mark.parametrize("finished", [True, False])
def test_what_aim_is_told(finished, tmp_path, monkeypatch):
    from zeroxla.cli.tracking.aim_repository import AimRepository

    monkeypatch.setitem(sys.modules, "aim", SimpleNamespace(Run=StandIn))
    monkeypatch.delenv("AIM_REPO", raising=False)
    folder = RunFolder.create(tmp_path / "run", {})
    runs = [told(AimRepository(), folder, step, finished) for step in (0, 3, 0)]
    assert [run.options["run_hash"] for run in runs] == [None, runs[0].hash, None]
    assert {run.options["repo"] for run in runs} == {str(tmp_path)}
    assert runs[1].told == [{"step": 4, "loss": 0.5}]  # it takes no infinite values
    assert runs[1].values == {"config": {"a": 1}, "finished": finished, "closed": True}
    monkeypatch.setenv("AIM_REPO", "elsewhere")
    assert told(AimRepository(), folder, 0, finished).options["repo"] == "elsewhere"
