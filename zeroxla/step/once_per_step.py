"""`OncePerStep`: gathers before a step's first micro-batch, and reduces after its last one.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.offload.memory_kinds import to_device
from zeroxla.program.random_keys import StepRounding, fold_in, number_of
from zeroxla.wire.collectives import Collectives
from zeroxla.wire.leaves import Layout, Leaf
from zeroxla.wire.resolve import Wiring
from zeroxla.wire.routes import LeafSource, Route
from zeroxla.wire.vectors import as_vector, from_vector
from zeroxla.wire.wire_state import WholeWireStatePlan, WireState

Gradients = list[jax.Array | None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OncePerStep:
    """The gathers and reduces that a step makes once, and not in every micro-batch.

    Attributes:
      layout: the model's leaves.
      wiring: how the leaves travel.
    """

    layout: Layout
    wiring: Wiring

    @property
    def collectives(self) -> Collectives:
        """The collectives of the mesh."""
        return self.wiring.collectives

    @property
    def _wire_plan(self) -> WholeWireStatePlan:
        return WholeWireStatePlan(layout=self.layout, wiring=self.wiring)

    def begin(
        self,
        stored: Sequence[jax.Array],
        wire_state: WireState | None,
        key: jax.Array | None,
        later: Collection[int] = (),
    ) -> tuple[tuple[list[jax.Array], list[LeafSource]], WireState | None]:
        """Make the gathers before the first micro-batch.

        Args:
          stored: the stored piece of every leaf on this device.
          wire_state: the wire state, which may hold kept copies; None if nothing is remembered.
          key: the key of stochastic rounding; None if no format rounds stochastically.
          later: numbers of fetched leaves whose outer hops are left to the only micro-batch.

        Returns:
          The leaves that are whole through the step, and the sources of the fetched leaves in every
          micro-batch. These are shards, or secondary shards that are made here. Then the wire state
          with new copies, those of `later` excepted.
        """
        keys = [self._key(key, StepRounding.GATHER, i) for i in range(len(stored))]
        fetched = self.layout.indices(fetched=True)
        copies = {}
        if wire_state is not None:
            copies = {i: wire_state.copies[i] for i in self._wire_plan.copied}
        once = {*copies, *(fetched if self.wiring.gathers_once else ())}
        held = {
            i: dataclasses.replace(
                LeafSource.stored(stored[i]),
                copy=copies.get(i),
                key=keys[i] if i in once else None,
            )
            for i, leaf in enumerate(self.layout)
            if leaf.is_split
        }
        now = sorted(once.difference(later))
        found = self.collectives.gathers.secondary(
            [held[i] for i in now],
            self._routes(now),
            [self._key(key, StepRounding.COPY, i) for i in now],
        )
        for i, source in zip(now, found, strict=True):
            held[i] = dataclasses.replace(source, copy=None)
            if wire_state is not None and source.copy is not None:
                wire_state = wire_state.with_copies({i: source.copy})
        resident = self._resident(stored, held, keys)
        return (resident, [held[i] for i in fetched]), wire_state

    def resident(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the leaves that are whole through the step. None of them is quantized."""
        return self._resident(
            stored, dict(enumerate(map(LeafSource.stored, stored))), [None] * len(stored)
        )

    def _resident(
        self,
        stored: Sequence[jax.Array],
        held: Mapping[int, LeafSource],
        keys: Sequence[jax.Array | None],
    ) -> list[jax.Array]:
        """Gather the split ones among the leaves that are whole through the step; return all."""
        persistent = [i for i, leaf in enumerate(self.layout) if _is_persistent(leaf)]
        found = self.collectives.gathers.gather(
            [held[i] for i in persistent],
            self._routes(persistent),
            [keys[i] for i in persistent],
        )
        # Leaves are cut from their buffer here, and not inside each kernel that reads one. Equal
        # layers then share their kernels.
        found = lax.optimization_barrier(found)
        whole = dict(zip(persistent, found, strict=True))
        for i, leaf in enumerate(self.layout):
            if not leaf.is_split:
                dtype = stored[i].dtype if leaf.is_wire else self.collectives.compute_dtype
                whole[i] = to_device(stored[i]).astype(dtype)
        return [whole[i] for i in self.layout.indices(fetched=False)]

    def zeros(self, resident: Sequence[jax.Array]) -> tuple[Gradients, Gradients]:
        """Return zeros like one micro-batch's gradients of fetched and of resident leaves."""
        fetched, whole = self.layout.indices(fetched=True), self.layout.indices(fetched=False)
        shapes = [
            self.collectives.reduces.result_shape(self.layout.leaves[i].placement) for i in fetched
        ]
        return self._zeros(fetched, shapes), self._zeros(whole, [x.shape for x in resident])

    def _zeros(self, indices: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> Gradients:
        return [
            None if self.layout.leaves[i].frozen else jnp.zeros(shape, jnp.float32)
            for i, shape in zip(indices, shapes, strict=True)
        ]

    def reduce(
        self,
        gradients: tuple[Gradients, Gradients],
        wire_state: WireState | None,
        key: jax.Array | None,
    ) -> tuple[Gradients, WireState | None]:
        """Finish the reduce of a step's summed gradients.

        Args:
          gradients: the fetched leaves' gradients, as the micro-batches reduced them, and the
            resident leaves' gradients, not reduced.
          wire_state: the wire state, which may hold the errors of the last step.
          key: the key of stochastic rounding; None if no format rounds stochastically.

        Returns:
          The gradient shards of all leaves, in order, and the wire state with new errors.
        """
        found: dict[int, Any] = {}
        for fetched, mine in zip((True, False), gradients, strict=True):
            found.update(zip(self.layout.indices(fetched=fetched), mine, strict=True))
        trained = [i for i, leaf in enumerate(self.layout) if not leaf.frozen]
        split = [i for i in trained if _is_persistent(self.layout.leaves[i])]
        reduces = self.collectives.reduces
        mine = self._key(key, StepRounding.REDUCE)
        pieces = reduces.reduce([found[i] for i in split], self._routes(split), mine)
        found.update(zip(split, pieces, strict=True))
        placed = [(i, self.layout.leaves[i].placement) for i in trained]
        tiny = [(i, p.axes) for i, p in placed if p.dim is None]
        for axes in dict.fromkeys(axes for _, axes in tiny):
            mine = {i: found[i] for i, own in tiny if own == axes}
            found.update(from_vector(self.collectives.sum(as_vector(mine), axes), mine))
        if reduces.stops_at_node:
            wire_state = self._over_nodes(found, wire_state, key)
        return [found[i] for i in range(len(self.layout.leaves))], wire_state

    def _over_nodes(
        self, found: dict[int, Any], wire_state: WireState | None, key: jax.Array | None
    ) -> WireState | None:
        """Make the hop over `node` that the micro-batches left out."""
        reduces, feedback = self.collectives.reduces, self.wiring.feedback
        corrected = self._wire_plan.corrected
        rest = [
            i
            for i, leaf in enumerate(self.layout)
            if leaf.is_split and not leaf.frozen and i not in corrected
        ]
        mine = self._key(key, StepRounding.NODE_HOP)
        shards = reduces.over_nodes([found[i] for i in rest], self._routes(rest), mine)
        found.update(zip(rest, shards, strict=True))
        if feedback is None or wire_state is None:
            return wire_state
        errors = list(wire_state.errors)
        for i, route in zip(corrected, self._routes(corrected), strict=True):
            mine = self._key(key, StepRounding.CORRECTED_NODE_HOP, i)
            found[i], error = reduces.over_nodes_with_feedback(
                found[i], route, errors[i][0, 0], feedback, mine
            )
            errors[i] = error[None, None]
        return dataclasses.replace(wire_state, errors=errors)

    def _routes(self, indices: Sequence[int]) -> list[Route]:
        return [self.wiring.route(self.layout.leaves[i]) for i in indices]

    def _key(self, key: jax.Array | None, purpose: StepRounding, i: int = 0) -> jax.Array | None:
        return fold_in(key, number_of(purpose, i, len(self.layout.leaves)))


def _is_persistent(leaf: Leaf) -> bool:
    return leaf.persistent and leaf.is_split
