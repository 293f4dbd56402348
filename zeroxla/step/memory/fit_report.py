"""`MemoryFit`: what a step keeps, sends to the host and computes again, so that it fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zeroxla.fetch.keeping.choose import Keeping
from zeroxla.program.report import Report, format_bytes

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Try:
    """One program that was tried.

    Attributes:
      keeping: the choice; None if all that backward reads is kept, as without a budget.
      num_bytes: all bytes that the program takes on a device.
      temp_bytes: the temporaries among them.
      seconds: the seconds that computing again, moving and gathering again add to a micro-batch, by
        the cost model.
      plan: the number of the plan, of `PlanKeeper.plans`, that was chosen.
    """

    keeping: Keeping | None
    num_bytes: int
    temp_bytes: int
    seconds: float
    plan: int = 0

    @property
    def own_seconds(self) -> float:
        """The same without gathering again."""
        return self.keeping.own_seconds if self.keeping else 0.0

    @property
    def rest(self) -> int:
        """The bytes of the state, the batch and the results, which no choice changes."""
        return self.num_bytes - self.temp_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryFit(Report):
    """What was decided so that a step fits into a memory.

    Attributes:
      total_bytes: the memory of a device that the step may take.
      tries: the programs that were tried, in order.
      source: where their bytes come from, in words.
      decided: the options that were left to the budget, by name.
    """

    total_bytes: int
    tries: tuple[Try, ...]
    source: str = "as the compiler plans them"
    decided: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def best(self) -> Try | None:
        """The fastest program that fits; None if none does."""
        fits = [t for t in self.tries if t.num_bytes <= self.total_bytes]
        return min(fits, key=lambda t: (t.seconds, t.num_bytes), default=None)

    @property
    def chosen(self) -> Try:
        """The best program that fits, or the smallest one if none does."""
        return self.best or self.smallest

    @property
    def smallest(self) -> Try:
        """The program that takes the fewest bytes."""
        return min(self.tries, key=lambda t: t.num_bytes)

    def table(self) -> Table:
        """Return the table of what happens to the values that backward reads, by segment."""
        from rich.table import Table

        chosen = self.chosen
        table = Table(
            title=f"Memory of a device: {format_bytes(chosen.num_bytes)} of "
            f"{format_bytes(self.total_bytes)}",
            title_justify="left",
        )
        table.add_column("segment")
        for name in ("turns", "kept", "on the host", "equations again", "FLOPs again"):
            table.add_column(name, justify="right")
        keeping = chosen.keeping
        last: tuple[str, ...] | None = None
        run: list[int] = []

        def flush() -> None:
            if last is not None:
                first, end = run[0], run[-1]
                table.add_row(str(first) if first == end else f"{first} to {end}", *last)

        pairs = zip(keeping.places, keeping.choices, strict=True) if keeping else ()
        for i, (place, choice) in enumerate(pairs):
            row = (
                str(place.turns),
                format_bytes(choice.num_bytes * place.turns),
                format_bytes(choice.host_bytes * place.turns) if choice.host_bytes else "-",
                f"{len(choice.again)} of {len(place.graph.seconds)}",
                f"{choice.flops * place.turns:.3g}" if choice.flops else "-",
            )
            if row != last:
                flush()
                last, run = row, []
            run.append(i)
        flush()
        return table

    def notes(self) -> list[str]:
        """Return sentences on the whole step."""
        chosen = self.chosen
        keeping = chosen.keeping
        everything = self.tries[0]
        holds = "takes" if self.best else "does not fit: it takes"
        found = [
            f"Of a device's {format_bytes(self.total_bytes)} the step {holds} "
            f"{format_bytes(chosen.num_bytes)}: {format_bytes(chosen.rest)} of state, batch and "
            f"results, and {format_bytes(chosen.temp_bytes)} of temporaries, {self.source}. If all "
            f"that backward reads were kept, it would take {format_bytes(everything.num_bytes)}."
        ]
        if self.decided:
            values = ", ".join(f"{name}={value!r}" for name, value in self.decided.items())
            found.append(f"The budget decided: {values}.")
        if keeping is None:
            found.append("All that backward reads is kept.")
            return found
        if keeping.twice_flops:
            num = sum(place.runs_twice for place in keeping.places)
            found.append(
                f"Forward runs a second time before backward in {num} of {len(keeping.places)} "
                "segments, which keep their inputs alone in between."
            )
        if keeping.flops:
            found.append(
                f"Backward computes {keeping.flops:.3g} FLOPs again in a micro-batch on a device, "
                f"{100 * keeping.share_again:.1f} % of all; the choice is within "
                f"{100 * keeping.gap:.1f} % of the least that its segments' tradeoffs allow."
            )
        if reused := keeping.reused.num_bytes:
            found.append(
                f"Up to {format_bytes(reused)} of gathered leaves stay from forward to backward, "
                f"which gathers {format_bytes(keeping.reused.again_bytes)}."
            )
        if keeping.host_bytes:
            found.append(
                f"{format_bytes(keeping.host_bytes)} wait in the host's memory from forward to "
                "backward."
            )
        return found
