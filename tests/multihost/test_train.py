"""`zeroxla train` over two processes: killed, started again, interrupted, resumed."""

import json
import os
import signal
import sys
import time

import pytest
from tools.train import train, values

from multihost import processes
from zeroxla.cli.run_folder import RunFolder
from zeroxla.cli.run_lock import RunLock

TRAIN = [
    *("train", "--nodes", "2", "--devices-per-node", "2", "--layers", "1", "--width", "16"),
    *("--heads", "2", "--batch", "8", "--length", "16", "--eval-batches", "1"),
    *("--sample-bytes", "8", "--persistence-threshold", "0", "--steps", "60", "--eval-every", "30"),
    *("--save-every", "5"),
]


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory):
    """The losses of a run that nothing disturbs."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    status, out = processes.zeroxla(*TRAIN, "--data", text, "--run", run)
    assert status == 0, out
    assert json.loads((run / "config.json").read_text())["mesh"] == {"node": 2, "device": 2}
    return losses(run)


def losses(run):
    return {line["step"]: line["loss"] for line in RunFolder(run).metrics() if "loss" in line}


def wait_for_step(launcher, run, number):
    """Wait until a run has recorded a step."""
    while launcher.poll() is None:
        if (run / "metrics.jsonl").exists() and number in losses(run):
            return
        time.sleep(0.02)
    raise AssertionError(launcher.communicate()[0])


def test_two_processes_learn_what_one_does(text, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    few = ["--data", text, "--steps", "3", "--eval-every", "3", "--sample-bytes", "0"]
    assert train(*TRAIN[1:], *few, "--nodes", "1", "--run", one) == 0
    status, out = processes.zeroxla(*TRAIN, *few, "--run", two)
    assert status == 0, out
    for name in ("loss", "grad_norm", "valid_loss"):
        assert values(two, name) == pytest.approx(values(one, name), abs=1e-5), name


@pytest.mark.slow
def test_a_folder_in_use_is_refused_before_processes_start(text, tmp_path):
    with RunLock.take(tmp_path / "run"):
        status, out = processes.zeroxla(*TRAIN, "--data", text, "--run", tmp_path / "run")
    assert status == 2, out
    said = f"in use by another run: process {os.getpid()} on host"
    assert out.count(said) == 1, out
    assert "[0]" not in out
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.slow
def test_a_killed_run_is_started_again_and_ends_with_the_same_losses(text, tmp_path, undisturbed):
    run = tmp_path / "run"
    launch = ["launch", "--nodes", "2", "--devices-per-node", "2", "--max-restarts", "1", "--"]
    program = [sys.executable, "-m", "zeroxla", *TRAIN, "--data", text, "--run", run]
    launcher = processes.start(["-m", "zeroxla", *launch, *program])
    wait_for_step(launcher, run, 12)
    os.kill(processes.working_on(run, "ZEROXLA_PROCESS_ID=1"), signal.SIGKILL)
    status, out = processes.finish(launcher)
    assert status == 0, out
    assert "was killed by SIGKILL" in out
    assert "launch: starting all again (1 of 1 left)" in out
    assert losses(run) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_saved_and_resumed(text, tmp_path, undisturbed, number):
    run = tmp_path / "run"
    launcher = processes.start(["-m", "zeroxla", *TRAIN, "--data", text, "--run", run])
    wait_for_step(launcher, run, 7)
    launcher.send_signal(number)
    status, out = processes.finish(launcher)
    assert status == 75, out
    assert "launch:" not in out  # it is no failure
    stopped = max(losses(run))
    assert 7 <= stopped < 60
    assert max(int(path.name) for path in (run / "checkpoints").iterdir()) == stopped
    status, out = processes.zeroxla("train", "--run", run, "--resume")
    assert status == 0, out
    assert losses(run) == undisturbed


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_and_is_no_failure(text, tmp_path, undisturbed):
    """As when a cluster takes one host away; then the same command goes on."""
    run = tmp_path / "run"
    command = [*TRAIN, "--data", text, "--run", run, "--resume", "auto"]
    launcher = processes.start(["-m", "zeroxla", *command])
    wait_for_step(launcher, run, 7)
    os.kill(processes.working_on(run, "ZEROXLA_PROCESS_ID=1"), signal.SIGTERM)
    status, out = processes.finish(launcher)
    assert status == 75, out
    assert "launch:" not in out
    status, out = processes.zeroxla(*command)
    assert status == 0, out
    assert "Resuming" in out
    assert losses(run) == undisturbed


@pytest.mark.slow
def test_hosts_that_see_other_run_folders_say_so(text, tmp_path):
    """Process 1 finds no checkpoint, as on a host without the shared disk."""
    run = tmp_path / "run"
    few = [*TRAIN[3:], "--data", text, "--steps", "2", "--sample-bytes", "0", "--resume", "auto"]
    assert train(*few, "--run", run) == 0
    one, other = run, tmp_path / "elsewhere"
    command = f"{sys.executable} -m zeroxla train {' '.join(map(str, few))} --run "
    script = f"[ $ZEROXLA_PROCESS_ID = 0 ] && exec {command} {one}; exec {command} {other}"
    status, out = processes.zeroxla("launch", "--nodes=2", "--", "sh", "-c", script)
    assert status == 2, out
    assert "let all hosts see the same run folder, on a shared disk" in out
    assert "start: goes on from its checkpoint in process 0, begins anew in process 1" in out
    assert not other.exists()
