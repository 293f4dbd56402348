"""The folder of a training run: config.json, metrics.jsonl, TensorBoard events, plots and texts.

`metrics.jsonl` is the record: each line is a JSON object with "step" and the values of that step.
The events and the plot repeat it. A write that fails, as on a full disk, loses nothing: the failure
is reported once, and lines and events wait in memory until the disk takes them.
"""

# Generated protobuf modules make their names when they are imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from zeroxla.checkpoint.errors import in_words
from zeroxla.cli.errors import RunFolderError
from zeroxla.cli.run_lock import LOCK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIG = "config.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"


class RunFolder:
    """Writes and reads the files of one run. `create` and `reopen` make it.

    Args:
      path: the folder.
      report: called with a sentence when metrics cannot be written, and when they can again.
    """

    def __init__(self, path: Path, report: Callable[[str], None] = lambda text: None):
        self.path = path
        self._report = report
        # (file name, bytes) in the order of writing; each entry is written whole or not at all.
        self._pending: list[tuple[str, bytes]] = []
        self._failing = False
        # Not tensorboardX's SummaryWriter: it writes from a thread with a bounded queue, and when a
        # full disk has ended that thread, the training loop blocks on the queue for ever.
        self._events = f"events.out.tfevents.{time.time_ns()}"
        self._add_event(file_version="brain.Event:2")

    @classmethod
    def create(
        cls,
        path: Path,
        config: dict[str, Any],
        report: Callable[[str], None] = lambda text: None,
        named: Path | None = None,
    ) -> RunFolder:
        """Make the folder and write its config. For messages, `named` is what --run names.

        Raises:
          ValueError: the folder already holds a run with checkpoints, or other files, or cannot be
            written.
        """
        if has_checkpoint(path):
            raise ValueError(
                f"{path} already holds a run; continue it with --resume --run {named or path}, or "
                "choose another folder with --run"
            )
        folder = cls(path, report)
        try:
            found = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
            if found - {LOCK} and CONFIG not in found:
                raise ValueError(
                    f"{path} is not empty and holds no run; choose another folder with --run"
                )
            path.mkdir(parents=True, exist_ok=True)
            # An earlier attempt that never saved a checkpoint leaves nothing worth keeping.
            (path / METRICS).unlink(missing_ok=True)
            for events in path.glob("events.out.tfevents.*"):
                events.unlink()
            folder.write_text(CONFIG, json.dumps(config, indent=2) + "\n")
            folder.write_text(METRICS, "")
        except (OSError, RunFolderError) as error:
            raise ValueError(
                f"cannot write the run folder {path}: {error}; choose another with --run"
            ) from error
        return folder

    @classmethod
    def reopen(
        cls, path: Path, *, step: int, report: Callable[[str], None] = lambda text: None
    ) -> RunFolder:
        """Open a run to continue it after `step`. Metrics of later steps are dropped.

        Those steps ran after the checkpoint was saved, and will run again.

        Raises:
          ValueError: the folder cannot be written.
        """
        folder = cls(path, report)
        kept = [json.dumps(line) + "\n" for line in folder.metrics() if line["step"] <= step]
        try:
            folder.write_text(METRICS, "".join(kept))
        except (OSError, RunFolderError) as error:
            raise ValueError(
                f"cannot write the run folder {path}: {error}; free space or correct its "
                "permissions, then resume again"
            ) from error
        # Tells TensorBoard to forget those steps, too.
        folder._add_event(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        return folder

    def log(self, step: int, values: dict[str, float | int]) -> None:
        """Record the values of a step. Values that are not finite become null. A full disk is no
        error."""
        line = {"step": step} | {n: v if math.isfinite(v) else None for n, v in values.items()}
        self._pending.append((METRICS, (json.dumps(line) + "\n").encode()))
        scalars = [Summary.Value(tag=n, simple_value=float(v)) for n, v in values.items()]
        self._add_event(step=step, summary=Summary(value=scalars))
        error = self._flush()
        if error and not self._failing:
            self._report(
                f"cannot write metrics to {self.path}: {error}\n"
                "training goes on, and lines wait in memory until there is room"
            )
        elif self._failing and not error:
            self._report(f"metrics are written to {self.path} again")
        self._failing = error is not None

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl. A last line that a crash has cut short is left out."""
        try:
            text = (self.path / METRICS).read_text()
        except FileNotFoundError:
            return []
        lines = []
        for line in text.splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
        return lines

    def write_text(self, name: str, text: str) -> None:
        """Write a text file. It replaces an older one only when it is whole.

        Raises:
          RunFolderError: it cannot be written; with the file's name and the reason.
        """
        with self._replacing(name) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def write_figure(self, name: str, figure: Figure) -> None:
        """Write a figure as a PNG, as `write_text` writes a text.

        Raises:
          RunFolderError: it cannot be written; with the file's name and the reason.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        with self._replacing(name) as temporary:
            FigureCanvasAgg(figure).print_png(str(temporary))

    def close(self) -> None:
        """Write the lines that still wait in memory.

        Raises:
          RunFolderError: lines could not be written.
        """
        error = self._flush()
        if error:
            num_lines = sum(name == METRICS for name, _ in self._pending)
            raise RunFolderError(
                f"{num_lines} lines could not be written to {self.path / METRICS}: {error}"
            )

    def _flush(self) -> str | None:
        """Append the entries that wait; return the error that stopped it, or None."""
        try:
            while self._pending:
                name, data = self._pending[0]
                with open(self.path / name, "ab", buffering=0) as file:
                    append_whole(file, data)
                del self._pending[0]
        except OSError as error:
            return in_words(error, self.path)
        return None

    def _add_event(self, **fields: Any) -> None:
        data = Event(wall_time=time.time(), **fields).SerializeToString()
        # TensorFlow's record format: length, its checksum, data, its checksum.
        size = struct.pack("<Q", len(data))
        checksums = [struct.pack("<I", masked_crc32c(part)) for part in (size, data)]
        self._pending.append((self._events, size + checksums[0] + data + checksums[1]))

    @contextlib.contextmanager
    def _replacing(self, name: str) -> Iterator[Path]:
        temporary = self.path / f".{name}.tmp"
        try:
            yield temporary
            os.replace(temporary, self.path / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise RunFolderError(
                f"cannot write {self.path / name}: {in_words(error, self.path)}"
            ) from error


class NoRunFolder:
    """Stands for a `RunFolder` in all processes but the first: it takes the same calls, and writes
    nothing."""

    def log(self, step: int, values: dict[str, float | int]) -> None:
        """Record nothing."""

    def write_text(self, name: str, text: str) -> None:
        """Write nothing."""

    def write_figure(self, name: str, figure: Figure) -> None:
        """Write nothing."""

    def metrics(self) -> list[dict[str, Any]]:
        """Return nothing."""
        return []

    def close(self) -> None:
        """Do nothing: nothing waits."""


def has_checkpoint(path: Path) -> bool:
    """Return whether the folder holds a run with at least one complete checkpoint."""
    folder = path / CHECKPOINTS
    return folder.is_dir() and any(entry.name.isdigit() for entry in folder.iterdir())


def read_config(path: Path) -> dict[str, Any]:
    """Read a run folder's config.json.

    Raises:
      ValueError: the folder holds no run, or its config is damaged.
    """
    file = path / CONFIG
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(
            f"{path} holds no run to resume ({CONFIG}: {error.strerror}); name a run folder with "
            "--run"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is damaged ({error}); restore it, or start a new run") from error
    if not isinstance(config, dict):
        raise ValueError(
            f"{file} holds a {type(config).__name__}, and not the sections of a run; restore it, "
            "or start a new run"
        )
    return config


def check_command(path: Path, config: dict[str, Any], command: str) -> None:
    """Check which command made a run.

    Args:
      path: the run's folder.
      config: the run's config; see `read_config`.
      command: the command that must have made it, such as "train".

    Raises:
      ValueError: another command made the run.
    """
    made_by = config.get("command", "train")
    if made_by != command:
        raise ValueError(
            f"{path} is a run of `zeroxla {made_by}`, and this needs one of `zeroxla {command}`; "
            "name another folder"
        )


def append_whole(file: Any, data: bytes) -> None:
    """Append all of `data` to an unbuffered binary file, or nothing."""
    start = file.seek(0, os.SEEK_END)
    try:
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(start)
        raise
