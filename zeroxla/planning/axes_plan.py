"""What the axes that split the work on one row move and cost in a planned step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeroxla.inspect.comms_report import CommsReport
from zeroxla.inspect.traffic import most
from zeroxla.mesh.axes import nodes_along
from zeroxla.planning.lanes import TimeLine
from zeroxla.planning.target import Target
from zeroxla.program.report import Report, format_bytes
from zeroxla.split.axis_report import AxisReport

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AxisPlanRow:
    """One axis in a step.

    Attributes:
      axis, length: the axis.
      nodes: the number of nodes on which the devices of one group lie.
      link: the name of its link.
      converted_bytes: the bytes that a device receives as arrays change their holding, forward and
        backward, over all micro-batches.
      dealt_bytes: the bytes that it receives when shards are dealt, and gradients dealt back.
      leaf_bytes: the bytes that it receives in gathers of leaves over this axis and others, and in
        reduces of their gradients; those over the other axes too.
      seconds: how long the axis is taken; its own time on a link that it shares.
    """

    axis: str
    length: int
    nodes: int
    link: str
    converted_bytes: float
    dealt_bytes: float
    leaf_bytes: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AxesPlan(Report):
    """The axes of a step that split the work on one row; `print` it.

    Attributes:
      rows: the axes, in the order in which the loss is split.
      reports: the holdings and the conversions of each, for one micro-batch.
    """

    rows: tuple[AxisPlanRow, ...]
    reports: tuple[AxisReport, ...]

    @staticmethod
    def of(
        target: Target, reports: Sequence[AxisReport], comms: CommsReport, time: TimeLine
    ) -> AxesPlan:
        """Read the axes' bytes and seconds from a planned step."""
        rows = []
        for report in reports:
            own = comms.select(axis=report.axis)
            shared = [r for r in comms.collectives if report.axis in r.axis.split("+")]

            def received(phases: Sequence[str], of: Sequence = own) -> float:
                found = [row for row in of if row.phase in phases]
                return most(found, lambda row: row.received_bytes)

            rows.append(
                AxisPlanRow(
                    axis=report.axis,
                    length=report.length,
                    nodes=nodes_along(target.mesh_shape, target.node_size, report.axis),
                    link=target.links[report.axis].name,
                    converted_bytes=received(("forward", "backward")),
                    dealt_bytes=received(("deal",)),
                    leaf_bytes=received(("forward gather", "backward gather", "reduce"), shared),
                    seconds=time.busy_s.get(report.axis, 0.0),
                )
            )
        return AxesPlan(rows=tuple(rows), reports=tuple(reports))

    def table(self) -> Table:
        """Return the table for a rich console."""
        from rich.table import Table

        table = Table(title="Axes that split the work on one row", title_justify="left")
        table.add_column("axis")
        table.add_column("link")
        for name in ("conversions", "deals", "leaves, with other axes", "taken for"):
            table.add_column(name, justify="right")
        for row in self.rows:
            where = f", over {row.nodes} nodes" if row.nodes > 1 else ""
            sizes = (row.converted_bytes, row.dealt_bytes, row.leaf_bytes)
            table.add_row(
                f"{row.axis}={row.length}",
                row.link + where,
                *(format_bytes(size) if size else "-" for size in sizes),
                f"{row.seconds:.4g} s",
            )
        return table
