"""`GenerateOutput`: everything that `zeroxla generate` prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.text import Text

from zeroxla.cli.train.output import printable


class GenerateOutput:
    """Prints in the first process, and nothing in the others. JAX must have started.

    What a model writes goes to the standard output, as it comes; the rest to the standard error.
    """

    def __init__(self) -> None:
        self._is_first = jax.process_index() == 0
        quiet = not self._is_first
        # A file or a pipe has no width, and its lines need none.
        self._wraps = sys.stderr.isatty()
        self._about = Console(stderr=True, highlight=False, quiet=quiet)
        self._text = Console(highlight=False, quiet=quiet)

    def mesh(self, mesh: Mesh) -> None:
        """Print the mesh."""
        axes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
        device = mesh.devices.flat[0]
        simulated = " (simulated)" if device.platform == "cpu" else ""
        self.say(f"Mesh: {axes}, {device.device_kind} devices{simulated}")

    def status(self, text: str) -> Status:
        """Return a context in which a text says what goes on."""
        return self._about.status(text)

    def say(self, text: str) -> None:
        """Print a line about the work."""
        if text:
            self._about.print(text, style="dim", markup=False, soft_wrap=not self._wraps)

    def warn(self, text: str) -> None:
        """Print a warning."""
        found = Text.assemble(("warning: ", "bold yellow"), text)
        self._about.print(found, soft_wrap=not self._wraps)

    def prompt(self, text: str, *, is_first: bool = True) -> None:
        """Print a text that the model continues, after what was written before."""
        if not is_first:
            self.write("\n\n")
        self._text.print(Text(printable(text), style="bold"), end="", soft_wrap=True)
        self.write("")

    def write(self, text: str) -> None:
        """Print a part of an answer, at once."""
        if self._is_first:
            sys.stdout.write(printable(text))
            sys.stdout.flush()

    def progress(self, total: int) -> Progress:
        """Return a progress bar with one task; its field `status` is shown beside the bar."""
        bar = Progress(
            TextColumn("answers"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._about,
        )
        bar.add_task("answers", total=total, status="")
        return bar


class InTurn:
    """Shows texts that grow together one after another.

    Args:
      output: where they are shown.
      prompts: the prompt before each.
    """

    def __init__(self, output: GenerateOutput, prompts: Sequence[str]) -> None:
        self._output, self._prompts = output, prompts
        self._waiting = [""] * len(prompts)
        self._shown = 0
        output.prompt(prompts[0])

    def add(self, row: int, text: str) -> None:
        """Add a text to one of them, and show it if it is its turn."""
        self._waiting[row] += text
        if row == self._shown and text:
            self._show()

    def end(self, ended: Sequence[bool]) -> None:
        """Go on to the next ones, after those that have ended."""
        while self._shown + 1 < len(self._prompts) and ended[self._shown]:
            self._shown += 1
            self._output.prompt(self._prompts[self._shown], is_first=False)
            self._show()

    def _show(self) -> None:
        self._output.write(self._waiting[self._shown])
        self._waiting[self._shown] = ""
