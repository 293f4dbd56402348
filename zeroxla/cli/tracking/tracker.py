"""`Tracker`: the interface of everything that is told a run's metrics, a user's own class too."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from zeroxla.cli.appended_files import AppendedFiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told about a run when it begins.

    Attributes:
      name: the name of the run folder.
      path: the run folder. A tracker may keep files of its own there.
      command: the command that made the run: "train" or "rlhf".
      config: the contents of config.json: plain values of JSON in nested dicts.
      step: the number of steps that the run has taken already. 0 for a new run; more means that it
        goes on from the checkpoint of that step, and that later steps run again.
      files: appends to files of the folder; nothing is lost on a full disk.
    """

    name: str
    path: Path
    command: str
    config: Mapping[str, Any]
    step: int
    files: AppendedFiles


class Tracker(Protocol):
    """Takes the metrics of one run, in the first process only.

    A tracker is made without arguments, before the run folder is. If its constructor or `begin`
    raises an error, the run does not begin. An error of `log` or `end` costs the run nothing: it is
    told once, and the tracker gets no more.
    """

    def begin(self, run: TrackedRun) -> None:
        """Get ready, before the first step."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step; a name may occur in some steps only, and a value may be NaN.

        Calls come in the order of steps. A step can have two calls, with different names: its own
        metrics, and those of an evaluation after it.
        """
        ...

    def end(self, finished: bool) -> None:
        """Finish. `finished` is False if the run was interrupted, or ended by an error."""
        ...
