"""`Explanation`: what a step waits for, what its time goes to, and what would change that."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from zeroxla.inspect.pictures.explained import plot_explanation
from zeroxla.planning.explain.lines import LineCost
from zeroxla.planning.explain.link_uses import LinkUse
from zeroxla.planning.explain.stalls import Stall
from zeroxla.planning.explain.waits import Wait
from zeroxla.planning.lanes import TimeLine
from zeroxla.planning.target import Target
from zeroxla.program.report import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

TRACE, SCHEDULE = "its trace", "the compiler's schedule"
MOST_LINES = 10
_NOTHING = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Explanation(Report):
    """What one step of a device waits for and what its time goes to.

    Attributes:
      target: the devices, links and mesh.
      by: what the waits follow from: `TRACE` or `SCHEDULE`.
      source: the program that they come from, in sentences.
      time: the time line of the step.
      waits: the spans in which nothing is computed.
      uses: what takes links, those first that the step waits for longest.
      lines: what each line of the model costs, the most first.
      stalls: what a setting would hide, shorten or remove, the longest first.
      total_bytes: all that a device holds when it holds most, by live ranges.
      remarks: what could not be looked at, and why.
      least_share: shorter waits are left out of the tables and of `stalls`: this share of the step.
    """

    target: Target
    by: str
    source: str
    time: TimeLine
    waits: tuple[Wait, ...]
    uses: tuple[LinkUse, ...]
    lines: tuple[LineCost, ...]
    stalls: tuple[Stall, ...]
    total_bytes: int
    remarks: tuple[str, ...] = ()
    least_share: float

    @property
    def waited_s(self) -> float:
        """The seconds of the step in which nothing is computed."""
        return sum(wait.seconds for wait in self.waits)

    @property
    def exposed(self) -> tuple[LinkUse, ...]:
        """What the step waits for, at its ends too."""
        least_s = self.least_share * self.time.seconds
        return tuple(x for x in self.uses if x.waited_s >= least_s)

    def tables(self) -> list[Table]:
        """Return the stalls, the waits and the lines that cost most, as rich tables."""
        return [self.table(), self.waits_table(), self.lines_table()]

    def table(self) -> Table:
        """Return the table of settings, each with the stalls that it would change."""
        table = _table("What a setting would change" if self.stalls else "No setting is missing")
        table.add_column("ms", justify="right", no_wrap=True)
        table.add_column("setting", overflow="fold", ratio=2)
        table.add_column("what it would hide, shorten or remove", overflow="fold", ratio=3)
        by_setting: dict[str, list[Stall]] = {}
        for stall in self.stalls:
            by_setting.setdefault(stall.remedy.text, []).append(stall)
        for text, alike in by_setting.items():
            words = [f"{x.what}{f', {x.line}' if x.line else ''}" for x in alike]
            if len(alike) > 1:
                words = [f"{_ms(x.seconds)} {w}" for x, w in zip(alike, words, strict=True)]
            total_s = sum(x.seconds for x in alike)
            table.add_row(_ms(total_s), text, "\n".join(words), end_section=True)
        return table

    def waits_table(self) -> Table:
        """Return the table of what the step waits for."""
        share = self.waited_s / self.time.seconds if self.time.seconds else 0.0
        table = _table(
            f"Collectives that nothing hides: {_ms(self.waited_s)} of {_ms(self.time.seconds)} ms, "
            f"{share:.0%}"
        )
        for name in ("waits, ms", "takes, ms", "runs"):
            table.add_column(name, justify="right")
        table.add_column("collective", overflow="fold", ratio=3)
        table.add_column("brings", overflow="fold", ratio=4)
        table.add_column("line", overflow="fold", ratio=3)
        rest = self.waited_s
        for x in self.exposed:
            rest -= x.waited_s
            at_ends = x.hideable_s < x.waited_s / 2
            name = f"{x.name}{', at an end of the step' if at_ends else ''}"
            cells = (_ms(x.waited_s), _ms(x.seconds), str(x.count))
            table.add_row(*cells, name, x.what, x.line)
        unknown = sum(wait.seconds for wait in self.waits if wait.event is None)
        if unknown > self.least_share * self.time.seconds:
            rest -= unknown
            table.add_row(_ms(unknown), "", "", "none: copies in the device's memory", "", "")
        if rest > _NOTHING * self.time.seconds:
            table.add_section()
            table.add_row(_ms(rest), "", "", f"others, each below {self.least_share:.0%}", "", "")
        return table

    def lines_table(self) -> Table:
        """Return the table of the ten lines that cost most."""
        table = _table("The lines that cost most, forward and backward together")
        for name in ("ms", "share"):
            table.add_column(name, justify="right")
        table.add_column("bound by")
        table.add_column("line", overflow="fold", ratio=2)
        table.add_column("its largest equation", overflow="fold", ratio=4)
        for x in self.lines[:MOST_LINES]:
            text = f"{x.text} in {x.scope}" if x.scope else x.text
            table.add_row(_ms(x.seconds), f"{x.share:.0%}", x.bound, x.line, text)
        return table

    def notes(self) -> list[str]:
        """Return where the figures come from, and what could not be looked at."""
        return [self.source, *self.remarks]

    def __str__(self) -> str:
        return f"{self.headline}\n{Report.__str__(self)}"

    @property
    def headline(self) -> str:
        """The step in one line."""
        mesh = " x ".join(f"{name}={size}" for name, size in self.target.mesh_shape.items())
        return (
            f"A step on {mesh} of {self.target.device.label}, by {self.by}: "
            f"{_ms(self.time.seconds)} ms, of which {_ms(self.waited_s)} ms wait for links; "
            f"{len(self.stalls)} stalls."
        )

    def plot(self, *, path: str | os.PathLike | None = None) -> Figure:
        """Draw the time line; see `zeroxla.inspect.plot_explanation`."""
        return plot_explanation(self, path=path)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain types, for JSON."""
        return {
            "device": self.target.device.name,
            "mesh": dict(self.target.mesh_shape),
            "by": self.by,
            "source": self.source,
            "seconds": self.time.seconds,
            "waited_s": self.waited_s,
            "stalls": [
                {
                    "kind": x.kind,
                    "what": x.what,
                    "line": x.line,
                    "seconds": x.seconds,
                    "remedy": x.remedy.text,
                    "changes": {name: str(value) for name, value in x.remedy.changes.items()},
                }
                for x in self.stalls
            ],
            "exposed": [dataclasses.asdict(x) for x in self.exposed],
            "lines": [dataclasses.asdict(x) for x in self.lines[:MOST_LINES]],
            "remarks": list(self.remarks),
        }


def _table(title: str) -> Table:
    from rich.table import Table

    return Table(title=title, title_justify="left")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"
