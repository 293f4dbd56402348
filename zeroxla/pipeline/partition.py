"""Where a list of layers is cut into stages: balanced, uniform, or as the user says.

Balanced means the true minimax: no other cut has a lighter heaviest stage. DeepSpeed minimises the
difference between its heaviest and its lightest stage instead, which can leave a heavier one.

Boundaries of P stages are P + 1 indices: stage s holds the layers [boundaries[s], boundaries[s+1]).
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeroxla.inspect.memory import render

if TYPE_CHECKING:
    from rich.table import Table

METHODS = ("uniform", "parameters", "type:REGEX", "profile")
_TYPE = "type:"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """What one layer weighs.

    Attributes:
      name: of the layer, for people.
      kind: the name of its class, which "type:REGEX" searches.
      parameters: how many.
      flops: of the layer's compiled forward and backward.
      bytes: that the compiled layer reads and writes.
      seconds: measured.
    """

    name: str
    kind: str
    parameters: int
    flops: float | None = None
    bytes: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The roofline of one device: a layer takes as long as the slower of arithmetic and memory.

    Attributes:
      flops_per_s: in the dtype that the layers compute in.
      bytes_per_s: of the device's main memory.
    """

    flops_per_s: float
    bytes_per_s: float

    def __post_init__(self):
        if not (self.flops_per_s > 0 and self.bytes_per_s > 0):
            raise ValueError(
                f"a machine of {self.flops_per_s} FLOP/s and {self.bytes_per_s} bytes/s computes "
                "nothing; give both figures of one device, above 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Layers cut into stages; `print` it, or read it.

    Attributes:
      boundaries: P + 1 indices, from 0 to the number of layers.
      layers: all of them.
      costs: of each layer: what the method balances; parameters where the user gave the boundaries.
      unit: of the costs, in words.
    """

    boundaries: tuple[int, ...]
    layers: tuple[LayerCost, ...]
    costs: tuple[float, ...]
    unit: str

    @property
    def stage_costs(self) -> list[float]:
        return [sum(self.costs[a:b]) for a, b in itertools.pairwise(self.boundaries)]

    def table(self) -> Table:
        """Return the stages as a rich table."""
        from rich.table import Table

        num_stages = len(self.boundaries) - 1
        title = f"{len(self.layers)} layers in {num_stages} stages"
        table = Table(title=title, title_justify="left")
        table.add_column("stage", justify="right")
        table.add_column("layers")
        table.add_column("names")
        table.add_column("parameters", justify="right")
        table.add_column(f"share of {self.unit}", justify="right")
        total = sum(self.stage_costs)
        stages = zip(itertools.pairwise(self.boundaries), self.stage_costs)
        for stage, ((start, end), cost) in enumerate(stages):
            layers = self.layers[start:end]
            table.add_row(
                str(stage),
                _span(start, end - 1) if layers else "none",
                _span(layers[0].name, layers[-1].name) if layers else "",
                f"{sum(layer.parameters for layer in layers):,}",
                f"{cost / total:.1%}" if total else "",
            )
        table.add_section()
        table.add_row("total", "", "", f"{sum(layer.parameters for layer in self.layers):,}", "")
        return table

    def __str__(self) -> str:
        return render(self.table())


def partition(costs: Iterable[Any], stages: int, *, allow_empty: bool = False) -> list[int]:
    """Cut layers into stages so that the heaviest stage is as light as can be.

    Among the cuts that reach that, the one with the smallest sum of squared stage costs is taken;
    among these the one whose first cut is latest, then whose second is, and so on: a layer that
    costs nothing stays with the layer before it. If no layer costs anything, all count the same.

    Args:
      costs: of each layer: integers or floats, 0 or more.
      stages: P.
      allow_empty: with fewer layers than stages, leave the last stages empty. With as many layers
        or more no stage is ever empty, since an empty one makes no other lighter.

    Returns:
      P + 1 boundaries.

    Raises:
      ValueError: a cost is negative or not finite, or there are fewer layers than stages.

    All sums and comparisons are exact: floats are taken as the binary fractions that they are.

    Cost: O(P N log N) steps of Python for N layers; under a second for 1000 layers and 64 stages.

    >>> partition([5, 1, 1, 1, 1, 1], 2)
    [0, 1, 6]
    """
    weights = _integers(costs)
    _check_stages(len(weights), stages, allow_empty)
    if len(weights) <= stages:
        return uniform(len(weights), stages)
    if not any(weights):
        weights = [1] * len(weights)
    starts = [0, *itertools.accumulate(weights)]
    return _least_squares(starts, stages, _bottleneck(starts, stages))


def uniform(num_layers: int, stages: int) -> list[int]:
    """Give every stage the same number of layers, the first ones one more where it does not divide.

    With fewer layers than stages the last ones are empty. The boundaries are DeepSpeed's.

    >>> uniform(22, 4)
    [0, 6, 12, 17, 22]
    """
    _check_stages(num_layers, stages, allow_empty=True)
    each, more = divmod(num_layers, stages)
    return [stage * each + min(stage, more) for stage in range(stages + 1)]


def resolve(
    method: str | Sequence[int],
    layers: Sequence[LayerCost],
    stages: int,
    *,
    machine: Machine | None = None,
    allow_empty: bool = False,
) -> Partition:
    """Cut layers into stages by a method.

    Args:
      method: what is balanced: "uniform", the number of layers; "parameters"; "type:REGEX", the
        number of layers in whose kind the expression is found, upper or lower case alike;
        "profile", the time, which is `seconds` where it was measured and else the roofline of
        `flops` and `bytes`. Or the boundaries themselves: 0, ..., the number of layers.
      layers: in order.
      stages: P.
      machine: for "profile" of layers that were not measured.
      allow_empty: accept stages without layers: the last ones where there are fewer layers than
        stages, or those of the boundaries given.

    Returns:
      The partition.

    Raises:
      ValueError: the method is unknown or does not fit the layers, or there are too few of them.
    """
    layers = tuple(layers)
    if not isinstance(method, str):
        boundaries = _check_boundaries(method, len(layers), stages, allow_empty)
        costs, unit = [layer.parameters for layer in layers], "parameters"
    else:
        _check_stages(len(layers), stages, allow_empty)
        costs, unit = _costs(method, layers, machine)
        if method == "uniform":
            boundaries = uniform(len(layers), stages)
        else:
            boundaries = partition(costs, stages, allow_empty=allow_empty)
    return Partition(boundaries=tuple(boundaries), layers=layers, costs=tuple(costs), unit=unit)


def _costs(
    method: str, layers: Sequence[LayerCost], machine: Machine | None
) -> tuple[list[float], str]:
    """Return what a method balances, and its unit."""
    if method == "uniform":
        return [1] * len(layers), "layers"
    if method == "parameters":
        return [layer.parameters for layer in layers], "parameters"
    if method.startswith(_TYPE):
        pattern = method.removeprefix(_TYPE)
        return _matches(pattern, layers), f"layers of type {pattern}"
    if method == "profile":
        return _times(layers, machine), "time"
    raise ValueError(
        f"partition={method!r} is unknown; use one of {', '.join(METHODS)}, or the boundaries"
    )


def _matches(pattern: str, layers: Sequence[LayerCost]) -> list[float]:
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


def _times(layers: Sequence[LayerCost], machine: Machine | None) -> list[float]:
    """Return seconds: all measured or all computed, since the two are not on one scale."""
    measured = [layer.seconds for layer in layers if layer.seconds is not None]
    if len(measured) == len(layers):
        return measured
    if measured:
        names = ", ".join(layer.name for layer in layers if layer.seconds is None)
        raise ValueError(
            f"partition='profile' has the seconds of {len(measured)} of {len(layers)} layers, not "
            f"of {names}; measure all of them, or none"
        )
    times = []
    for layer in layers:
        if layer.flops is None or layer.bytes is None:
            raise ValueError(
                f"partition='profile' needs the seconds, or the flops and bytes, of every layer; "
                f"{layer.name} has flops={layer.flops}, bytes={layer.bytes}"
            )
        if machine is None:
            raise ValueError(
                "partition='profile' turns flops and bytes into a time by a machine's figures; "
                "give machine=Machine(flops_per_s=..., bytes_per_s=...), or measured seconds"
            )
        times.append(max(layer.flops / machine.flops_per_s, layer.bytes / machine.bytes_per_s))
    return times


def _check_stages(num_layers: int, stages: int, allow_empty: bool) -> None:
    if stages < 1:
        raise ValueError(f"stages={stages} must be at least 1")
    if num_layers < stages and not allow_empty:
        raise ValueError(
            f"{num_layers} layers do not fill {stages} stages; use at most {num_layers} stages "
            "(a smaller pipe axis), split the layers further, or allow_empty=True"
        )


def _check_boundaries(
    boundaries: Sequence[int], num_layers: int, stages: int, allow_empty: bool
) -> list[int]:
    _check_stages(num_layers, stages, allow_empty=True)
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


def _integers(costs: Iterable[Any]) -> list[int]:
    """Return costs times a common factor that makes all of them whole."""
    ratios = []
    for layer, cost in enumerate(costs):
        number = cost.item() if hasattr(cost, "item") else cost  # NumPy's and JAX's scalars
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"layer {layer} costs {number}; a cost is finite, and 0 or more")
        ratios.append(number.as_integer_ratio())
    scale = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _bottleneck(starts: list[int], stages: int) -> int:
    """Return the cost of the heaviest stage of the best cut, by bisection."""
    heaviest = max(end - start for start, end in itertools.pairwise(starts))
    low, high = max(heaviest, -(-starts[-1] // stages)), starts[-1]
    while low < high:
        middle = (low + high) // 2
        first = 0
        for _ in range(stages):
            first = _reach(starts, first, middle)
        low, high = (low, middle) if first == len(starts) - 1 else (middle + 1, high)
    return low


def _reach(starts: list[int], first: int, bottleneck: int) -> int:
    """Return where a stage from layer `first` on ends at the latest."""
    return bisect.bisect_right(starts, starts[first] + bottleneck) - 1


def _least_squares(starts: list[int], stages: int, bottleneck: int) -> list[int]:
    """Return the cut with the smallest sum of squares whose stages stay within the bottleneck.

    Dynamic programming over suffixes: `least[i]` is the sum of squares of the layers from i on, cut
    into as many stages as were added so far. The squared cost of a stage satisfies the quadrangle
    inequality, one above the bottleneck counting as infinite, so that the best end of a stage never
    moves back when its start moves on: the middle start bounds where the others have to look.
    """
    num_layers = len(starts) - 1
    reach = [_reach(starts, first, bottleneck) for first in range(num_layers)]
    least = {num_layers: 0}
    ends: list[dict[int, int]] = []  # of the first stage, by its start; for 1, 2, ... stages

    for _ in range(stages):
        below = least
        least, end_of = {}, {}
        # What can be cut into one stage more: each of its layers alone, or as the bottleneck lets.
        last = max(below) - 1
        first = next(i for i in range(num_layers) if reach[i] >= min(below))
        open_ranges = [(first, last, min(below), max(below))]
        while open_ranges:
            first, last, low, high = open_ranges.pop()
            if first > last:
                continue
            i = (first + last) // 2
            candidates = range(min(reach[i], high), max(i + 1, low) - 1, -1)  # ties: the latest
            end = min(candidates, key=lambda j: (starts[j] - starts[i]) ** 2 + below[j])
            least[i] = (starts[end] - starts[i]) ** 2 + below[end]
            end_of[i] = end
            open_ranges += [(first, i - 1, low, end), (i + 1, last, end, high)]
        ends.append(end_of)

    boundaries = [0]
    for end_of in reversed(ends):
        boundaries.append(end_of[boundaries[-1]])
    return boundaries


def _span(first: object, last: object) -> str:
    return str(first) if first == last else f"{first} to {last}"
