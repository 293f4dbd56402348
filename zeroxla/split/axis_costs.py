"""What an axis costs: seconds for bytes that travel, bytes of memory that are touched, and work."""

from __future__ import annotations

import dataclasses

from zeroxla.mesh.machines import Device
from zeroxla.program.flops import product_flops
from zeroxla.program.primitives import ARRANGEMENTS, RENAMES
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, bytes_of
from zeroxla.split.dims_flow import DimsFlow

TIE = 1e-6
"""What an equation costs that only names an array anew, as a share of what it would cost to write
the array: of two ways that cost the same, the one that splits more is taken."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AxisCosts:
    """Costs in seconds. The defaults are those of an axis inside a node of NVIDIA H100s, roughly.

    Attributes:
      link: of a byte that a device receives over the axis.
      latency: of a collective over the axis, whatever it moves.
      leaf: of a byte of a leaf that a device gathers, its later gather and its gradient included.
      memory: of a byte that an equation writes.
      operation: of a multiplication or an addition of a product.
    """

    link: float = 1 / 300e9
    latency: float = 5e-6
    leaf: float = 3 / 25e9
    memory: float = 1 / 3e12
    operation: float = 1 / 500e12

    @staticmethod
    def of(device: Device, *, link: float, latency: float) -> AxisCosts:
        """Return the costs of an axis of a kind of device; `link` and `latency` as above."""
        return AxisCosts(
            link=link,
            latency=latency,
            memory=1 / device.memory_rate,
            operation=1 / (device.efficiency * max(device.flops_per_s.values())),
        )

    def work(self, eq: Equation) -> float:
        """Return what an equation costs if one device runs all of it."""
        written = self.memory * sum(map(bytes_of, eq.outputs))
        if eq.name in ARRANGEMENTS or eq.name in RENAMES:
            return written * TIE
        return written + self.operation * product_flops(eq)

    def of_program(self, flow: DimsFlow) -> float:
        """Return what a program costs if one device runs all of it."""
        found = 0.0
        for eq in flow.program.equations:
            bodies = flow.bodies.get(eq, ())
            turns = Scan(eq).length if eq.name == "scan" else 1
            found += self.work(eq) if not bodies else turns * sum(map(self.of_program, bodies))
        return found
