"""`WeightsAndBiases`: a run's metrics in a project of Weights & Biases."""

# The package is an extra, which the checks of types do without.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zeroxla.cli.tracking.tracker import TrackedRun

ID = "wandb_run_id.txt"
"""The file of a run folder with the run's name at Weights & Biases, for a run that goes on."""


class WeightsAndBiases:
    """Sends metrics to the project that `WANDB_PROJECT` names, "zeroxla" if it names none.

    The package's own settings hold: `WANDB_API_KEY`, `WANDB_ENTITY`, and `WANDB_MODE=offline` to
    keep everything in the run folder. The metric "step" is the x axis, so that steps which run
    again after a checkpoint are drawn where they belong.
    """

    def __init__(self) -> None:
        import wandb  # here, so that the module can be read where the package is not installed

        self._wandb: Any = wandb

    def begin(self, run: TrackedRun) -> None:
        """Begin the run there, or go on with the one that the run folder names."""
        file = run.path / ID
        known = file.read_text().strip() if run.step and file.exists() else None
        self._run: Any = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "zeroxla"),
            name=run.name,
            dir=str(run.path),
            config=dict(run.config),
            job_type=run.command,
            id=known,
            resume="allow" if known else None,
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        file.write_text(f"{self._run.id}\n")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        self._run.log({"step": step, **values})

    def end(self, finished: bool) -> None:
        """Wait until everything is sent, or kept for `wandb sync`."""
        self._run.finish(exit_code=0 if finished else 1)
