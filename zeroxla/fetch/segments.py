"""What a fetch plan is made of.

A plan cuts a program into segments. Every segment names the leaves that are gathered when it starts
and dropped when it ends; what flows between segments are activations only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from zeroxla.program.scan import Scan
from zeroxla.program.trace import Atom, Equation, Value


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Straight:
    """A run of equations, with everything parameter-only that it reads."""

    leaves: tuple[Value, ...]
    equations: tuple[Equation, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerLoop:
    """A `scan` whose `xs` hold stacked leaves.

    Attributes:
      scan: the scan.
      leaves: gathered whole before the loop, as its constants or first carry follow from them.
      known: the equations that make those operands.
      inputs: activations and constants that the operands are, or follow from.
      stacked: the leaf at each position of `xs` that holds one, with its layer dim.
      body: inputs are the constants, carries and the other `xs`, in the scan's order.
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
    """A `jax.checkpoint` body that holds several units: saved are its inputs alone."""

    equation: Equation
    inputs: tuple[Value, ...]
    body: FetchPlan

    leaves = ()

    @property
    def outputs(self) -> tuple[Value, ...]:
        return self.equation.outputs


Segment = Straight | LayerLoop | Remat


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FetchPlan:
    """Segments in order.

    Attributes:
      leaves: every leaf of the program, gathered or not, stacked ones by slice.
      inputs: all other inputs of the program.
      segments: in the order of the forward pass.
      outputs: of the program.
      active: the values with a gradient, trainable leaves among them.
      constants: the inputs that stay the same in every turn of a loop; () outside of one.
      recoverable: the inputs that the caller still has when it runs backward.
      units: the leaves of each unit, in order of first use.
    """

    leaves: tuple[Value, ...]
    inputs: tuple[Value, ...]
    segments: tuple[Segment, ...]
    outputs: tuple[Atom, ...]
    active: frozenset[Value]
    constants: frozenset[Value]
    recoverable: frozenset[Value]
    units: tuple[tuple[Value, ...], ...]


def layer_dims(plan: FetchPlan) -> dict[Value, set[int]]:
    """Return the dims along which the plan's loops slice each leaf."""
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
