"""The base of all reports: text when printed, a table in a notebook."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PAGE = '<pre style="line-height: normal; font-family: monospace">{code}</pre>'


class Report:
    """Base class of dataclasses that are shown as rich tables with sentences below them.

    A subclass gives `table`, or `tables` if it has several, and `notes` if it has sentences.
    """

    __slots__ = ()

    def table(self) -> Table:
        """Return the report as a rich table."""
        raise NotImplementedError

    def tables(self) -> list[Table]:
        """Return the report as rich tables."""
        return [self.table()]

    def notes(self) -> list[str]:
        """Return the sentences that follow the tables."""
        return []

    def __str__(self) -> str:
        return "\n".join([*map(render, self.tables()), *self.notes()])

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows if the report is a cell's last value."""
        console = _console(record=True)
        for table in self.tables():
            console.print(table)
        for note in self.notes():
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        return console.export_html(inline_styles=True, code_format=_PAGE)


def format_bytes(num_bytes: float) -> str:
    """Write a number of bytes with a decimal unit; 1 MB is 10^6 bytes.

    >>> format_bytes(8020000)
    '8.02 MB'
    """
    if num_bytes < 1000:
        return f"{num_bytes:g} B" if num_bytes == int(num_bytes) else f"{num_bytes:.1f} B"
    for power, unit in enumerate(("kB", "MB", "GB"), start=1):
        if num_bytes < 999.5 * 1000**power:
            return f"{num_bytes / 1000**power:.3g} {unit}"
    return f"{num_bytes / 1000**4:.4g} TB"


def render(table: Table) -> str:
    """Return a rich table as plain text, as wide as it needs."""
    console = _console()
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def table_of_parts(title: str, parts: Mapping[str, float]) -> Table:
    """Return a table of bytes by name, without the empty ones, and their sum below a line.

    Args:
      title: the table's title.
      parts: bytes by name.
    """
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("part")
    table.add_column("", justify="right")
    for name, num_bytes in parts.items():
        if num_bytes:
            table.add_row(name, format_bytes(num_bytes))
    table.add_section()
    table.add_row("in all", format_bytes(sum(parts.values())))
    return table


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
