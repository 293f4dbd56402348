"""Cuts a list of layers into stages: balanced, uniform, or at boundaries that the user gives."""

from __future__ import annotations

import collections
import itertools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zeroxla.frontend.staged import StagesReport
from zeroxla.pipeline.layer_cost import LayerCost, Machine, seconds_of
from zeroxla.pipeline.minimax import balanced, check_stages, uniform
from zeroxla.program.report import Report

if TYPE_CHECKING:
    from rich.table import Table

METHODS = ("uniform", "parameters", "type:REGEX", "profile")
_TYPE = "type:"
NARROW = 1.1
"""How much heavier than in the most even cut the heaviest stage may be, for fewer bytes between the
stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageStorage:
    """What a device of a stage holds in a step, beside what it stores between steps.

    Attributes:
      leaf_bytes: bytes of the stage's leaves: whole where they are gathered once a step, and shards
        where they are gathered in every tick.
      gradient_bytes: bytes of float32 gradients that it adds up.
    """

    leaf_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition(StagesReport):
    """Layers cut into stages; `print` it, or read its attributes.

    Attributes:
      boundaries: P + 1 indices for P stages, from 0 to the number of layers.
      layers: all layers.
      costs: the cost of each layer that the method balances; its parameters if the user gave the
        boundaries.
      unit: the costs' unit, in words.
      storage: for each stage, what its devices hold in a step; empty before a step has seen a
        batch.
      at_rest: sentences that say what a device stores between steps, and where it is updated.
      ranks: the rank of each stage; empty before a step has seen a batch.
      axes: a report on each axis that splits the work on one row.
      rewrites: a report on what was rewritten in the model's trace; None without the option.
    """

    boundaries: tuple[int, ...]
    layers: tuple[LayerCost, ...]
    costs: tuple[float, ...]
    unit: str
    storage: tuple[StageStorage, ...] = ()
    at_rest: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    axes: tuple[Report, ...] = ()
    rewrites: Report | None = None

    @property
    def stage_costs(self) -> list[float]:
        """The sum of the costs of each stage's layers."""
        return [sum(self.costs[a:b]) for a, b in itertools.pairwise(self.boundaries)]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of float32 gradients that a device adds up, of the rank with the most."""
        sums = collections.Counter[int]()
        for rank, storage in zip(self.ranks, self.storage):
            sums[rank] += storage.gradient_bytes
        return max(sums.values(), default=0)

    @property
    def has_chunks(self) -> bool:
        """Whether a rank has several stages."""
        return len(set(self.ranks)) < len(self.ranks)

    def notes(self) -> list[str]:
        """Return what a device stores between steps, in sentences."""
        parts = ["Of a leaf that an axis splits, the parameters of one part are counted."]
        return [*self.at_rest, *(parts if self.axes else ())]

    def beside(self, axes: Sequence[Report], rewrites: Report | None) -> Partition:
        """Return the report with others; see `StagesReport`."""
        return replace(self, axes=tuple(axes), rewrites=rewrites)

    def tables(self) -> list[Table]:
        """Return the table of stages, and those of the axes and of rewrites."""
        others = [*self.axes, *([] if self.rewrites is None else [self.rewrites])]
        return [self.table(), *(table for other in others for table in other.tables())]

    def table(self) -> Table:
        """Return the stages as a rich table."""
        from rich.table import Table

        num_stages = len(self.boundaries) - 1
        title = f"{len(self.layers)} layers in {num_stages} stages"
        table = Table(title=title, title_justify="left")
        table.add_column("stage", justify="right")
        if self.has_chunks:
            table.add_column("rank", justify="right")
        table.add_column("layers")
        table.add_column("names")
        table.add_column("parameters", justify="right")
        table.add_column(f"share of {self.unit}", justify="right")
        for name in ("bytes of leaves", "of gradients") if self.storage else ():
            table.add_column(name, justify="right")
        total = sum(self.stage_costs)
        stages = zip(itertools.pairwise(self.boundaries), self.stage_costs)
        for stage, ((start, end), cost) in enumerate(stages):
            layers = self.layers[start:end]
            held = self.storage[stage : stage + 1]
            table.add_row(
                str(stage),
                *([str(self.ranks[stage])] if self.has_chunks else []),
                _span(start, end - 1) if layers else "none",
                _span(layers[0].name, layers[-1].name) if layers else "",
                f"{sum(layer.parameters for layer in layers):,}",
                f"{cost / total:.1%}" if total else "",
                *(f"{n:,}" for x in held for n in (x.leaf_bytes, x.gradient_bytes)),
            )
        table.add_section()
        blank = [""] * (2 + self.has_chunks)
        table.add_row("total", *blank, f"{sum(layer.parameters for layer in self.layers):,}", "")
        return table


def make_partition(
    method: str | Sequence[int],
    layers: Sequence[LayerCost],
    stages: int,
    *,
    machine: Machine | None = None,
    allow_empty: bool = False,
) -> Partition:
    """Cut layers into stages by a method.

    Args:
      method: the quantity to balance, or the boundaries themselves: 0, ..., the number of layers.
        "uniform" balances the number of layers and "parameters" the number of parameters.
        "type:REGEX" balances the number of layers in whose kind the expression is found, in upper
        or lower case. "profile" balances the time: `seconds` if it was measured, otherwise the
        roofline of `flops` and `bytes`.
      layers: the layers in order. Where the bytes between them are known, a balanced cut goes
        where few pass, as long as the heaviest stage is at most `NARROW` times as heavy as it must.
      stages: the number of stages.
      machine: the device whose roofline "profile" takes; not needed for measured layers.
      allow_empty: accept stages without layers: the last stages if there are fewer layers than
        stages, or empty stages in the given boundaries.

    Returns:
      The partition.

    Raises:
      ValueError: the method is unknown or does not fit the layers, or there are too few layers.
    """
    layers = tuple(layers)
    if not isinstance(method, str):
        boundaries = _check_boundaries(method, len(layers), stages, allow_empty)
        costs, unit = [layer.parameters for layer in layers], "parameters"
    else:
        check_stages(len(layers), stages, allow_empty)
        costs, unit = _costs(method, layers, machine)
        if method == "uniform":
            boundaries = uniform(len(layers), stages)
        else:
            boundaries = balanced(costs, stages, allow_empty=allow_empty)
            boundaries = _narrowed(boundaries, costs, layers, stages)
    return Partition(boundaries=tuple(boundaries), layers=layers, costs=tuple(costs), unit=unit)


def _narrowed(
    even: list[int], costs: Sequence[float], layers: Sequence[LayerCost], stages: int
) -> list[int]:
    """Return the cut with the fewest bytes between stages, and the most even one with so few, whose
    heaviest stage is at most `NARROW` times as heavy as that of the cut `even`."""
    across = [layer.bytes_after for layer in layers if layer.bytes_after is not None]
    if stages == 1 or len(layers) <= stages or len(across) < len(layers):
        return even
    starts = [0, *itertools.accumulate(costs)]
    most = NARROW * max(starts[b] - starts[a] for a, b in itertools.pairwise(even))
    for limit in sorted(set(across[:-1])):
        places = [i for i, n in enumerate(across[:-1], 1) if n <= limit]
        ends = [0, *places, len(layers)]
        if len(ends) <= stages:
            continue
        joined = [starts[b] - starts[a] for a, b in itertools.pairwise(ends)]
        found = [ends[i] for i in balanced(joined, stages)]
        if max(starts[b] - starts[a] for a, b in itertools.pairwise(found)) <= most:
            return found
    return even


def _costs(
    method: str, layers: Sequence[LayerCost], machine: Machine | None
) -> tuple[list[float], str]:
    """Return the costs that a method balances, and their unit."""
    if method == "uniform":
        return [1] * len(layers), "layers"
    if method == "parameters":
        return [layer.parameters for layer in layers], "parameters"
    if method.startswith(_TYPE):
        pattern = method.removeprefix(_TYPE)
        return _matches(pattern, layers), f"layers of type {pattern}"
    if method == "profile":
        return seconds_of(layers, machine), "time"
    raise ValueError(
        f"partition={method!r} is unknown; use one of {', '.join(METHODS)}, or the boundaries"
    )


def _matches(pattern: str, layers: Sequence[LayerCost]) -> list[float]:
    """Return 1 for each layer whose kind matches a regular expression, 0 for the others."""
    if not pattern:
        raise ValueError(f"partition={_TYPE!r} has no expression; write for example 'type:block'")
    try:
        expression = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(
            f"{pattern!r} in partition={_TYPE + pattern!r} is no regular expression: {error}"
        ) from error
    found = [float(expression.search(layer.kind) is not None) for layer in layers]
    if not any(found):
        kinds = ", ".join(sorted({layer.kind for layer in layers}))
        raise ValueError(
            f"partition={_TYPE + pattern!r} matches no layer; the kinds of layers are {kinds}"
        )
    return found


def _check_boundaries(
    boundaries: Sequence[int], num_layers: int, stages: int, allow_empty: bool
) -> list[int]:
    check_stages(num_layers, stages, allow_empty=True)
    try:
        found = [operator.index(boundary) for boundary in boundaries]
    except TypeError as error:
        raise ValueError(
            f"partition={boundaries!r} is neither a method ({', '.join(METHODS)}) nor a list of "
            "whole numbers"
        ) from error
    what = f"the boundaries {found}"
    if len(found) != stages + 1:
        raise ValueError(
            f"{what} are {len(found)} numbers; {stages} stages have {stages + 1}, from 0 to "
            f"{num_layers}"
        )
    if (found[0], found[-1]) != (0, num_layers):
        raise ValueError(f"{what} must start at 0 and end at {num_layers}, the number of layers")
    for stage, (start, end) in enumerate(itertools.pairwise(found)):
        if end < start:
            raise ValueError(f"{what} descend from {start} to {end}; write them in order")
        if end == start and not allow_empty:
            raise ValueError(f"{what} leave stage {stage} empty; move one, or allow_empty=True")
    return found


def _span(first: object, last: object) -> str:
    """Return "first to last", or one of the two if they are equal."""
    return str(first) if first == last else f"{first} to {last}"
