"""`RunLock`: a run folder belongs to one run, which its file `run.lock` names.

The file is made only if there is none, which file systems do in one act, so that of several starts
one wins. Its time is touched while the run goes. What a run leaves that was killed is told by its
process, which is gone, or, if that was on another host, by the time of the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import threading
import time
import uuid
from pathlib import Path

from zeroxla.cli.process_identity import ProcessIdentity

LOCK = "run.lock"
BEAT_S = 10.0
"""Seconds between two signs of life of a run."""
SILENT_S = 120.0
"""Seconds without a sign of life after which a run on another host counts as ended."""
_WRITING_S = 1.0  # time for another process to write the line of a lock that it has just made


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Holder:
    """The content of a lock: the process that holds it; None in a file that is damaged."""

    process: ProcessIdentity | None
    since: str
    token: str

    def is_gone(self, file: Path) -> bool:
        """Return whether the run that wrote this into `file` has ended."""
        if self.process is not None and self.process.is_here():
            return not self.process.runs()
        return _silence(file) > SILENT_S


class RunLock:
    """The lock of a run folder, held by this process. `take` makes it.

    Attributes:
      path: the run folder.
    """

    def __init__(self, path: Path, holder: _Holder) -> None:
        self.path, self._holder = path, holder
        self._ended = threading.Event()
        self._beat = threading.Thread(target=self._show_life, name="run lock", daemon=True)
        self._beat.start()

    @classmethod
    def take(cls, path: Path) -> RunLock:
        """Take the lock of a run folder, which is made if missing.

        Raises:
          ValueError: another run holds it; with its host, its process and since when. Or the folder
            cannot be written.
        """
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        holder = _Holder(process=ProcessIdentity.mine(), since=since, token=uuid.uuid4().hex)
        try:
            path.mkdir(parents=True, exist_ok=True)
            _take(path / LOCK, holder)
        except OSError as error:
            raise ValueError(
                f"cannot write the run folder {path}: {error.strerror}; correct its permissions or "
                "free space, or choose another folder with --run"
            ) from error
        return cls(path, holder)

    def check(self) -> None:
        """Check that the folder is still this run's.

        Raises:
          ValueError: another run has taken it over, because this one gave no sign of life.
        """
        now = _read(self.path / LOCK)
        if now is None or now.token != self._holder.token:
            by = "nobody" if now is None else _name(now)
            raise ValueError(
                f"{self.path} is no longer this run's: its {LOCK} names {by}, which happens when a "
                f"run is stopped for more than {SILENT_S:.0f} s or the file is deleted; this run "
                "ends and writes nothing more"
            )

    def release(self) -> None:
        """Give the folder back. A lock that another run has taken over stays."""
        self._ended.set()
        self._beat.join()
        with contextlib.suppress(OSError):
            _remove(self.path / LOCK, self._holder)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _show_life(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self.path / LOCK)  # takes no room on a full disk


def check_free(path: Path) -> None:
    """Check that no run holds a run folder, without taking it. A folder that cannot be read passes:
    `RunLock.take` says so.

    Raises:
      ValueError: a run holds it; as `RunLock.take`.
    """
    with contextlib.suppress(OSError):
        _check_gone(path / LOCK, _read(path / LOCK))


def _take(file: Path, holder: _Holder) -> None:
    """Make a lock file. If there is one of a run that has ended, take its place.

    Raises:
      ValueError: a run that goes on holds it.
      OSError: the file cannot be written.
    """
    while not _create(file, holder):
        found = _read(file)
        _check_gone(file, found)
        if found is not None:
            # Of two that find the same lock one removes it; the other must not remove the new one.
            turn = file.with_name(f"{file.name}.takeover")
            _take(turn, holder)
            try:
                _remove(file, found)
            finally:
                _remove(turn, holder)


def _check_gone(file: Path, found: _Holder | None) -> None:
    if found is None or found.is_gone(file):
        return
    folder, here = file.parent, found.process is not None and found.process.is_here()
    remedy = (
        f"wait until that run ends, or stop it (kill {found.process.pid})"
        if here and found.process is not None
        else f"wait until that run ends; if its host is down, wait {SILENT_S:.0f} s, after which "
        f"a run without a sign of life is taken over (the last one came "
        f"{_silence(file):.0f} s ago)"
    )
    raise ValueError(
        f"{folder} is in use by {_name(found)}; {remedy}, or choose another folder with --run"
    )


def _name(holder: _Holder) -> str:
    process = holder.process
    if process is None:
        return f"a run that its {LOCK} does not name"
    return f"another run: process {process.pid} on host {process.host}, since {holder.since}"


def _create(file: Path, holder: _Holder) -> bool:
    """Make a lock file; return False if there is one."""
    try:
        fd = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    try:
        with open(fd, "w", encoding="utf-8") as opened:
            opened.write(json.dumps(dataclasses.asdict(holder)) + "\n")
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    return True


def _read(file: Path) -> _Holder | None:
    """Return what a lock file says; None if there is none."""
    ends = time.monotonic() + _WRITING_S
    while True:
        try:
            said = json.loads(file.read_text(encoding="utf-8"))
            return _Holder(**{**said, "process": ProcessIdentity(**said["process"])})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):  # cut short, or no lock of ours
            if time.monotonic() > ends:
                return _Holder(process=None, since="", token="")
            time.sleep(0.01)


def _remove(file: Path, holder: _Holder) -> None:
    """Remove a lock file, if it is still this holder's."""
    found = _read(file)
    if found is not None and found.token == holder.token:
        file.unlink(missing_ok=True)


def _silence(file: Path) -> float:
    """Return the seconds since a file was touched, by the clock of its file system: hosts' clocks
    differ."""
    try:
        with tempfile.TemporaryFile(dir=file.parent) as probe:
            now = os.fstat(probe.fileno()).st_mtime
    except OSError:  # a folder that cannot be written
        now = time.time()
    try:
        return now - file.stat().st_mtime
    except FileNotFoundError:  # the lock was released meanwhile
        return float("inf")
