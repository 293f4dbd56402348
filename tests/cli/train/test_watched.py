"""What is seen of a run while it trains: its metrics, a tracker of one's own, a profile."""

from __future__ import annotations

import gzip
import json
import sys
import textwrap

import pytest
from tools.quick import quick_compilation  # noqa: F401
from tools.train import check_refused, train, values

from zeroxla.cli.run_folder import RunFolder

TINY = [
    *("--layers", "1", "--width", "16", "--heads", "2", "--batch", "8", "--length", "16"),
    *("--eval-batches", "1", "--sample-bytes", "0", "--nodes", "1", "--devices-per-node", "2"),
]
OWN = """
    TOLD = []
    class Mine:
        def begin(self, run):
            TOLD.append((run.command, run.step, run.config["options"]["training"]["steps"]))
        def log(self, step, values):
            TOLD.append((step, sorted(values)))
        def end(self, finished):
            TOLD.append(finished)
"""
pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_a_run_is_told_recorded_and_profiled(text, tmp_path, monkeypatch, capfd):
    (tmp_path / "watching_mine.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    run = tmp_path / "run"
    watch = ["--track", "watching_mine:Mine", "--profile", "2:3", "--save-every", 2]
    assert train("--run", run, "--data", text, *TINY, "--steps", 4, *watch) == 0
    # Every line of the record was told, with the same names.
    told = sys.modules.pop("watching_mine").TOLD
    lines = [(x["step"], sorted(set(x) - {"step"})) for x in RunFolder(run).metrics()]
    assert told == [("train", 0, 4), *lines, True]
    assert not list(run.glob("events.out.tfevents.*"))
    for name in ("data_s", "dispatch_s", "wait_s", "received_bytes", "program_memory_bytes"):
        assert set(values(run, name)) == {1, 2, 3, 4}
        assert min(values(run, name).values()) > 0
    assert values(run, "examples") == {1: 8, 2: 16, 3: 24, 4: 32}
    assert set(values(run, "save_s")) == {2}
    with gzip.open(run / "profile" / "trace_by_phase.json.gz", "rt") as file:
        names = {e.get("name", "") for e in json.load(file)["traceEvents"]}
    assert {"data", "dispatch"} <= names  # the host's phases
    assert any(name.startswith("forward gather: unit[") for name in names)
    assert "2 steps, 2 devices" in capfd.readouterr().out


@pytest.mark.slow
def test_a_profile_of_several_programs_is_kept_and_costs_the_run_nothing(text, tmp_path, capfd):
    """The programs of a state on disk are not the one that is printed at the start."""
    disk = ["--offload-optimizer", "disk", "--offload-path", tmp_path / "disk"]
    run = tmp_path / "run"
    options = [*TINY, "--steps", 3, "--profile", "2:2", *disk]
    assert train("--run", run, "--data", text, *options) == 0
    assert list((run / "profile").glob("**/perfetto_trace.json.gz"))
    said = " ".join("".join(capfd.readouterr()).split())
    assert "Profile: " in said or "is written, but not told by phases" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "3"], "--profile '3': give two step numbers from 1 on"),
        (["--profile", "3:2"], "--profile '3:2': give two step numbers from 1 on"),
        (["--profile", "0:2"], "--profile '0:2': give two step numbers from 1 on"),
        (["--profile", "3:5"], "--profile 3:5: the run ends after step 4"),
        (["--track", "nobody"], "--track 'nobody' is no tracker"),
    ],
)
def test_bad_input(text, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    check_refused(["--data", text, *TINY, "--steps", 4, *arguments], message, capsys)
