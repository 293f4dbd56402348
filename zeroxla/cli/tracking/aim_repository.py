"""`AimRepository`: a run's metrics in a repository of Aim."""

# The package is an extra, which the checks of types do without.
# pyright: reportMissingImports=false

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from zeroxla.cli.tracking.tracker import TrackedRun

HASH = "aim_run_hash.txt"
"""The file of a run folder with the run's name in the repository, for a run that goes on."""


class AimRepository:
    """Writes metrics into the repository that `AIM_REPO` names, `.aim` beside the run folder if it
    names none: `aim up --repo FOLDER` shows it.

    A command of zeroxla is an experiment, and config.json the run's parameters.
    """

    def __init__(self) -> None:
        import aim  # here, so that the module can be read where the package is not installed

        self._aim: Any = aim

    def begin(self, run: TrackedRun) -> None:
        """Begin the run there, or go on with the one that the run folder names."""
        file = run.path / HASH
        known = file.read_text().strip() if run.step and file.exists() else None
        self._run: Any = self._aim.Run(
            run_hash=known,
            repo=os.environ.get("AIM_REPO", str(run.path.absolute().parent)),
            experiment=f"zeroxla {run.command}",
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        self._run.name = run.name
        self._run["config"] = dict(run.config)
        file.write_text(f"{self._run.hash}\n")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step. Aim takes no values that are not finite."""
        for name, value in values.items():
            if math.isfinite(value):
                self._run.track(float(value), name=name, step=step)

    def end(self, finished: bool) -> None:
        """Close the run."""
        self._run["finished"] = finished
        self._run.close()
