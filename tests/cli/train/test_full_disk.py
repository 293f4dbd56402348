"""A disk that fills up while `zeroxla train` writes to it: two lines say what matters, and what is
whole stays."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
from tools.quick import QUICK, quick_compilation  # noqa: F401
from tools.train import train

from zeroxla.checkpoint.errors import in_words
from zeroxla.cli import error_log
from zeroxla.cli.error_log import ErrorLog
from zeroxla.cli.held_run import unwritten

TINY = [
    *("--layers", "1", "--width", "16", "--heads", "2", "--batch", "8", "--length", "16"),
    *("--eval-batches", "1", "--sample-bytes", "8", "--persistence-threshold", "0"),
]

pytestmark = pytest.mark.usefixtures("quick_compilation")

# A run of 6 steps on a disk of 4 MB. After the third step all but 88 KiB are taken, less
# than a checkpoint.
FILLED = """
import os, sys, time
from pathlib import Path
from zeroxla.cli.main import main
from zeroxla.cli.run_folder import RunFolder

disk, data, *options = sys.argv[1:]
ballast, log = Path(disk) / "ballast", RunFolder.log


def log_and_fill(self, step, values):
    log(self, step, values)
    if step == 3:
        while not (Path(disk) / "run" / "checkpoints" / "2").exists():
            time.sleep(0.01)
        room = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        ballast.write_bytes(bytes(room - 88 * 1024))


RunFolder.log = log_and_fill
run = ["--run", f"{disk}/run"]
print("status", main(["train", *run, "--data", data, *options]), flush=True)
RunFolder.log = log
print("there", sorted(os.listdir(f"{disk}/run/checkpoints")), sorted(os.listdir(f"{disk}/run")))
print("log", Path(f"{disk}/run/errors.log").read_text().count("Traceback"))
ballast.unlink()
print("status", main(["train", "--resume", *run]), flush=True)
print("there", sorted(os.listdir(f"{disk}/run/checkpoints")))
"""


@pytest.mark.slow
def test_a_disk_that_fills_up_is_told_in_two_lines(text, tmp_path):
    options = [*TINY, "--steps", "6", "--save-every", "2", "--eval-every", "100"]
    command = [sys.executable, "-c", FILLED, str(tmp_path), str(text), *options]
    mount = f"mount -t tmpfs -o size=4m tmpfs {tmp_path}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("needs root, to mount a small disk")
    command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **QUICK})
    assert done.returncode == 0, done.stderr + done.stdout
    run, lines = tmp_path / "run", done.stdout.splitlines()
    for number in (4, 6):
        begins = f"warning: the checkpoint of step {number} could not be written to {run}/check"
        (i,) = (i for i, line in enumerate(lines) if line.startswith(begins))
        assert "No space left on device (it takes over" in lines[i]
        assert lines[i + 1].startswith("the one of step 2 is whole; make room")
    assert done.stderr == ""
    assert "Traceback" not in done.stdout
    kept = "the checkpoint of step 2 is whole; make room, then continue with: zeroxla train"
    end = lines.index("status 1")
    assert lines[end - 1] == f"warning: step 6 is not saved; {kept} --resume --run {run}"
    (left,) = (line for line in lines if line.startswith("there ['2'] "))
    assert "run.lock" not in left
    assert "errors.log" in left
    assert any(line.startswith("log ") and line != "log 0" for line in lines)
    assert lines[-2:] == ["status 0", "there ['4', '6']"]


@pytest.mark.slow
def test_a_full_disk_of_the_state_is_told_in_two_lines(text, tmp_path, capsys, monkeypatch):
    run, real, calls = tmp_path / "run", os.pwrite, []

    def pwrite(fd, data, offset):
        calls.append(offset)
        if len(calls) > 1300:  # some 260 in a step
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    disk = ["--offload-optimizer", "disk", "--offload-path", tmp_path / "disk"]
    arguments = ["--run", run, "--data", text, *TINY, "--steps", "30", "--save-every", "1", *disk]
    assert train(*arguments) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: cannot write {tmp_path}/disk/zeroxla-")
    assert "No space left on device (" in first
    assert " is whole; make room, then continue with: zeroxla train --resume" in second
    assert "Traceback" in (run / "errors.log").read_text()
    assert not (run / "run.lock").exists()


class TestTheLine:
    def test_names_the_file_the_reason_and_the_room(self, tmp_path):
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "a.state"))
        assert unwritten(error).startswith(f"cannot write {tmp_path}/a.state: No space left on dev")
        assert unwritten(error).endswith(" free)")

    def test_tells_what_failed_in_another_process(self):
        text = f"process 1 failed at its state on disk: {os.strerror(errno.ENOSPC)}"
        assert unwritten(ValueError(text)) == text

    def test_is_of_a_full_disk_only(self, tmp_path):
        assert unwritten(OSError(errno.EIO, os.strerror(errno.EIO))) is None
        assert unwritten(ValueError("x")) is None
        denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        assert in_words(denied, tmp_path) == "Permission denied"


class TestErrorLog:
    @pytest.fixture
    def log(self, tmp_path):
        log = ErrorLog(tmp_path / "errors.log")
        log.open()
        yield log
        log.close()

    def test_takes_errors_of_libraries_and_leaves_their_warnings(self, log, caplog):
        for name in ("absl", "asyncio"):
            try:
                raise RuntimeError("a closed loop")
            except RuntimeError:
                logging.getLogger(name).exception("Failed to commit")
            logging.getLogger(name).warning("slow disk")
        found = log.file.read_text()
        assert found.count("Failed to commit") == found.count("RuntimeError: a closed loop") == 2
        assert [record.message for record in caplog.records] == ["slow disk"] * 2

    def test_takes_what_threads_can_raise_to_nobody(self, log, capsys):
        class Failing:
            def __del__(self):
                raise RuntimeError("nobody hears this")

        thread = threading.Thread(target=Failing)
        thread.start()
        thread.join()
        assert "RuntimeError: nobody hears this" in log.file.read_text()
        assert capsys.readouterr().err == ""

    def test_stays_small(self, log):
        for _ in range(3):
            log.write("x" * error_log.LIMIT_BYTES)
        assert log.file.stat().st_size == error_log.LIMIT_BYTES

    def test_takes_a_part_of_the_room_at_most(self, log, monkeypatch):
        """Of the room that there is without it, however many errors there are."""

        def usage(folder):
            taken = log.file.stat().st_size if log.file.exists() else 0
            return types.SimpleNamespace(free=400 - taken)

        monkeypatch.setattr("shutil.disk_usage", usage)
        for _ in range(5):
            log.write("x" * 1000)
        assert log.file.stat().st_size == 100

    def test_that_cannot_be_written_is_no_error(self):
        ErrorLog(Path("/dev/null/errors.log")).write("text")
