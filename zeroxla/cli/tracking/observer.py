"""`Observer`: watches a run while it trains, with trackers, a profile and the seconds by phase."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax

from zeroxla.cli.phase_seconds import PhaseSeconds
from zeroxla.cli.run_folder import NoRunFolder, RunFolder, read_config
from zeroxla.cli.tracking.options import TrackingOptions
from zeroxla.cli.tracking.profiler import FOLDER, Profiler
from zeroxla.cli.tracking.tracker import TrackedRun
from zeroxla.cli.tracking.trackers import Trackers
from zeroxla.mesh.processes.exchange import on_first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observer:
    """Watches one run. Trackers and profiles are the first process's.

    Attributes:
      trackers: are told the metrics.
      profiler: traces the steps of --profile.
      seconds: counts the host's seconds by phase.
    """

    trackers: Trackers
    profiler: Profiler
    seconds: PhaseSeconds = dataclasses.field(default_factory=PhaseSeconds)

    @classmethod
    def of(
        cls, options: TrackingOptions, steps: int, path: Path, warn: Callable[[str], None]
    ) -> Observer:
        """Make the trackers before the run folder. All processes take part.

        Args:
          options: the options.
          steps: the number of the run's last step.
          path: the run folder.
          warn: prints a warning.

        Raises:
          ValueError, MissingExtraError: see `Trackers.make`.
        """
        made = on_first("tracker", lambda: Trackers.make(options.track, warn))
        profiled = options.profiled(steps) if jax.process_index() == 0 else None
        return cls(trackers=made or Trackers({}, warn), profiler=Profiler(profiled, path / FOLDER))

    def begin(self, folder: RunFolder | NoRunFolder, command: str, step: int) -> None:
        """Tell the trackers about the run, whose folder is open. All processes take part.

        Args:
          folder: the run folder.
          command: the command that made it.
          step: the number of steps that the run has taken.

        Raises:
          ValueError: a tracker cannot begin.
        """

        def tell() -> None:
            if isinstance(folder, RunFolder):
                self.trackers.begin(
                    TrackedRun(
                        name=folder.path.name,
                        path=folder.path,
                        command=command,
                        config=read_config(folder.path),
                        step=step,
                        files=folder.files,
                    )
                )

        on_first("tracker", tell)

    def end(self, *, finished: bool) -> None:
        """End a profile that still runs, and tell the trackers that the run has ended."""
        self.profiler.close()
        self.trackers.end(finished)
