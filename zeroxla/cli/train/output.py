"""`Output`: everything that `zeroxla train` prints."""

from __future__ import annotations

import contextlib
import datetime
import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from zeroxla.cli.train.chosen import Setting
from zeroxla.cli.train.program_reports import ProgramReports
from zeroxla.cli.train.stages import Stages
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step


class Measured(Protocol):
    """The figures that tell a reader whether a loss is good; every `Task` has them."""

    unit: str
    numbers: tuple[str, ...]
    metrics: tuple[str, ...]
    guess: float
    guess_name: str


class LoopProgress:
    """Shows how far a loop is; a context manager.

    Args:
      output: prints.
      total: the number of the last step.
      done: the number of steps that were taken before.
      label: the label of the bar.
      unit: the name of a step, at the beginning of a line.
      every: the number of steps between two lines. The first and the last step have one, too.
    """

    def __init__(
        self, output: Output, *, total: int, done: int, label: str, unit: str, every: int
    ) -> None:
        self._output, self._total, self._unit, self._every = output, total, unit, every
        self._bar = Progress(
            TextColumn(label),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=output.console,
            disable=not output.has_bars,
        )
        self._task = self._bar.add_task("steps", total=total, completed=done, status="")
        self._first: tuple[int, float] | None = None  # a step, and when it was told

    def __enter__(self) -> LoopProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def update(self, number: int, status: str, more: str = "") -> None:
        """Show that a step was taken.

        Args:
          number: the step.
          status: what there is to say about it.
          more: what a line says besides.
        """
        self._bar.update(self._task, completed=number, status=status)
        if self._output.has_bars:
            return
        now = time.perf_counter()
        first, since = self._first or (number, now)
        if self._first is None:
            self._first = (number, now)  # it has compiled, so the time before says nothing
        elif number % self._every and number != self._total:
            return
        left = ""
        if number > first and number < self._total:
            seconds = round((now - since) / (number - first) * (self._total - number))
            left = f", {datetime.timedelta(seconds=seconds)} left"
        self._output.print(f"{self._unit} {number}/{self._total}: {status}{more}{left}")


