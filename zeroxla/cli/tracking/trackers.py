"""`Trackers`: all trackers of a run. One that fails while the run goes on is told once and left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zeroxla.cli.named_object import check_object, named_object
from zeroxla.cli.tracking.tracker import TrackedRun, Tracker
from zeroxla.program.extras import check_package

KNOWN = {
    "tensorboard": ("zeroxla.cli.tracking.tensorboard:TensorBoardEvents", "cli", "tensorboardX"),
    "wandb": ("zeroxla.cli.tracking.weights_and_biases:WeightsAndBiases", "wandb", "wandb"),
    "aim": ("zeroxla.cli.tracking.aim_repository:AimRepository", "aim", "aim"),
}
"""The trackers that have names: their classes, the extras that install them, and their packages."""


class Trackers:
    """Trackers that are told the same.

    Args:
      named: trackers by the names that the user gave them.
      warn: prints a warning.
    """

    def __init__(self, named: Mapping[str, Tracker], warn: Callable[[str], None]) -> None:
        self._named, self._warn = dict(named), warn

    @classmethod
    def make(cls, names: Sequence[str], warn: Callable[[str], None]) -> Trackers:
        """Make the trackers that `--track` names.

        Args:
          names: "tensorboard", "wandb", "aim", or "module:Class" for a class of the user's own.
          warn: prints a warning.

        Raises:
          ValueError: a name stands for nothing, or for something that is no tracker; or a tracker
            cannot be made.
          MissingExtraError: a tracker's package is not installed.
        """
        return cls({name: _make(name) for name in dict.fromkeys(names)}, warn)

    def begin(self, run: TrackedRun) -> None:
        """Tell all trackers about the run.

        Raises:
          ValueError: one of them cannot begin. Those before it have been ended.
        """
        named, self._named = self._named, {}
        for name, tracker in named.items():
            try:
                tracker.begin(run)
                self._named[name] = tracker
            except Exception as error:
                self.end(False)
                raise ValueError(
                    f"--track {name} cannot begin: {type(error).__name__}: {error}; mend it, or "
                    "leave it out of --track"
                ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Tell all trackers the values of a step."""
        self._tell(lambda tracker: tracker.log(step, values))

    def end(self, finished: bool) -> None:
        """Tell all trackers that the run has ended; they get nothing more."""
        self._tell(lambda tracker: tracker.end(finished))
        self._named = {}

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._named.items()):
            try:
                call(tracker)
            except Exception as error:
                del self._named[name]
                self._warn(
                    f"--track {name} failed and gets no more metrics: {type(error).__name__}: "
                    f"{error}; training goes on, and metrics.jsonl has all of them"
                )


def check_tracker(name: str) -> None:
    """Check that a name of `--track` stands for something, without importing it.

    Raises:
      ValueError: it stands for nothing.
      MissingExtraError: the tracker's package is not installed.
    """
    if name not in KNOWN and ":" not in name:
        raise ValueError(
            f"--track {name!r} is no tracker; give {', '.join(KNOWN)}, or MODULE:CLASS for a class "
            "of your own"
        )
    if name not in KNOWN:
        check_object(name, "--track")
        return
    _, package, module = KNOWN[name]
    limits = " (on Python 3.12 or less: Aim is not made for later ones)" if name == "aim" else ""
    check_package(module, package, f"--track {name} needs", limits)


def _make(name: str) -> Tracker:
    check_tracker(name)
    if name in KNOWN:
        return named_object(KNOWN[name][0], "--track")()
    kind = named_object(name, "--track")
    lacking = [method for method in ("begin", "log", "end") if not hasattr(kind, method)]
    if lacking:
        raise ValueError(
            f"--track {name!r} has no method {lacking[0]!r}; a tracker has begin(run), "
            "log(step, values) and end(finished)"
        )
    try:
        return kind()
    except Exception as error:
        raise ValueError(
            f"--track {name!r} cannot be made without arguments: {type(error).__name__}: {error}"
        ) from error
