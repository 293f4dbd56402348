"""The options of what is seen of a run while it trains; `train` and `rlhf` share them."""

from __future__ import annotations

from dataclasses import dataclass

from zeroxla.cli.tracking.profiled_steps import ProfiledSteps


@dataclass(frozen=True, kw_only=True)
class TrackingOptions:
    """Trackers and profiles. metrics.jsonl in the run folder has all metrics in any case."""

    track: tuple[str, ...] = ("tensorboard",)
    """Where metrics go besides: tensorboard, wandb, aim, or MODULE:CLASS, a class of your own with
    begin(run), log(step, values) and end(finished). Nothing after --track: nowhere."""
    profile: str | None = None
    """Steps FIRST:LAST to profile, such as 10:12: their trace goes into the run folder, for the
    viewers of XProf and Perfetto, and a table tells the time of each phase. Not the first step: it
    compiles. Evaluations and checkpoints between these steps count as idle time."""

    def profiled(self, steps: int) -> ProfiledSteps | None:
        """Return the steps to profile; None if there are none.

        Args:
          steps: the number of the run's last step.

        Raises:
          ValueError: `profile` names no steps, or steps after the last one.
        """
        return None if self.profile is None else ProfiledSteps.of(self.profile, steps)
