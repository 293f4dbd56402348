"""`RewriteReport`: what was found in a model's trace, where, and what became of it."""

from __future__ import annotations

import dataclasses
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal

from zeroxla.program import compat
from zeroxla.program.report import Report
from zeroxla.program.trace import Equation

if TYPE_CHECKING:
    from rich.table import Table


SHOWN_PARTS = 2
"""The table shows the last parts of a file's path, so many of them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was found.

    Attributes:
      kind: "attention", "loss", "norm" or "activation".
      scope: the scopes that it is in, such as "h/attn".
      line: the file and the line of the model's code; empty if they are not known.
      times: how often a step's forward runs it, for one micro-batch.
      shape: the shape and the dtype of the largest array that is no longer made.
      becomes: what runs in its place; None if it stays.
      reason: why it stays, or which part of what runs is left out; empty if neither is so.
    """

    kind: Literal["attention", "loss", "norm", "activation"]
    scope: str
    line: str
    times: int
    shape: str
    becomes: str | None
    reason: str = ""

    @staticmethod
    def at(
        kind: Literal["attention", "loss", "norm", "activation"],
        eq: Equation,
        times: int,
        shape: str,
        becomes: str | None,
        reason: str = "",
    ) -> Finding:
        """Make the finding of an equation."""
        return Finding(
            kind=kind,
            scope=str(eq.name_stack),
            line=compat.source_line(eq.source),
            times=times,
            shape=shape,
            becomes=becomes,
            reason=reason,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RewriteReport(Report):
    """What was found in the trace of a loss in training; `print` it, or read `findings`.

    Attributes:
      findings: what was found, in the order of the program; equal ones once for each place.
    """

    findings: tuple[Finding, ...]

    @property
    def rewritten(self) -> tuple[Finding, ...]:
        """The findings that are computed otherwise."""
        return tuple(x for x in self.findings if x.becomes is not None)

    def table(self) -> Table:
        """Return the table for a rich console."""
        from rich.table import Table

        table = Table(title=f"{len(self.rewritten)} of {len(self.findings)} found are rewritten")
        for name in ("found", "scope", "line", "times", "instead of", "becomes", "why"):
            table.add_column(name, overflow="fold")  # a line without its number says nothing
        merged: dict[Finding, int] = {}
        for x in self.findings:
            key = dataclasses.replace(x, times=0)
            merged[key] = merged.get(key, 0) + x.times
        for x, times in merged.items():
            becomes = "stays" if x.becomes is None else x.becomes
            line = "/".join(PurePath(x.line).parts[-SHOWN_PARTS:])
            row = (x.kind, x.scope, line, str(times), x.shape, becomes, x.reason)
            table.add_row(*row)
        return table
