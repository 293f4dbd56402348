"""The folder of a training run: config.json, metrics.jsonl, plots and texts.

`metrics.jsonl` is the record: each line is a JSON object with "step" and the values of that step.
Plots and trackers repeat it. A write that fails, as on a full disk, loses nothing: the failure is
reported once, and lines wait in memory until the disk takes them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroxla.checkpoint.errors import in_words
from zeroxla.cli.appended_files import AppendedFiles
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

    Attributes:
      files: appends to the folder's files.
    """

    def __init__(self, path: Path, report: Callable[[str], None] = lambda text: None):
        self.path = path
        self.files = AppendedFiles(path, report)

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
        check_new(path, named)
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
        return folder

    def log(self, step: int, values: dict[str, float | int]) -> None:
        """Record the values of a step. Values that are not finite become null. A full disk is no
        error."""
        line = {"step": step} | {n: v if math.isfinite(v) else None for n, v in values.items()}
        self.files.append(METRICS, (json.dumps(line) + "\n").encode())

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
        self.files.close(METRICS)

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


def check_new(path: Path, named: Path | None = None) -> None:
    """Check that a folder holds no run with checkpoints, and may be a folder.

    Args:
      path: the folder.
      named: what --run names, for messages.

    Raises:
      ValueError: it does, or a file is in its way.
    """
    if has_checkpoint(path):
        raise ValueError(
            f"{path} already holds a run; continue it with --resume --run {named or path}, or "
            "choose another folder with --run"
        )
    if files := [parent for parent in (path, *path.parents) if parent.is_file()]:
        raise ValueError(
            f"cannot write the run folder {path}: Not a directory: {files[0]} is a file; choose "
            "another with --run"
        )


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
