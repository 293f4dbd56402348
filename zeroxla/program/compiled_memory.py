"""The memory that the compiler plans for one device while a program runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

from zeroxla.program.report import Report, format_bytes

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport(Report):
    """Bytes on one device while a compiled program runs, as the compiler plans them.

    Attributes:
      argument_bytes: bytes of the inputs. A train step's inputs are the state's shards and the
        batch.
      output_bytes: bytes of the outputs, also of those that reuse an argument's memory.
      alias_bytes: bytes of the outputs that reuse an argument's memory (donated state).
      temp_bytes: bytes of everything in between: activations, gathered leaves, gradients.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @classmethod
    def of(cls, program: jax.stages.Compiled) -> MemoryReport:
        """Read the figures of a compiled program.

        Raises:
          ValueError: the backend reports no memory.
        """
        stats = program.memory_analysis()
        if stats is None:
            raise ValueError("this backend reports no memory figures for compiled programs")
        return cls(
            argument_bytes=stats.argument_size_in_bytes,
            output_bytes=stats.output_size_in_bytes,
            alias_bytes=stats.alias_size_in_bytes,
            temp_bytes=stats.temp_size_in_bytes,
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of arguments, temporaries and the outputs that need memory of their own."""
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes

    def parts(self) -> dict[str, int]:
        """Return bytes by name. They add up to `total_bytes`."""
        return {
            "arguments": self.argument_bytes,
            "temporaries": self.temp_bytes,
            "outputs": self.output_bytes - self.alias_bytes,
        }

    def table(self) -> Table:
        """Return the report as a rich table."""
        from rich.table import Table

        table = Table(title="Memory of one device", title_justify="left")
        table.add_column("part")
        table.add_column("bytes", justify="right")
        table.add_column("", justify="right")
        rows = (
            ("arguments", self.argument_bytes),
            ("temporaries", self.temp_bytes),
            ("outputs", self.output_bytes),
            ("outputs kept in arguments", -self.alias_bytes),
        )
        for name, num_bytes in rows:
            sign = "-" if num_bytes < 0 else ""
            table.add_row(name, f"{num_bytes:,}", sign + format_bytes(abs(num_bytes)))
        table.add_section()
        table.add_row("total", f"{self.total_bytes:,}", format_bytes(self.total_bytes))
        return table

    def to_dict(self) -> dict[str, int]:
        """Return the figures as a plain dict, for JSON."""
        return dataclasses.asdict(self) | {"total_bytes": self.total_bytes}
