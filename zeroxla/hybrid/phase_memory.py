"""The report of a model's memory on one device while it trains and while it generates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zeroxla.program.report import Report, format_bytes

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """The bytes that one device holds in one phase, by name."""

    held: Mapping[str, int]

    def parts(self) -> Mapping[str, int]:
        """Return the bytes by name."""
        return self.held


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PhaseReport(Report):
    """The bytes on one device, activations aside; `print` it.

    Attributes:
      num_parameters: the number of the model's parameters, adapters aside.
      devices: the number of devices of the mesh.
      tensor: the number of devices that share one copy of the model to generate.
      parameter_bytes: the state's leaves at rest: float32 masters, wires of a frozen base.
      optimizer_bytes: the optimizer's state.
      other_bytes: the model state and the wire state.
      gradient_bytes: the gradients that a step sums up.
      layout_bytes: the tensor-parallel copy of the model, freed after generating.
      cache_bytes: the cache (keys and values, carries of recurrences), freed with the copy.
    """

    num_parameters: int
    devices: int
    tensor: int
    parameter_bytes: int
    optimizer_bytes: int
    other_bytes: int
    gradient_bytes: int
    layout_bytes: int
    cache_bytes: int

    @property
    def resting_bytes(self) -> int:
        """Bytes that stay between the phases."""
        return self.parameter_bytes + self.optimizer_bytes + self.other_bytes

    @property
    def training_bytes(self) -> int:
        """Bytes while a step runs."""
        return self.resting_bytes + self.gradient_bytes

    @property
    def added_bytes(self) -> int:
        """Bytes that generating adds to those that stay."""
        return self.layout_bytes + self.cache_bytes

    @property
    def generating_bytes(self) -> int:
        """Bytes while tokens are drawn."""
        return self.resting_bytes + self.added_bytes

    def phases(self) -> dict[str, Phase]:
        """Return each phase by its name."""
        rest = {
            "parameters": self.parameter_bytes,
            "optimizer state": self.optimizer_bytes,
            "other state": self.other_bytes,
        }
        copy = {"tensor-parallel copy": self.layout_bytes, "cache": self.cache_bytes}
        return {
            "training": Phase({**rest, "gradients": self.gradient_bytes}),
            "generating": Phase({**rest, **copy}),
        }

    def table(self) -> Table:
        """Return the report as a rich table."""
        from rich.table import Table

        table = Table(
            title=f"Memory of one device: {self.num_parameters:,} parameters on {self.devices} "
            f"devices, tensor={self.tensor}",
            title_justify="left",
        )
        table.add_column("part")
        for name in ("training", "generating", "bytes a parameter, all devices"):
            table.add_column(name, justify="right")
        rows = (
            ("parameters", self.parameter_bytes, True, True),
            ("optimizer state", self.optimizer_bytes, True, True),
            ("other state", self.other_bytes, True, True),
            ("gradients", self.gradient_bytes, True, False),
            ("tensor-parallel copy", self.layout_bytes, False, True),
            ("cache of keys and values", self.cache_bytes, False, True),
        )
        for name, num_bytes, trains, generates in rows:
            text, each = format_bytes(num_bytes), num_bytes * self.devices / self.num_parameters
            table.add_row(name, text if trains else "-", text if generates else "-", f"{each:.2f}")
        table.add_section()
        totals = (self.training_bytes, self.generating_bytes)
        table.add_row("in all", *map(format_bytes, totals), "")
        return table
