"""`comms`: the bytes that travel in one run of a program, by mesh axis, kind, phase and dtype."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from zeroxla.inspect.phases import PHASES, phase_of
from zeroxla.inspect.traffic import messages, most, received_bytes
from zeroxla.program import hlo
from zeroxla.program.report import Report, format_bytes
from zeroxla.step.islands.exchange_bytes import ExchangeBytes

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One collective, or the sum of several that are alike.

    Attributes:
      axis: the mesh axes that the groups span: "node", "device", or several, such as "node+device"
        (a flat collective).
      kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all" or "collective-permute".
      phase: one of `PHASES`, or several joined by "+" if the compiler merged collectives.
      dtype: the HLO wire dtype, such as "f32", "bf16", "u8", or several joined by "+".
      group_size: the number of devices that exchange with each other.
      count: the number of runs per step.
      elements: the payload elements of one run; for an all-gather, the elements of its result. In
        a sum, the elements of its largest collective.
      received_bytes: bytes that one device receives per step.
      cross_host_bytes: bytes that one host sends to other hosts per step.
      branches: the branches of conditionals around it, outermost first: (conditional, which
        branch). Its figures are for a device that always takes these branches. Empty for a sum.
      conditional: whether it runs only in some branch of a conditional. If so, the figures are
        upper bounds.
      op_name: the `jax.named_scope` path of the first collective.
    """

    axis: str
    kind: str
    phase: str
    dtype: str
    group_size: int
    count: int
    elements: int
    received_bytes: float
    cross_host_bytes: float
    branches: tuple[tuple[int, int], ...]
    conditional: bool
    op_name: str

    @property
    def is_flat(self) -> bool:
        """Whether the groups span more than one mesh axis."""
        return "+" in self.axis


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommsReport(Report):
    """The collectives of one program on one mesh.

    Attributes:
      mesh_shape: axis lengths, outermost first.
      collectives: one row for each collective instruction and each place that it is called from.
      islands: what islands send each other besides; None if the program is no island's.
    """

    mesh_shape: dict[str, int]
    collectives: tuple[Row, ...]
    islands: ExchangeBytes | None = None

    @property
    def rows(self) -> tuple[Row, ...]:
        """The collectives, summed by phase, axis, kind, dtype, group size and `conditional`."""
        alike: dict[tuple, list[Row]] = {}
        for row in self.collectives:
            key = (row.phase, row.axis, row.kind, row.dtype, row.group_size, row.conditional)
            alike.setdefault(key, []).append(row)
        sums = [
            dataclasses.replace(
                rows[0],
                count=int(most(rows, lambda row: row.count)),
                elements=max(row.elements for row in rows),
                received_bytes=most(rows, lambda row: row.received_bytes),
                cross_host_bytes=most(rows, lambda row: row.cross_host_bytes),
                branches=(),
            )
            for rows in alike.values()
        ]
        return tuple(sorted(sums, key=lambda row: [PHASES.index(p) for p in row.phase.split("+")]))

    def select(
        self,
        *,
        axis: str | None = None,
        kind: str | None = None,
        phase: str | None = None,
        dtype: str | None = None,
        min_elements: int = 0,
    ) -> tuple[Row, ...]:
        """Return the collectives (not summed) that match everything given.

        Args:
          axis: exactly these axes, such as "node" or "node+device".
          kind: the HLO kind, such as "all-gather".
          phase: words of a phase. "gather" matches both gathers, "backward" all of backward.
          dtype: the HLO wire dtype.
          min_elements: the smallest payload that counts, in elements.
        """
        words = set(phase.split()) if phase else set()
        return tuple(
            row
            for row in self.collectives
            if axis in (None, row.axis)
            and kind in (None, row.kind)
            and dtype in (None, row.dtype)
            and row.elements >= min_elements
            and any(words <= set(part.split()) for part in row.phase.split("+"))
        )

    def total_bytes(self, **filters: Any) -> float:
        """Return the bytes that one device receives per step; filters as in `select`."""
        return most(self.select(**filters), lambda row: row.received_bytes)

    def cross_host_bytes(self, **filters: Any) -> float:
        """Return the bytes that one host sends to others per step; filters as in `select`."""
        return most(self.select(**filters), lambda row: row.cross_host_bytes)

    def count(self, **filters: Any) -> int:
        """Return how many collectives run per step; filters as in `select`."""
        return int(most(self.select(**filters), lambda row: row.count))

    def flat(self, *, min_elements: int = 0) -> tuple[Row, ...]:
        """Return the collectives over more than one axis with at least `min_elements` elements."""
        return tuple(row for row in self.select(min_elements=min_elements) if row.is_flat)

    def table(self) -> Table:
        """Return the summed rows as a rich table.

        "<=" marks upper bounds. A device takes one branch of a conditional, so the branch with the
        most bytes counts, and the total may be less than the sum of the rows.
        """
        from rich.table import Table

        mesh = " x ".join(f"{name}={size}" for name, size in self.mesh_shape.items())
        table = Table(title=f"Collectives of one step on {mesh}", title_justify="left")
        for name in ("phase", "axis", "collective", "dtype"):
            table.add_column(name)
        for name in ("count", "received by a device", "sent by a host to others"):
            table.add_column(name, justify="right")
        for row in self.rows:
            bound = "<= " if row.conditional else ""
            table.add_row(
                row.phase,
                row.axis,
                row.kind,
                row.dtype,
                f"{bound}{row.count}",
                bound + format_bytes(row.received_bytes),
                bound + format_bytes(row.cross_host_bytes) if row.cross_host_bytes else "-",
            )
        table.add_section()
        bound = "<= " if any(row.conditional for row in self.collectives) else ""
        totals = (format_bytes(self.total_bytes()), format_bytes(self.cross_host_bytes()))
        table.add_row(
            *("total", "", "", ""), f"{bound}{self.count()}", *(bound + text for text in totals)
        )
        if self.islands is not None:
            table.add_section()
            count = f"{len(self.islands.sizes) / self.islands.every:.3g}"
            received = format_bytes(self.islands.bytes_per_step / self.islands.num_devices)
            sent = f"{format_bytes(self.islands.bytes_per_step)} by an island"
            table.add_row("exchange", "islands", "", "", count, received, sent)
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return mesh, rows and totals as plain types, for JSON."""
        return {
            "mesh": dict(self.mesh_shape),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "total_bytes": self.total_bytes(),
            "cross_host_bytes": self.cross_host_bytes(),
            "islands": self.islands and dataclasses.asdict(self.islands),
        }


def comms(
    program: jax.stages.Lowered | jax.stages.Compiled | str,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    *,
    host_axes: Sequence[str] = ("pipe", "node"),
    while_trips: int | None = None,
    islands: ExchangeBytes | None = None,
) -> CommsReport:
    """Report the collectives of a program, mapped to the axes of its mesh.

    A compiled program shows the collectives that run, with those that the compiler inserted (for
    the optimizer) or merged, and without those that it dropped. A lowered program shows only the
    collectives that were written in `shard_map`, dead code included. The CPU backend widens 16-bit
    floats to float32 (float8 to float16) before they travel; there, read the wire dtypes and bytes
    of such collectives from the lowered program.

    Args:
      program: a lowered or compiled program, or HLO text: compiled.as_text(), or
        lowered.as_text(dialect="hlo", debug_info=True). Without debug_info phases are unknown.
      mesh: the mesh that the program was built for. Device groups are read as positions in
        mesh.devices.flat.
      host_axes: axes whose neighbours are other hosts. Axes that the mesh lacks are ignored. By
        default every node of every stage is a host; give ("node",) if one host has all stages.
      while_trips: the trip count to assume for loops whose own depends on data.
      islands: what islands exchange besides, as `Island.describe` returns it.

    Returns:
      The report. Collectives of one-device groups move nothing and are left out.

    Raises:
      ValueError: the text is no HLO, the program was built for another number of devices, or a
        loop with collectives has no fixed trip count and `while_trips` is None.
      NotImplementedError: a collective of a sixth kind (see `Row.kind` for the five).

    Cost: reads the program's text, about 1 s per 200 000 lines. Nothing runs.

    Phases come from the `jax.named_scope` names `gather`, `forward`, `backward`, `reduce`,
    `update`, `move` and `send` in an op's path, and from the transforms that JAX notes there.
    """
    if isinstance(program, jax.stages.Lowered):
        text = program.as_text(dialect="hlo", debug_info=True)
    elif isinstance(program, jax.stages.Compiled):
        text = program.as_text()
    else:
        text = program
    if not isinstance(text, str):
        raise ValueError(
            f"comms() reads a lowered or compiled program or HLO text, not {type(program).__name__}"
        )
    module = hlo.parse(text)
    shape = {str(name): int(size) for name, size in mesh.shape.items()}
    world = math.prod(shape.values())
    if module.num_partitions not in (None, world):
        raise ValueError(
            f"the program was compiled for {module.num_partitions} devices, the mesh {shape} has "
            f"{world}; pass the mesh that the program was built for"
        )
    # [world, axes]: the place of each device position on the mesh.
    places = np.stack(np.unravel_index(np.arange(world), tuple(shape.values())), axis=1)
    host_dims = [dim for dim, name in enumerate(shape) if name in host_axes]
    hosts = [tuple(place) for place in places[:, host_dims].tolist()]
    rows = []
    for collective in hlo.collectives(module, while_trips=while_trips):
        row = _row(collective, places, tuple(shape), hosts)
        if row is not None:
            rows.append(row)
    return CommsReport(mesh_shape=shape, collectives=tuple(rows), islands=islands)


def _row(
    collective: hlo.Collective,
    places: np.ndarray,
    axes: tuple[str, ...],
    hosts: list[tuple[int, ...]],
) -> Row | None:
    groups: Sequence[Sequence[int]]
    if collective.kind == "collective-permute":
        groups = collective.pairs  # Groups of two. A pair of the same device moves nothing.
    else:
        groups = collective.groups or [range(len(places))]
    beyond = [i for group in groups for i in group if i >= len(places)]
    if beyond:
        raise ValueError(
            f"{collective.name!r} names device {max(beyond)}, but the mesh has {len(places)} "
            "devices; pass the mesh that the program was built for"
        )
    spanned = [
        name
        for dim, name in enumerate(axes)
        if any(len(set(places[list(group), dim].tolist())) > 1 for group in groups)
    ]
    if not spanned:
        return None
    arrays = collective.results if collective.kind == "all-gather" else collective.operands
    num_bytes = sum(array.num_bytes for array in arrays)
    size = max(len(group) for group in groups)
    received = received_bytes(collective.kind, num_bytes, size)
    sent = dict.fromkeys(hosts, 0.0)
    for group in groups:
        for source, target, share in messages(collective.kind, group, num_bytes):
            if hosts[source] != hosts[target]:
                sent[hosts[source]] += share
    return Row(
        axis="+".join(spanned),
        kind=collective.kind,
        phase=phase_of(collective.op_name, collective.kind),
        dtype="+".join(dict.fromkeys(array.dtype for array in arrays)),
        group_size=size,
        count=collective.count,
        elements=sum(array.num_elements for array in arrays),
        received_bytes=received * collective.count,
        cross_host_bytes=max(sent.values()) * collective.count,
        branches=collective.branches,
        conditional=bool(collective.branches),
        op_name=collective.op_name,
    )
