"""`CheckReport`: what the checks of a model have found."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from zeroxla.program.report import Report

if TYPE_CHECKING:
    from rich.table import Table

Severity = Literal["ok", "notice", "fault"]

_WIDEST = 96  # characters of a line that is pleasant to read


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """What one check has found.

    Attributes:
      name: the check.
      verdict: "ok"; "notice" if training works, and differs from what one may expect; "fault" if
        training would compute something else, hang, or not be split.
      found: what was found, with names of leaves, lines of the model and values.
      remedy: what to do; empty if there is nothing to do.
    """

    name: str
    verdict: Severity
    found: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport(Report):
    """The results of all checks. `print` it, or read `results`.

    Attributes:
      model: the model, in words.
      mesh: the mesh, in words.
      results: one result for each check.
    """

    model: str
    mesh: str
    results: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """Whether no check has found a fault; notices are allowed."""
        return all(result.verdict != "fault" for result in self.results)

    def __getitem__(self, name: str) -> CheckResult:
        """Return the result of a check by its name.

        Raises:
          KeyError: there is no such check.
        """
        for result in self.results:
            if result.name == name:
                return result
        names = ", ".join(result.name for result in self.results)
        raise KeyError(f"no check {name!r}; there are {names}")

    def table(self) -> Table:
        """Return the report as a rich table: a row for each check, with the remedy below what was
        found."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"{self.model} on {self.mesh}", title_justify="left", show_lines=True)
        table.add_column("check", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        table.add_column("found", max_width=_WIDEST)
        for result in self.results:
            text = result.found + (f"\nRemedy: {result.remedy}" if result.remedy else "")
            color = {"ok": "green", "notice": "yellow", "fault": "bold red"}[result.verdict]
            table.add_row(result.name, Text(result.verdict, style=color), Text(text))
        return table

    def notes(self) -> list[str]:
        """Return the sentence that sums up the report."""
        faults = [result.name for result in self.results if result.verdict == "fault"]
        notices = sum(result.verdict == "notice" for result in self.results)
        if faults:
            return [f"Faults: {', '.join(faults)}."]
        return [f"No faults; {notices} notice{'s' * (notices != 1)}."]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain types, for JSON."""
        return {
            "model": self.model,
            "mesh": self.mesh,
            "ok": self.ok,
            "results": [dataclasses.asdict(result) for result in self.results],
        }
