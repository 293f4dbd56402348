"""`Output`: everything that `zeroxla train` prints."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
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


class Output:
    """Prints in the first process, and nothing in the others. JAX must have started."""

    def __init__(self) -> None:
        # In a file or a pipe the tables need not be cut to a terminal's width.
        width = None if sys.stdout.isatty() else 120
        self.console = Console(highlight=False, width=width, quiet=jax.process_index() != 0)

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
        with self.console.status("compiling the training step"):
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

    def progress(self, total: int, done: int, label: str = "training") -> Progress:
        """Return a progress bar with one task; its field `status` is shown beside the bar."""
        bar = Progress(
            TextColumn(label),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self.console,
        )
        bar.add_task("train", total=total, completed=done, status="")
        return bar

    def continuation(self, prompt: str, text: str) -> None:
        """Print a prompt and the text with which the model continues it."""
        self.console.print("\nA continuation of the prompt:")
        self.console.print(Text.assemble((prompt, "bold"), printable(text)))

    def result(self, values: dict[str, float], task: Measured, path: Path) -> None:
        """Print the trained model's loss and metrics on the validation set."""
        loss, guess = values["loss"], task.guess
        self.print(
            f"\nValidation loss {loss:.4f} nats per {task.unit}; {task.guess_name} "
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
