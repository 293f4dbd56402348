"""`Job`: a run of a command that trains, from its options to its last checkpoint.

What is trained stands in the `job.py` of `zeroxla train` and of `zeroxla rlhf`. Their runs have the
rest in common: the run folder, resuming, interrupting, checkpoints and the exit status.
"""

from __future__ import annotations

import abc
import contextlib
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import flax
import jax
import optax
from jax.sharding import Mesh
from rich.progress import Progress

from zeroxla.checkpoint.checkpointer import Checkpointer
from zeroxla.checkpoint.errors import SaveError
from zeroxla.cli.continued_run import RUNS
from zeroxla.cli.errors import UsageError
from zeroxla.cli.interrupt import StopRequest, stop_on_signal
from zeroxla.cli.option_groups import JobOptions
from zeroxla.cli.run_folder import CHECKPOINTS, NoRunFolder, RunFolder, read_config
from zeroxla.cli.train.output import Output
from zeroxla.mesh.processes.environment import STARTED
from zeroxla.mesh.processes.exchange import agree, on_first
from zeroxla.program.extras import extra

_Options = TypeVar("_Options", bound=JobOptions)
_Output = TypeVar("_Output", bound=Output)


class Job(abc.ABC, Generic[_Options, _Output]):
    """One run: everything that is decided before the first step, and the loop.

    The constructor of a subclass prepares the training, and ends with `open_run`. Bad input raises
    ValueError there, before a step is taken.

    Attributes:
      options: the command's options.
      mesh: the mesh of all steps.
      output: what prints.
      path: the run folder.
      folder: writes the run's files, in the first process only.
      checkpoints: the checkpoints of the state.
      done: the number of steps that the state has taken.
      bar: the progress bar, while the loop runs.
    """

    command: ClassVar[str]
    """The name of the command."""
    unit: ClassVar[str]
    """The name of one turn of the loop: "step"."""
    label: ClassVar[str]
    """The label of the progress bar."""

    folder: RunFolder | NoRunFolder
    checkpoints: Checkpointer
    bar: Progress

    def __init__(self, options: _Options, mesh: Mesh, output: _Output) -> None:
        self.options, self.mesh, self.output = options, mesh, output
        started = os.environ.get(STARTED) or time.strftime("%Y%m%d-%H%M%S")
        self.path: Path = options.output.run or RUNS / f"{self.command}-{started}"
        self.done = 0
        with extra("cli", f"zeroxla {self.command} needs"):
            import matplotlib.figure  # noqa: F401  (used after the last step, when it is too late)

    @property
    @abc.abstractmethod
    def num_steps(self) -> int:
        """Steps in all."""

    @property
    @abc.abstractmethod
    def source(self) -> str:
        """A sentence about the data that was read."""

    @abc.abstractmethod
    def keep(self) -> None:
        """Write into a new run folder what resuming and exporting need besides the options."""

    @abc.abstractmethod
    def restore(self) -> None:
        """Read the newest checkpoint; set `done`."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Make the state if there is none yet, and print what comes before the first step."""

    @abc.abstractmethod
    def loop(self, stop: StopRequest) -> None:
        """Take steps until all are done or a stop is requested; count them in `done`."""

    @abc.abstractmethod
    def write_checkpoint(self, *, last: bool) -> None:
        """Write a checkpoint of the state; the last one even between the steps that have one.

        Raises:
          SaveError: it could not be written.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """Close the folder, draw and print the results of a run that has taken all its steps."""

    def open_checkpoints(self) -> None:
        """Open the folder of checkpoints."""
        self.checkpoints = self.checkpointer(CHECKPOINTS)

    def checkpointer(self, name: str, *, asynchronous: bool = True) -> Checkpointer:
        """Open a folder of checkpoints in the run folder."""
        run = self.options.output
        return Checkpointer(
            self.path / name,
            keep=run.keep,
            every=run.save_every,
            asynchronous=asynchronous,
            report=self.output.warn,
        )

    def open_run(self, data: str, record: Mapping[str, Any], **more: Any) -> None:
        """Make the run folder; or open it, and restore the newest checkpoint.

        Args:
          data: what the model learns from, in a word: "text".
          record: what a resumed run must find the same about it, with a "fingerprint".
          **more: further entries of config.json.

        Raises:
          ValueError: the folder cannot be written, or the data is not what the run began with.
        """
        here = circumstances({data: record}, self.mesh)
        agree(data, {"fingerprint": record["fingerprint"]}, "give all hosts the same files")
        if self.options.output.resume:
            check_same(read_config(self.path), here, data)
            self.open_checkpoints()
            self.restore()
            found = on_first(
                "run folder",
                lambda: RunFolder.reopen(self.path, step=self.done, report=self.output.warn),
            )
        else:
            options = self.options.to_dict()
            config = {"command": self.command, "options": options, **more, **here}
            found = on_first("run folder", lambda: self._new_folder(config))
            self.open_checkpoints()
        self.folder = found or NoRunFolder()

    def _new_folder(self, config: dict[str, Any]) -> RunFolder:
        folder = RunFolder.create(self.path, config, self.output.warn)
        self.keep()
        return folder

    def run(self) -> int:
        """Run the job; return the exit status."""
        self.output.setup(self.mesh, self.source)
        if self.options.output.resume:
            self.output.print(f"Resuming {self.path} after {self.unit} {self.done}")
        self.begin()
        with (
            stop_on_signal(lambda: self.output.stopping(self.unit)) as stop,
            self.output.progress(self.num_steps, self.done, self.label) as self.bar,
        ):
            self.loop(stop)
        saved = self.save(last=True)  # first: it is what cannot be made again
        if self.done == self.num_steps:
            self.finish()
        else:
            self.folder.close()
            if saved:
                self.output.stopped(f"{self.unit} {self.done}", self.command, self.path)
        return 0 if saved else 1

    def show_progress(self, number: int, status: str) -> None:
        """Move the progress bar to a number of steps, with a text beside it."""
        self.bar.update(self.bar.task_ids[0], completed=number, status=status)

    def is_due(self, every: int) -> bool:
        """Return whether something that is done every so many steps is due, and not at the end."""
        return self.done % every == 0 and self.done < self.num_steps

    def save(self, *, last: bool = False) -> bool:
        """Write a checkpoint, the last one until it is whole; report a failure and return False."""
        try:
            self.write_checkpoint(last=last)
            if last:
                self.checkpoints.wait()
        except SaveError as error:
            self.output.warn(str(error))
            return False
        return True

    def close(self) -> None:
        """Wait for checkpoints that are being written."""
        self.checkpoints.close()


def run_job(make: Callable[[], Job[Any, Any]]) -> int:
    """Make a job and run it.

    Returns:
      The exit status: 0, also when interrupted and saved; 1 if the last state could not be saved.

    Raises:
      UsageError: an option or an input cannot work. It is found before the first step.
      RunFolderError: something besides a checkpoint could not be written at the end.
    """
    try:
        job = make()
    except ValueError as error:
        raise UsageError(str(error)) from error
    with contextlib.closing(job):
        return job.run()


def circumstances(data: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Return what a run depends on besides its options, for config.json.

    Args:
      data: a record of the data, by its name; see `Job.open_run`.
      mesh: the run's mesh.
    """
    return {
        **data,
        "mesh": dict(mesh.shape),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "flax": flax.__version__,
            "optax": optax.__version__,
        },
    }


def check_same(stored: Mapping[str, Any], now: Mapping[str, Any], data: str) -> None:
    """Check that a resumed run finds the data that it began with. Its mesh may be another.

    Raises:
      ValueError: with both records, and the remedy.
    """
    if stored[data] != now[data]:
        raise ValueError(
            f"the run began with other {data}: {stored[data]} then, {now[data]} now; give --data "
            "as it was, or start a new run without --resume"
        )