class Output:
    """Prints in the first process, and nothing in the others. JAX must have started.

    Attributes:
      console: where it prints.
      has_bars: whether what goes on is shown as bars: on a terminal, and in a notebook. Elsewhere
        it is told in lines, each of which is written at once.
    """

    def __init__(self) -> None:
        # In a file or a pipe the tables need not be cut to a terminal's width.
        width = None if sys.stdout.isatty() else 120
        self.console = Console(highlight=False, width=width, quiet=jax.process_index() != 0)
        # Not the console's `is_terminal`: FORCE_COLOR in a log makes it true.
        on_screen = sys.stdout.isatty() and not self.console.is_dumb_terminal
        self.has_bars = self.console.is_jupyter or on_screen

    def setup(self, mesh: jax.sharding.Mesh, source: str) -> None:
        """Print the mesh, and a sentence about the data."""
        devices = mesh.devices.flat
        axes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
        simulated = " (simulated)" if devices[0].platform == "cpu" else ""
        self.print(f"Mesh: {axes}, {devices[0].device_kind} devices{simulated}")
        self.print(source)

    def settings(self, settings: Sequence[Setting]) -> None:
        """Print the settings of the run, and who chose each or why it was chosen."""
        if settings:
            table = Table("setting", "value", "why", title="Settings")
            for row in settings:
                table.add_row(Text(row.name), Text(row.value), Text(row.why))
            self.console.print(table)

    def program(
        self, step: Step, state: TrainState, batch: Any, stages: Stages | None
    ) -> ProgramReports:
        """Compile the step; print its leaves or its stages, its memory and its collectives."""
        described = step.describe()
        for table in stages.tables() if stages else [described.table()]:
            self.console.print(table)
        with self.working("compiling the training step"):
            started = time.perf_counter()
            program = step.lower(state, batch).compile()
        self.print(f"Compiled the training step in {time.perf_counter() - started:.1f} s.")
        found = ProgramReports.of(program, step.mesh)
        self.console.print(found.memory.table())
        self.console.print(found.comms.table())
        return found

    def profile(self, folder: Path, program: ProgramReports, steps: int) -> None:
        """Print where the time of the profiled steps went, and where their trace is."""
        try:
            times, trace = program.times(folder, steps), program.trace(folder)
        except (ValueError, OSError) as error:  # training goes on, and the viewers have the trace
            self.warn(f"the profile in {folder} is written, but not told by phases: {error}")
            return
        self.console.print(times.table())
        self.print(f"Profile: {folder}; for Perfetto: {trace}")

    def progress(
        self, total: int, done: int, label: str, *, unit: str = "step", every: int = 10
    ) -> LoopProgress:
        """Return what shows how far a loop is: a bar, or a line for each `every` steps."""
        return LoopProgress(self, total=total, done=done, label=label, unit=unit, every=every)

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Show that something goes on that takes a while."""
        if self.has_bars:
            with self.console.status(what):
                yield
        else:
            self.print(f"{what[0].upper()}{what[1:]} ...")
            yield

    def continuation(self, prompt: str, text: str) -> None:
        """Print a prompt and the text with which the model continues it."""
        self.console.print("\nA continuation of the prompt:")
        self.console.print(Text.assemble((printable(prompt), "bold"), printable(text)))

    def answer(self, question: str, reference: str, text: str) -> None:
        """Print a held-out question as the model sees it, the reference answer and the model's."""
        for title, part in (
            ("A held-out question", question),
            ("The reference answer", reference),
            ("The model's answer", text),
        ):
            self.console.print(f"\n{title}:", style="bold")
            self.console.print(Text(printable(part)))

    def result(self, values: dict[str, float], task: Measured, path: Path) -> None:
        """Print the trained model's loss and metrics on the validation set."""
        loss, guess = values["loss"], task.guess
        self.print(
            f"\nValidation loss {loss:.4f} nats per {task.unit}{perplexity(task, loss)}; "
            f"{task.guess_name} "
            f"{guess:.4f}: the model is {abs(guess - loss):.4f} nats "
            f"{'below' if loss <= guess else 'ABOVE'} it."
        )
        for name in task.numbers:
            self.print(f"Validation {name} {values[name]:.4f}")
        for name in task.metrics:
            self.print(f"Validation {name} {values[name]:.1%}")
        self.print(f"Run folder: {path}")

    def stopping(self, unit: str) -> None:
        """Print that the run will stop after this step."""
        self.print(f"Stopping after this {unit}; a second Ctrl-C stops at once, without saving.")

    def stopped(self, after: str, command: str, path: Path) -> None:
        """Print the command that continues a run, which was interrupted and saved."""
        resume = resume_command(command, path)
        self.print(f"Stopped after {after} and saved. Continue with:\n  {resume}")

    def warn(self, text: str) -> None:
        self.console.print(Text.assemble(("warning: ", "bold yellow"), text), soft_wrap=True)

    def print(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


def perplexity(task: Measured, loss: float) -> str:
    """Return the words for the perplexity of a loss in nats per token or byte; "" of others."""
    if task.unit not in ("token", "byte"):
        return ""
    return f" (perplexity {perplexity_of(loss):.4g} per {task.unit})"


def perplexity_of(loss: float) -> float:
    """Return exp(loss); infinite if it is too large for a number."""
    return math.exp(loss) if loss < 700 else loss if math.isnan(loss) else math.inf


def resume_command(command: str, path: Path) -> str:
    """Return the command line that continues a run."""
    # As it was typed: in a virtual environment the bare name may not be on PATH.
    program = sys.argv[0] if Path(sys.argv[0]).name == "zeroxla" else "zeroxla"
    return f"{program} {command} --resume --run {shlex.quote(str(path))}"


def printable(text: str) -> str:
    """Return a text in which characters that would confuse a terminal are replaced."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
