"""The reduces of one backward pass, while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax

from zeroxla.fetch.cotangents import CotangentSums
from zeroxla.program.trace import Value
from zeroxla.wire.reduce import Reduces, StartedReduce
from zeroxla.wire.routes import Route


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class HeldUnit:
    """A unit whose gradients are quantized, and not yet exchanged. A loop can carry it.

    Attributes:
      leaves: its leaves.
      started: the reduce that was started.
    """

    leaves: tuple[Value, ...] = dataclasses.field(metadata={"static": True})
    started: StartedReduce


@dataclasses.dataclass(slots=True)
class Reductions:
    """Reduces the units of a pass, as their gradients are completed.

    Attributes:
      reduces: the reduces of the mesh.
      routes: the route of each leaf.
      holds: whether units that travel as wires stop before their first exchange, so that a loop can
        make their exchanges in its next turn, beside that turn's computation.
      shards: the gradient shards that are complete, float32, by leaf.
      held: the units that have stopped.
    """

    reduces: Reduces
    routes: Mapping[Value, Route]
    holds: bool = False
    shards: CotangentSums = dataclasses.field(default_factory=CotangentSums)
    held: list[HeldUnit] = dataclasses.field(default_factory=list)

    def reduce(
        self, leaves: Sequence[Value], gradients: Sequence[jax.Array], key: jax.Array | None
    ) -> list[jax.Array]:
        """Reduce the gradients of a unit.

        Args:
          leaves: its leaves.
          gradients: one for each, in its natural shape.
          key: the key of stochastic rounding; None if no format rounds stochastically.

        Returns:
          Arrays that exist when the whole gradients need not exist any more.
        """
        routes = [self.routes[v] for v in leaves]
        unit = HeldUnit(tuple(leaves), self.reduces.start(gradients, routes, key))
        if self.holds and unit.started.wires:
            self.held.append(unit)
            return unit.started.arrays
        return self.finish(unit)

    def finish(self, unit: HeldUnit) -> list[jax.Array]:
        """Make the exchanges of a unit; return its gradient shards."""
        results = self.reduces.finish(unit.started, [self.routes[v] for v in unit.leaves])
        self.add(dict(zip(unit.leaves, results, strict=True)))
        return results

    def add(self, shards: Mapping[Value, jax.Array]) -> None:
        """Add gradient shards that were reduced elsewhere."""
        for leaf, shard in shards.items():
            self.shards.add(leaf, shard)
