"""`Job`: a run of a command that trains, from its options to its last checkpoint.

What is trained stands in the `job.py` of `zeroxla train` and of `zeroxla rlhf`. Their runs have the
rest in common: the run folder, resuming, interrupting, checkpoints and the exit status.
"""

from __future__ import annotations

import abc
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from jax.sharding import Mesh

from zeroxla.checkpoint.checkpointer import Checkpointer
from zeroxla.checkpoint.errors import SaveError
from zeroxla.cli.circumstances import check_same, circumstances
from zeroxla.cli.continued_run import RUNS
from zeroxla.cli.errors import INTERRUPTED, LostRunError, RunFolderError
from zeroxla.cli.held_run import HeldRun, unwritten
from zeroxla.cli.interrupt import StopRequest, stop_on_signal
from zeroxla.cli.islands.folders import folder_of
from zeroxla.cli.option_groups import AUTO, JobOptions
from zeroxla.cli.run_folder import CHECKPOINTS, NoRunFolder, RunFolder
from zeroxla.cli.run_lock import check_free
from zeroxla.cli.run_sections import read_section
from zeroxla.cli.tracking.observer import Observer
from zeroxla.cli.train.chosen import Setting
from zeroxla.cli.train.output import LoopProgress, Output, resume_command
from zeroxla.mesh.processes.environment import STARTED
from zeroxla.mesh.processes.exchange import agree, exchange, on_first
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
      named: the folder that --run names.
      path: the run folder: that one, or an island's in it.
      folder: writes the run's files, in the first process only.
      checkpoints: the checkpoints of the state.
      held: keeps other runs from the folder, and errors of libraries from the screen.
      done: the number of steps that the state has taken.
      bar: the progress bar, while the loop runs.
      observer: the trackers, the profile and the seconds by phase.
      chosen: the settings, and why they are so; a table at the start shows them.
    """

    command: ClassVar[str]
    """The name of the command."""
    unit: ClassVar[str]
    """The name of one turn of the loop: "step"."""
    label: ClassVar[str]
    """The label of the progress bar."""

    folder: RunFolder | NoRunFolder
    checkpoints: Checkpointer
    held: HeldRun
    bar: LoopProgress
    chosen: Sequence[Setting] = ()

    def __init__(
        self, options: _Options, mesh: Mesh, output: _Output, slot: int | None = None
    ) -> None:
        self.options, self.mesh, self.output = options, mesh, output
        started = os.environ.get(STARTED) or time.strftime("%Y%m%d-%H%M%S")
        self.named: Path = options.output.run or RUNS / f"{self.command}-{started}"
        self.path = folder_of(self.named, slot)
        self.done = 0
        begins = "goes on from its checkpoint" if options.output.resume else "begins anew"
        agree("run", {"start": begins}, "let all hosts see the same run folder, on a shared disk")
        self.observer = Observer.of(options.tracking, self.num_steps, self.path, output.warn)
        on_first("run folder", lambda: check_free(self.path))  # at once; it is taken later
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
          ValueError: the folder cannot be written or is in use by another run, or the data is not
            what the run began with.
        """
        self.held = HeldRun(self.path)
        try:
            self._open_run(data, record, more)
        except BaseException:
            self.held.release()
            raise

    def _open_run(self, data: str, record: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        here = circumstances({data: record}, self.mesh)
        agree(data, {"fingerprint": record["fingerprint"]}, "give all hosts the same files")
        if self.options.output.resume:
            check_same({data: read_section(self.path, data)}, here, data)
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
        self.observer.begin(self.folder, self.command, self.done)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record the values of a step, and tell the trackers."""
        self.folder.log(step, values)
        self.observer.trackers.log(step, values)

    def _new_folder(self, config: dict[str, Any]) -> RunFolder:
        folder = RunFolder.create(self.path, config, self.output.warn, self.named)
        self.keep()
        return folder

    def run(self) -> int:
        """Run the job; return the exit status.

        Raises:
          RunFolderError: something besides a checkpoint could not be written; it says what, and
            from where the run can go on.
        """
        try:
            return self._run()
        except LostRunError:
            raise
        except Exception as error:
            said = unwritten(error)
            if said is None:
                raise
            self.held.errors.write_error(error)
            raise RunFolderError(f"{said}\n{self.kept()}") from error

    def _run(self) -> int:
        self.output.setup(self.mesh, self.source)
        self.output.settings(self.chosen)
        if self.options.output.resume:
            self.output.print(f"Resuming {self.path} after {self.unit} {self.done}")
        # A job that starts again whatever came before must not evaluate a complete run once more.
        complete = self.options.output.resume == AUTO and self.done == self.num_steps
        if self.done > self.num_steps or complete:
            self.output.print(
                f"Nothing is left to do: the run has taken {self.done} {self.unit}s, and --steps "
                f"is {self.num_steps}; give more --steps to go on"
            )
            self.folder.close()
            return 0
        self.begin()
        with (
            stop_on_signal(lambda: self.output.stopping(self.unit)) as stop,
            self.output.progress(
                self.num_steps,
                self.done,
                self.label,
                unit=self.unit,
                every=self.options.output.log_every,
            ) as self.bar,
        ):
            self.loop(stop)
        saved = self.save(last=True)  # first: it is what cannot be made again
        done = self.done == self.num_steps
        if done:
            self.finish()
        else:
            self.folder.close()
            if saved:
                self.output.stopped(f"{self.unit} {self.done}", self.command, self.named)
        exchange("end", "")  # the first process writes the results, and all must end together
        if not saved:
            self.output.warn(f"{self.unit} {self.done} is not saved; {self.kept()}")
            return 1
        return 0 if done else INTERRUPTED

    def kept(self) -> str:
        """Say what is kept of a run that could not write, and how to go on."""
        with contextlib.suppress(SaveError):
            self.checkpoints.wait()  # one may become whole yet
        numbers = self.checkpoints.numbers()
        if not numbers:
            return "no checkpoint is there; make room, then start again"
        resume = resume_command(self.command, self.named)
        return (
            f"the checkpoint of {self.unit} {numbers[-1]} is whole; make room, then continue with: "
            f"{resume}"
        )

    def is_due(self, every: int) -> bool:
        """Return whether something that is done every so many steps is due, and not at the end."""
        return self.done % every == 0 and self.done < self.num_steps

    def save(self, *, last: bool = False) -> bool:
        """Write a checkpoint, the last one until it is whole; report a failure and return False.

        Raises:
          LostRunError: another run has taken over the folder.
        """
        self.held.check()
        try:
            self.write_checkpoint(last=last)
            if last:
                self.checkpoints.wait()
        except SaveError as error:
            self.held.errors.write_error(error)
            self.output.warn(str(error))
            return False
        if not self.output.has_bars:
            state = "saved" if last else "is being written"
            self.output.print(f"{self.unit} {self.done}: checkpoint {state}")
        return True

    def close(self) -> None:
        """Wait for checkpoints that are being written, and give the run folder back."""
        try:
            self.observer.end(finished=self.done >= self.num_steps)
            self.checkpoints.close()
        finally:
            del self.checkpoints  # and the errors that it refers to: the log tells of all of them
            self.held.release()
