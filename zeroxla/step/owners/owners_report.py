"""`OwnersReport`: which leaves' matrices have owners, and what these compute and receive."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zeroxla.program.report import Report, format_bytes
from zeroxla.program.trace import Program, Value
from zeroxla.step.owners.groups import OwnedGroup
from zeroxla.step.owners.mixing import mixes
from zeroxla.step.owners.owners_plan import OwnersPlan

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OwnedRow:
    """Matrices with which an update does the same.

    Attributes:
      leaves: the names of the leaves that they belong to.
      shape: the shape of the largest array that is read for one matrix; a dim of layers is left
        out.
      matrices: the number of matrices.
      flops: the FLOPs of one.
    """

    leaves: tuple[str, ...]
    shape: tuple[int, ...]
    matrices: int
    flops: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OwnersReport(Report):
    """The matrices that have owners.

    Attributes:
      rows: the matrices, by what the update does with them.
      num_devices: the number of devices.
      flops: the FLOPs of all matrices.
      device_flops: the FLOPs of the device with the most.
      received_bytes: the bytes that a device receives from others, both ways together.
      left: the equations that need matrices whole and have no owner, by name.
    """

    rows: tuple[OwnedRow, ...]
    num_devices: int
    flops: float
    device_flops: float
    received_bytes: int
    left: Mapping[str, int]

    @staticmethod
    def of(
        program: Program, plan: OwnersPlan | None, names: Mapping[Value, str], num_devices: int
    ) -> OwnersReport | None:
        """Report on an update; None if it needs no matrix whole.

        Args:
          program: the update.
          plan: its plan; None if nothing has an owner.
          names: the leaf to which an input of the update belongs.
          num_devices: the number of devices.
        """
        outside = [program.equations] if plan is None else plan.cut.outside
        left = Counter(eq.name for equations in outside for eq in equations if mixes(eq))
        if plan is None and not left:
            return None
        leaves = _leaves_of(program, names)
        return OwnersReport(
            rows=() if plan is None else tuple(_row(group, leaves) for group in plan.groups),
            num_devices=num_devices,
            flops=0.0 if plan is None else plan.flops,
            device_flops=0.0 if plan is None else plan.device_flops,
            received_bytes=0 if plan is None else plan.received_bytes,
            left=left,
        )

    @property
    def sentence(self) -> str:
        """Return the report as one sentence, or two."""
        num = sum(row.matrices for row in self.rows)
        names = ", ".join(f"{n} x {name}" for name, n in self.left.items())
        left = f"XLA computes the equations of the update without an owner: {names}."
        if not self.rows:
            return f"No matrix of the update has an owner. {left}"
        return (
            f"The update needs {num} matrices whole, and each has an owner: the busiest of "
            f"{self.num_devices} devices computes {self.device_flops:.3g} of {self.flops:.3g} "
            f"FLOPs, and a device receives {format_bytes(self.received_bytes)}."
            f"{f' {left}' if self.left else ''}"
        )

    def notes(self) -> list[str]:
        """Return the sentence."""
        return [self.sentence]

    def table(self) -> Table:
        """Return the table for a rich console."""
        from rich.table import Table

        table = Table(title="Matrices that have owners")
        table.add_column("leaves")
        for name in ("matrices", "shape", "FLOPs of one"):
            table.add_column(name, justify="right")
        for row in self.rows:
            first, *others = row.leaves
            words = f"{first} and {len(others)} more" if others else first
            shape = "x".join(map(str, row.shape))
            table.add_row(words, str(row.matrices), shape, f"{row.flops:.3g}")
        return table


def _leaves_of(program: Program, names: Mapping[Value, str]) -> dict[Value, tuple[str, ...]]:
    """Return the leaves that each array follows from, by way of arrays alone: a norm of all leaves
    does not count."""
    found: dict[Value, tuple[str, ...]] = {v: (name,) for v, name in names.items()}
    for eq in program.equations:
        mine = dict.fromkeys(x for v in eq.values if v.aval.size > 1 for x in found.get(v, ()))
        found.update(dict.fromkeys(eq.outputs, tuple(mine)))
    return found


def _row(group: OwnedGroup, leaves: Mapping[Value, Sequence[str]]) -> OwnedRow:
    names = (x for piece in group.pieces for v in piece.reads for x in leaves.get(v, ()))
    largest = max(range(len(group.reads)), key=lambda k: group.piece.reads[k].aval.size)
    shape = group.shape_of(largest, result=False)
    dim = None if group.layers is None else group.layers.reads[largest]
    return OwnedRow(
        leaves=tuple(dict.fromkeys(names)),
        shape=tuple(n for d, n in enumerate(shape) if d != dim),
        matrices=group.num_matrices * group.num_stages,
        flops=group.flops,
    )
