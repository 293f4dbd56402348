"""`AxisReport`: what a plan splits along an axis, and what travels over the axis."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from zeroxla.program.report import Report, format_bytes
from zeroxla.program.trace import Value, bytes_of
from zeroxla.split.axis_scopes import ScopeRow, scope_rows
from zeroxla.split.conversions import Conversion, conversions_of
from zeroxla.split.holdings import Holding, Kind
from zeroxla.split.ways import AxisPlan

if TYPE_CHECKING:
    from rich.table import Table

MOST_ARRAYS = 12
"""The most kinds of arrays in the table: those whose bytes are the most."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArrayRow:
    """The arrays of one shape that equations give.

    Attributes:
      kind: their shape and dtype, such as "float32[2,16,32]".
      held: how many of them devices hold in which way, the most frequent first.
      num_bytes: the bytes of all of them, whole.
    """

    kind: str
    held: tuple[tuple[str, int], ...]
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AxisReport(Report):
    """What is split along an axis, and what is converted where; `print` it.

    Attributes:
      axis: the axis.
      length: its length.
      arrays: the arrays of the program, by shape. A loop's body counts once.
      conversions: the conversions in which something travels, in order.
      scopes: the large arrays module by module, in order, with what is converted between them;
        `zeroxla.inspect.plot_axes` draws these.
      batch: for each array of the batch its dim of which a device is given a part; None for an
        array that it is given whole.
      padded: by their size, to how many elements sequences are padded that the axis does not
        divide.
    """

    axis: str
    length: int
    arrays: tuple[ArrayRow, ...]
    conversions: tuple[Conversion, ...]
    scopes: tuple[ScopeRow, ...]
    batch: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    padded: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(plan: AxisPlan, axis: str, length: int, names: Sequence[str] = ()) -> AxisReport:
        """Report on a plan.

        Args:
          plan: the plan.
          axis, length: the axis.
          names: the paths of the leaves, which are the program's first inputs.
        """
        found: dict[str, Counter[str]] = {}
        sizes: Counter[str] = Counter()
        for value, holding in _given(plan):
            kind = value.aval.str_short()
            found.setdefault(kind, Counter())[in_words(holding)] += 1
            sizes[kind] += bytes_of(value)
        rows = [
            ArrayRow(kind=kind, held=tuple(held.most_common()), num_bytes=sizes[kind])
            for kind, held in found.items()
        ]
        moved = [c for c in conversions_of(plan, length) if c.forward or c.backward]
        return AxisReport(
            axis=axis,
            length=length,
            arrays=tuple(sorted(rows, key=lambda row: -row.num_bytes)),
            conversions=tuple(moved),
            scopes=scope_rows(plan, length, names),
        )

    @property
    def received(self) -> float:
        """The bytes that a device receives over the axis in a step, forward and backward; gathers
        of leaves and reduces of their gradients aside."""
        return sum(sum(c.received(self.length)) for c in self.conversions)

    def _batch_rows(self) -> list[tuple[str, str]]:
        """Return in words which arrays of the batch a device is given in parts, and which whole."""
        names: dict[int | None, list[str]] = {}
        for name, dim in self.batch.items():
            names.setdefault(dim, []).append(name)
        return [
            (
                f"batch: {', '.join(found)}",
                "given whole" if dim is None else f"given as part of dim {dim}",
            )
            for dim, found in names.items()
        ]

    def tables(self) -> list[Table]:
        """Return the tables of arrays and of conversions."""
        from rich.table import Table

        lengths = (f"{n} positions are padded to {held}" for n, held in self.padded.items())
        title = f"{self.axis}={self.length}: how devices hold arrays"
        arrays = Table(title="; ".join((title, *lengths)))
        for name in ("array", "held as"):
            arrays.add_column(name)
        for names, given in self._batch_rows():
            arrays.add_row(names, given)
        for row in self.arrays[:MOST_ARRAYS]:
            held = ", ".join(f"{words} ({n})" for words, n in row.held)
            arrays.add_row(row.kind, held)
        moved = Table(
            title=f"{self.axis}={self.length}: conversions in a micro-batch; a device receives "
            f"{format_bytes(self.received)}"
        )
        for name in ("array", "from", "to", "forward", "backward", "times", "for"):
            moved.add_column(name)
        for c in self.conversions:
            moved.add_row(
                f"{c.dtype}[{','.join(map(str, c.shape))}]",
                in_words(c.have),
                in_words(c.want),
                c.forward or "-",
                c.backward or "-",
                str(c.times),
                c.where,
            )
        return [arrays, moved]


def in_words(holding: Holding) -> str:
    """Return a holding as text, such as "part of dim 1"."""
    if holding.kind is Kind.RAGGED:
        return f"its groups of dim {holding.dim}"
    return holding.kind.value if holding.dim is None else f"part of dim {holding.dim}"


def _given(plan: AxisPlan) -> Iterable[tuple[Value, Holding]]:
    """Yield the results of a plan's equations, those in bodies included, and their holdings."""
    for eq, way in plan.steps:
        yield from zip(eq.outputs, way.kept, strict=False)
        for body in (way.body, way.backward):
            if body is not None:
                yield from _given(body)
