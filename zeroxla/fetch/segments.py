"""Segments, and the fetch plan that they make up.

A plan cuts a program into segments. Every segment names the leaves that are gathered when it starts
and dropped when it ends. Only activations flow between segments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Operand, Value


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Straight:
    """A run of equations, with the equations of all parameter-only values that it reads.

    Attributes:
      leaves: the leaves that are gathered.
      equations: the equations, in order.
      inputs: the values that it reads from outside, leaves excepted.
      outputs: the values that later segments or the caller read.
    """

    leaves: tuple[Value, ...]
    equations: tuple[Equation, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerLoop:
    """A `scan` whose `xs` hold stacked leaves.

    Attributes:
      scan: the scan.
      leaves: the leaves that are gathered whole before the loop. Its operands, other than the
        stacked leaves, are computed from them.
      known: the equations that compute those operands.
      inputs: the other values that those operands are, or are computed from.
      stacked: the leaf at each position of `xs` that holds one, with its layer dim.
      body: the plan of one turn. Its inputs are the constants, the carries and the other `xs`, in
        the scan's order.
    """

    scan: Scan
    leaves: tuple[Value, ...]
    known: tuple[Equation, ...]
    inputs: tuple[Value, ...]
    stacked: Mapping[int, tuple[Value, int]]
    body: FetchPlan

    @property
    def outputs(self) -> tuple[Value, ...]:
        return self.scan.equation.outputs


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Remat:
    """A run of equations, such as the body of a `jax.checkpoint`, whose forward runs a second time
    before its backward. Forward saves its inputs alone. It has a plan of its own.

    Attributes:
      inputs: the values that the body reads from outside, leaves excepted.
      outputs: the values that it makes.
      body: the plan of the body.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    body: FetchPlan

    leaves = ()


Segment = Straight | LayerLoop | Remat


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FetchPlan:
    """A program cut into segments.

    Attributes:
      leaves: the program's leaves, whether or not a segment gathers them. In a loop's body they are
        slices of stacked leaves.
      inputs: all other inputs of the program.
      segments: the segments, in the order of the forward pass.
      outputs: the outputs of the program.
      active: the values with a gradient, trainable leaves among them.
      constants: the inputs that stay the same in every turn of a loop; empty outside a loop.
      recoverable: the inputs that the caller still has when it runs backward.
      units: the leaves of each unit, in order of first use.
    """

    leaves: tuple[Value, ...]
    inputs: tuple[Value, ...]
    segments: tuple[Segment, ...]
    outputs: tuple[Operand, ...]
    active: frozenset[Value]
    constants: frozenset[Value]
    recoverable: frozenset[Value]
    units: tuple[tuple[Value, ...], ...]

    @property
    def own_leaves(self) -> frozenset[Value]:
        """The leaves that segments of this plan gather, and no body of a loop or of a
        `jax.checkpoint` does."""
        inside: set[Value] = set()
        for seg in self.segments:
            if isinstance(seg, Remat):
                inside.update(seg.body.leaves)
            elif isinstance(seg, LayerLoop):
                inside.update(leaf for leaf, _ in seg.stacked.values())
        return frozenset(v for seg in self.segments for v in seg.leaves if v not in inside)


def layer_dims(plan: FetchPlan) -> dict[Value, set[int]]:
    """Return the dims along which the plan's loops slice each leaf; nested loops slice several."""
    dims: dict[Value, set[int]] = {}
    for seg in plan.segments:
        if isinstance(seg, Remat):
            for leaf, inner in layer_dims(seg.body).items():
                dims.setdefault(leaf, set()).update(inner)
        elif isinstance(seg, LayerLoop):
            inside = layer_dims(seg.body)
            for sliced, (leaf, dim) in zip(seg.body.leaves, seg.stacked.values(), strict=True):
                inner = {d + (d >= dim) for d in inside.get(sliced, ())}
                dims.setdefault(leaf, set()).update({dim}, inner)
    return dims
