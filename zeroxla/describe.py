"""`step.describe()`: which device holds what, as a table."""

from __future__ import annotations

import dataclasses
import math

from jax.sharding import Mesh
from rich.table import Table

from zeroxla.inspect.memory import render
from zeroxla.layout import Layout
from zeroxla.mesh import DEVICE, NODE, world_size
from zeroxla.segments import Loop, Plan, Remat, Straight


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One leaf: its name, natural shape, placement, unit, and bytes of its float32 shard."""

    path: str
    shape: tuple[int, ...]
    placement: str
    unit: str
    shard_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """The table of leaves; `print` it, or read `rows`.

    Attributes:
      rows: one per leaf.
      mesh: the mesh in words.
    """

    rows: tuple[Row, ...]
    mesh: str

    @property
    def shard_bytes(self) -> int:
        """Bytes of float32 parameters that one device stores."""
        return sum(row.shard_bytes for row in self.rows)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(row.shape) for row in self.rows)

    @property
    def units(self) -> tuple[str, ...]:
        """The units, in order of first use."""
        return tuple(dict.fromkeys(row.unit for row in self.rows))

    def table(self) -> Table:
        """Return the table for a rich console."""
        table = Table(
            title=f"{self.num_parameters:,} parameters on {self.mesh}\n"
            f"{self.shard_bytes:,} bytes of float32 a device"
        )
        for name in ("leaf", "shape", "placement", "unit"):
            table.add_column(name, no_wrap=True)
        table.add_column("shard bytes", justify="right")
        for row in self.rows:
            shape = "x".join(map(str, row.shape)) or "scalar"
            table.add_row(row.path, shape, row.placement, row.unit, f"{row.shard_bytes:,}")
        return table

    def __str__(self) -> str:
        return render(self.table())


def describe(layout: Layout, plan: Plan, mesh: Mesh) -> Description:
    """Make the table of a model's leaves from its layout and fetch plan."""
    units = unit_names(plan)
    values = iter(plan.leaves)
    rows = []
    for leaf in layout:
        placement = leaf.placement
        if leaf.fetched:
            unit = units.get(next(values), "unused")
        else:
            unit = "kept whole" if leaf.placement.dim is None else "persistent"
        where = "whole on every device"
        if placement.dim is not None:
            where = f"dim {placement.dim} over {world_size(mesh)}"
            where += f" (+{placement.pad} zeros)" if placement.pad else ""
        rows.append(
            Row(
                path=leaf.path,
                shape=placement.shape,
                placement=where + (", frozen" if leaf.frozen else ""),
                unit=unit,
                shard_bytes=4 * math.prod(placement.shard_shape(mesh)),
            )
        )
    words = f"{mesh.shape[NODE]} node(s) x {mesh.shape[DEVICE]} device(s)"
    return Description(rows=tuple(rows), mesh=words)


def unit_names(plan: Plan, prefix: str = "") -> dict:
    """Return the name of the unit of each leaf: "0", "1", ..., and "1.0 each turn" inside loops."""
    names: dict = {}
    unit_of = {v: i for i, unit in enumerate(plan.units) for v in unit}
    number = 0
    seen: dict[int, str] = {}
    for seg in plan.segments:
        for leaf in seg.leaves if isinstance(seg, Straight) else ():
            if unit_of[leaf] not in seen:
                seen[unit_of[leaf]] = f"{prefix}{number}"
                number += 1
            names.setdefault(leaf, seen[unit_of[leaf]])
        if isinstance(seg, Loop | Remat):
            inner = unit_names(seg.body, f"{prefix}{number}.")
            names.update((leaf, f"{prefix}{number}") for leaf in seg.leaves if leaf not in names)
            number += 1
            if isinstance(seg, Remat):
                names = {**inner, **names}
            else:
                pairs = zip(seg.body.leaves, seg.stacked.values(), strict=True)
                for sliced, (leaf, _) in pairs:
                    names.setdefault(leaf, f"{inner[sliced]} of a loop" if sliced in inner else "")
    return names
