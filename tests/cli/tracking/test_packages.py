"""Weights & Biases and Aim: what they hold after a run, where their packages are installed."""

from __future__ import annotations

import math

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
