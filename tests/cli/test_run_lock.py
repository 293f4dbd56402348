"""A run folder belongs to one run: a second one is refused, and what ended is taken over."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time

import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.train import train

from zeroxla.cli import run_lock
from zeroxla.cli.errors import LostRunError
from zeroxla.cli.held_run import HeldRun
from zeroxla.cli.main import main
from zeroxla.cli.rlhf.options import RlhfOptions
from zeroxla.cli.run_folder import RunFolder
from zeroxla.cli.run_lock import LOCK, SILENT_S, RunLock, check_free
from zeroxla.cli.train.options import TrainOptions

TINY = [
    *("--layers", "1", "--width", "16", "--heads", "2", "--batch", "8", "--length", "16"),
    *("--eval-batches", "1", "--sample-bytes", "8", "--persistence-threshold", "0"),
]

pytestmark = pytest.mark.usefixtures("quick_compilation")

HOLD = """
import os, sys, time
from pathlib import Path
from zeroxla.cli.run_lock import RunLock
lock = RunLock.take(Path(sys.argv[1]))
print(os.getpid(), flush=True)
sys.stdin.read()
"""

# Processes that start at the same moment; each says whether it has won.
RACE = """
import os, sys, time
from pathlib import Path
from zeroxla.cli.run_lock import RunLock
begin = time.time() + 0.3
for i in range(8):
    if not os.fork():
        while time.time() < begin:
            pass
        try:
            lock = RunLock.take(Path(sys.argv[1]))
            said = "won"
        except ValueError as error:
            said = "refused" if "in use by another run: process" in str(error) else str(error)
        os.write(1, f"{said}\\n".encode())
        time.sleep(1)  # nobody ends before all have tried
        os._exit(0)
for i in range(8):
    os.wait()
"""


def start(path):
    """Start a process that holds a folder's lock; return it once it does."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert int(process.stdout.readline()) == process.pid
    return process


def killed(path):
    """Leave the lock of a process that was killed."""
    process = start(path)
    process.kill()
    process.communicate()
    assert (path / LOCK).exists()


def change(path, **fields):
    """Change fields of the process that a lock names."""
    said = json.loads((path / LOCK).read_text())
    said["process"] |= fields
    (path / LOCK).write_text(json.dumps(said))


class TestAnotherRun:
    @pytest.mark.smoke
    def test_is_refused_with_host_process_time_and_remedy(self, tmp_path):
        process = start(tmp_path)
        since = time.strftime("%Y-%m-%d")
        found = rf"in use by another run: process {process.pid} on host {platform.node()}, since "
        for attempt in (RunLock.take, check_free):
            with pytest.raises(ValueError, match=found + rf"{since}.*kill {process.pid}.*--run"):
                attempt(tmp_path)
        process.communicate("")

    def test_of_the_same_process_is_refused(self, tmp_path):
        with RunLock.take(tmp_path), pytest.raises(ValueError, match=f"process {os.getpid()} "):
            RunLock.take(tmp_path)

    @pytest.mark.parametrize("stale", thinned([True], slow=[False]))
    def test_of_eight_at_the_same_moment_one_wins(self, tmp_path, stale):
        if stale:
            killed(tmp_path)
        done = subprocess.run(
            [sys.executable, "-c", RACE, str(tmp_path)], capture_output=True, text=True, timeout=60
        )
        assert sorted(done.stdout.split()) == [*["refused"] * 7, "won"], done.stderr
        assert [file.name for file in tmp_path.iterdir()] == [LOCK]

    def test_on_another_host_is_refused_while_it_shows_life(self, tmp_path):
        killed(tmp_path)
        change(tmp_path, place="elsewhere", host="far")
        with pytest.raises(ValueError, match=rf"on host far.*wait {SILENT_S:.0f} s.*came \d s ago"):
            check_free(tmp_path)

    @pytest.mark.parametrize("command", ["train", "rlhf"])
    @pytest.mark.parametrize("resume", [[], ["--resume"]])
    def test_is_refused_by_the_command(self, tmp_path, capsys, command, resume):
        run = tmp_path / "run"
        with RunLock.take(run):
            (run / "checkpoints" / "1").mkdir(parents=True)
            options = {"train": TrainOptions, "rlhf": RlhfOptions}[command]().to_dict()
            config = {"command": command, "options": options}
            (run / "config.json").write_text(json.dumps(config))
            assert main([command, "--run", str(run), *resume]) == 2
            assert f"in use by another run: process {os.getpid()}" in capsys.readouterr().err
        assert (run / "checkpoints" / "1").exists()


