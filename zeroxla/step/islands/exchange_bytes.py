"""`ExchangeBytes`: what exchanges between islands send, from the shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeroxla.program.report import Report, format_bytes
from zeroxla.step.islands.outer_programs import OuterPrograms

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeBytes(Report):
    """The fragments of a step's parameters, and the bytes of their exchanges; `print` it.

    Attributes:
      num: the number of islands.
      every: steps between two exchanges of a fragment.
      starts: for each fragment, the step after which its first exchange starts.
      sizes: for each fragment, its elements on a device.
      device_bytes: for each fragment, the bytes that a device of an island sends in an exchange.
      num_devices: the devices of an island.
    """

    num: int
    every: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    device_bytes: tuple[int, ...]
    num_devices: int

    @staticmethod
    def of(programs: Sequence[OuterPrograms], num: int) -> ExchangeBytes:
        """Return the bytes of exchanges between so many islands.

        Args:
          programs: the programs of each fragment.
          num: the number of islands.
        """
        outer = programs[0].outer
        return ExchangeBytes(
            num=num,
            every=outer.every,
            starts=tuple(outer.start_of(fragment) for fragment in range(len(programs))),
            sizes=tuple(p.fragment.size for p in programs),
            # The parts of the differences that others average, then the mean of its own part.
            device_bytes=tuple(2 * (num - 1) * p.among(num).part_bytes for p in programs),
            num_devices=programs[0].mesh.size,
        )

    @property
    def exchange_bytes(self) -> int:
        """The bytes that an island sends in an exchange, of the largest fragment."""
        return max(self.device_bytes) * self.num_devices

    @property
    def bytes_per_step(self) -> float:
        """The bytes that an island sends to others, averaged over steps."""
        return sum(self.device_bytes) * self.num_devices / self.every

    def table(self) -> Table:
        """Return the table for a rich console."""
        from rich.table import Table

        title = f"Exchanges of {self.num} islands, each fragment once in {self.every} steps"
        table = Table(title=title, title_justify="left")
        for column in ("fragment", "after step", "elements of a device", "sent by an island"):
            table.add_column(column, justify="right")
        rows = zip(self.starts, self.sizes, self.device_bytes, strict=True)
        for fragment, (start, size, num_bytes) in enumerate(rows):
            sent = format_bytes(num_bytes * self.num_devices)
            table.add_row(str(fragment), str(start), f"{size:,}", sent)
        table.add_section()
        table.add_row("a step", "", f"{sum(self.sizes):,}", format_bytes(self.bytes_per_step))
        return table
