"""What every report can do: be printed, and show itself in a notebook."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PAGE = '<pre style="line-height: normal; font-family: monospace">{code}</pre>'


class Report:
    """A frozen dataclass that is shown as tables, and sentences below them."""

    __slots__ = ()

    def table(self) -> Table:
        """Return the report as a rich table."""
        raise NotImplementedError

    def tables(self) -> list[Table]:
        """Return the report as rich tables."""
        return [self.table()]

    def notes(self) -> list[str]:
        """Return sentences that follow the tables."""
        return []

    def __str__(self) -> str:
        return "\n".join([*map(render, self.tables()), *self.notes()])

    def _repr_html_(self) -> str:
        """Return what a notebook shows where the report is the last value of a cell."""
        console = _console(record=True)
        for table in self.tables():
            console.print(table)
        for note in self.notes():
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        return console.export_html(inline_styles=True, code_format=_PAGE)


def render(table: Table) -> str:
    """Return a rich table as plain text, as wide as it needs."""
    console = _console()
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def _console(*, record: bool = False) -> Console:
    from rich.console import Console

    return Console(
        file=io.StringIO(),
        width=200,
        force_terminal=False,
        force_jupyter=False,
        color_system=None,
        record=record,
    )
