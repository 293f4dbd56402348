"""`CommsReport`: the bytes that travel in one run of a program, by axis, kind, phase and dtype."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from zeroxla.inspect.traffic import most
from zeroxla.mesh.axes import DEVICE, SPLIT_AXES
from zeroxla.program.phases import PHASES
from zeroxla.program.report import Report, format_bytes
from zeroxla.step.islands.exchange_bytes import ExchangeBytes

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One collective, or the sum of several that are alike.

    Attributes:
      axis: the mesh axes that the groups span: "node", "device", or several, such as "node+device"
        (a flat collective) or
        "device+tensor" (one hop inside a node).
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
        """Whether the groups span more than one mesh axis. The axes inside a node count as one: a
        leaf is gathered over all of them at once."""
        inside = {DEVICE, *SPLIT_AXES}
        return len({"inside" if name in inside else name for name in self.axis.split("+")}) > 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommsReport(Report):
    """The collectives of one program on one mesh.

    Attributes:
      mesh_shape: axis lengths, outermost first.
      collectives: one row for each collective instruction and each place that it is called from.
      islands: the exchanges of islands, which the program does not hold; None if there are none.
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
        """Return the collectives over more than one axis (see `Row.is_flat`) with at least
        `min_elements` elements."""
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