class TestALockOfARunThatEnded:
    def test_is_taken_over_if_its_process_is_gone(self, tmp_path):
        killed(tmp_path)
        check_free(tmp_path)
        with RunLock.take(tmp_path) as lock:
            lock.check()

    def test_is_taken_over_if_its_process_has_not_been_waited_for(self, tmp_path):
        process = start(tmp_path)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        RunLock.take(tmp_path).release()
        process.communicate()

    def test_is_taken_over_if_another_process_has_its_number(self, tmp_path):
        process = start(tmp_path)
        change(tmp_path, started="1")
        RunLock.take(tmp_path).release()
        process.communicate("")

    def test_is_taken_over_after_silence_on_another_host(self, tmp_path):
        killed(tmp_path)
        change(tmp_path, place="elsewhere")
        long_ago = time.time() - SILENT_S - 1
        os.utime(tmp_path / LOCK, (long_ago, long_ago))
        check_free(tmp_path)
        RunLock.take(tmp_path).release()

    def test_is_taken_over_after_silence_if_it_is_damaged(self, tmp_path):
        (tmp_path / LOCK).write_text('{"since": ')
        with pytest.raises(ValueError, match=r"a run that its run\.lock does not name"):
            RunLock.take(tmp_path)
        os.utime(tmp_path / LOCK, (0, 0))
        RunLock.take(tmp_path).release()

    def test_is_taken_over_even_if_one_was_killed_while_it_took_over(self, tmp_path):
        killed(tmp_path)
        left = (tmp_path / LOCK).read_text()
        (tmp_path / f"{LOCK}.takeover").write_text(left)
        with RunLock.take(tmp_path):
            assert [file.name for file in tmp_path.iterdir()] == [LOCK]


class TestARun:
    def test_gives_the_folder_back(self, tmp_path):
        for error in (None, RuntimeError, KeyboardInterrupt):
            try:
                with RunLock.take(tmp_path):
                    if error:
                        raise error
            except (RuntimeError, KeyboardInterrupt):
                pass
            assert not list(tmp_path.iterdir())

    def test_shows_life(self, tmp_path, monkeypatch):
        monkeypatch.setattr(run_lock, "BEAT_S", 0.01)
        with RunLock.take(tmp_path):
            os.utime(tmp_path / LOCK, (0, 0))
            ends = time.monotonic() + 10
            while (tmp_path / LOCK).stat().st_mtime == 0:
                assert time.monotonic() < ends
                time.sleep(0.01)

    def test_that_was_taken_over_is_told_and_leaves_the_lock_alone(self, tmp_path):
        lock = RunLock.take(tmp_path)
        change(tmp_path, place="elsewhere")
        os.utime(tmp_path / LOCK, (0, 0))
        with RunLock.take(tmp_path) as other:
            with pytest.raises(ValueError, match=rf"no longer this run's.*process {os.getpid()}"):
                lock.check()
            lock.release()
            other.check()

    def test_that_lost_its_folder_is_ended_and_takes_nothing_away(self, tmp_path):
        held = HeldRun(tmp_path)
        held.check()
        (tmp_path / LOCK).unlink()
        with RunLock.take(tmp_path) as other:
            with pytest.raises(LostRunError, match=r"no longer this run's"):
                held.check()
            held.release()
            other.check()

    @pytest.mark.slow
    def test_that_lost_its_folder_writes_no_checkpoint(self, text, tmp_path, capsys, monkeypatch):
        run, log, other = tmp_path / "run", RunFolder.log, []

        def log_and_lose(self, step, values):
            log(self, step, values)
            if step == 3:
                (run / LOCK).unlink()
                other.append(RunLock.take(run))

        monkeypatch.setattr(RunFolder, "log", log_and_lose)
        options = [*TINY, "--steps", "8", "--save-every", "2", "--run", run, "--data", text]
        assert train(*options) == 1
        error = capsys.readouterr().err
        assert "no longer this run's" in error
        assert "make room" not in error
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["2"]
        other[0].check()
        other[0].release()

    def test_in_a_folder_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match=r"cannot write the run folder .*Not a directory"):
            RunLock.take(tmp_path / "file" / "run")
