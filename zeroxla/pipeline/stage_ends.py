"""The two ends of a pipelined step: leaves move to the stages first, gradients move back last.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.mesh.axes import PIPE
from zeroxla.pipeline.rank_leaves import RankLeaves
from zeroxla.pipeline.stage import gradient_shapes
from zeroxla.pipeline.stage_buffers import Packing, make_packing
from zeroxla.pipeline.stage_moves import Buffers, LeafMoves, each_rank
from zeroxla.pipeline.stage_wire_state import StagesWireStatePlan
from zeroxla.step.once_per_step import Gradients, OncePerStep
from zeroxla.wire.leaves import Layout
from zeroxla.wire.routes import Form, LeafSource
from zeroxla.wire.vectors import as_vector, from_vector
from zeroxla.wire.wire_state import WireState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldLeaves:
    """The arrays that a device holds of its stages' leaves through a step, packed.

    Attributes:
      resident: the leaves that are whole.
      sources: the arrays that the other leaves are gathered from.
    """

    resident: Buffers
    sources: Buffers


class _Reduced(NamedTuple):
    """The gradients of one rank, reduced over its devices.

    Attributes:
      moved: shards of the pieces that move back, packed.
      stored_by_stage: shards of the trained leaves that are stored by stage.
      whole: gradients of the trained leaves that every device stores whole, zeros for other ranks'
        leaves. They must still be summed over the ranks.
      wire_state: the wire state with new errors, packed.
    """

    moved: Buffers
    stored_by_stage: list[jax.Array]
    whole: list[jax.Array]
    wire_state: WireState | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageEnds:
    """Does the work that the ranks do once in a step.

    Attributes:
      wire_plan: packs the wire state.
      layout: the model's leaves, split over all devices.
      resident, sources, gradients: pack the whole leaves, the sources, and the gradients of a rank.
      forms: for each rank, the form of each of its sources.
    """

    wire_plan: StagesWireStatePlan
    layout: Layout
    resident: Packing
    sources: Packing
    gradients: Packing
    forms: Sequence[Sequence[Form]]

    @staticmethod
    def begin(
        wire_plan: StagesWireStatePlan,
        layout: Layout,
        stored: Sequence[jax.Array],
        wire_state: WireState | None,
        key: jax.Array | None,
    ) -> tuple[StageEnds, HeldLeaves, WireState | None]:
        """Move the leaves to their stages, and gather those that are gathered once in a step.

        Args:
          wire_plan, layout: as the attributes.
          stored: this device's shards of the model's leaves.
          wire_state: this device's wire state; None makes no copies.
          key: the key of stochastic rounding; None if no format rounds so.

        Returns:
          The `StageEnds`, the leaves that this device now holds, and the wire state with new
          copies.
        """
        moves = wire_plan.moves
        received = moves.to_stages(stored)

        layouts, wiring = wire_plan.layouts, wire_plan.wiring

        def start(rank: int) -> tuple[list[jax.Array], list[LeafSource], WireState | None]:
            mine = moves.leaves(rank, received, stored)
            known = None if wire_state is None else wire_plan.unpack(rank, wire_state)
            once = OncePerStep(layout=layouts[rank], wiring=wiring)
            (resident, sources), new = once.begin(mine, known, key)
            return resident, sources, None if new is None else wire_plan.pack(rank, new)

        shapes = [jax.eval_shape(lambda r=r: start(r)) for r in range(len(layouts))]
        ends = StageEnds(
            wire_plan=wire_plan,
            layout=layout,
            resident=make_packing([resident for resident, _, _ in shapes]),
            sources=make_packing([[x.array for x in sources] for _, sources, _ in shapes]),
            gradients=make_packing([gradient_shapes(mine, wiring) for mine in layouts]),
            forms=[[x.form for x in sources] for _, sources, _ in shapes],
        )

        def packed(rank: int) -> tuple[HeldLeaves, WireState | None]:
            resident, sources, new = start(rank)
            held = HeldLeaves(
                resident=ends.resident.pack(rank, resident),
                sources=ends.sources.pack(rank, [x.array for x in sources]),
            )
            return held, new

        return ends, *each_rank(len(layouts), packed)

    @property
    def moves(self) -> LeafMoves:
        """Moves leaves to the stages, and gradients back."""
        return self.wire_plan.moves

    @property
    def rank_leaves(self) -> RankLeaves:
        """The leaves of each rank."""
        return self.wire_plan.held

    def unpack(self, stage: int, held: HeldLeaves) -> tuple[list[LeafSource], list[jax.Array]]:
        """Return the sources and the whole leaves of a stage."""
        of_rank, rank = self.rank_leaves, self.rank_leaves.ranks[stage]
        arrays, forms = self.sources.unpack(rank, held.sources), self.forms[rank]
        whole = self.resident.unpack(rank, held.resident)
        sources = [LeafSource(arrays[i], forms[i]) for i in of_rank.positions(stage, fetched=True)]
        return sources, [whole[i] for i in of_rank.positions(stage, fetched=False)]

    def add(self, stage: int, sums: Buffers, gradients: Sequence[jax.Array]) -> Buffers:
        """Add the gradients of a stage's leaves to the sums of its rank, packed."""
        mine = dict(zip(self.rank_leaves.trained(stage), gradients, strict=True))
        return self.gradients.add(self.rank_leaves.ranks[stage], sums, mine)

    def end(
        self, sums: Buffers, wire_state: WireState | None, key: jax.Array | None
    ) -> tuple[Gradients, WireState | None]:
        """Reduce the gradients that the ranks have summed, and move them back.

        Args:
          sums: the summed gradients of this device's rank, packed.
          wire_state: this device's wire state, with the errors of the last step.
          key: the key of stochastic rounding; None if no format rounds so.

        Returns:
          This device's shards of the gradients of all leaves, None for frozen leaves; and the wire
          state with new errors.
        """
        reduced = each_rank(len(self.forms), lambda rank: self._reduce(rank, sums, wire_state, key))
        leaves = self.moves.from_stages(reduced.moved)
        whole = reduced.whole
        whole = from_vector(lax.psum(as_vector(whole), PIPE), whole) if whole else []
        own = zip(self._stored_by_stage, reduced.stored_by_stage, strict=True)
        for i, x in (*own, *zip(self._whole, whole, strict=True)):
            leaves[i] = x
        for i, leaf in enumerate(self.layout):
            if leaf.frozen:
                leaves[i] = None
            elif leaves[i] is None:  # no stage uses it
                leaves[i] = jnp.zeros(leaf.placement.part_shape(self.moves.worlds[i]))
        return leaves, reduced.wire_state

    def _reduce(
        self, rank: int, sums: Buffers, wire_state: WireState | None, key: jax.Array | None
    ) -> _Reduced:
        """Reduce a rank's gradients over its devices, and sort them by the way that they go on."""
        once = OncePerStep(layout=self.wire_plan.layouts[rank], wiring=self.wire_plan.wiring)
        known = None if wire_state is None else self.wire_plan.unpack(rank, wire_state)
        shards, new = once.reduce(self._by_form(rank, sums), known, key)
        moved: list[jax.Array] = []
        stored_by_stage: dict[int, jax.Array] = {}
        whole = {i: jnp.zeros(self.layout.leaves[i].placement.shape) for i in self._whole}
        for piece, leaf, shard in zip(self.moves.pieces[rank], once.layout, shards):
            if leaf.frozen:
                continue
            assert shard is not None, "a trained leaf has a gradient"
            first = piece.leaves[0]
            if not leaf.is_split:
                piece.add_to(whole, shard)
            elif self.layout.leaves[first].placement.stage_dim is None:
                moved.append(shard)
            else:
                stored_by_stage[first] = shard
        new = None if new is None else self.wire_plan.pack(rank, new)
        return _Reduced(
            moved=self.moves.packed(rank, moved),
            stored_by_stage=[stored_by_stage[i] for i in self._stored_by_stage],
            whole=[whole[i] for i in self._whole],
            wire_state=new,
        )

    @property
    def _stored_by_stage(self) -> list[int]:
        """The trained leaves that are stored by stage."""
        leaves = enumerate(self.layout)
        return [i for i, x in leaves if not x.frozen and x.placement.stage_dim is not None]

    @property
    def _whole(self) -> list[int]:
        """The trained leaves that every device stores whole."""
        return [i for i, leaf in enumerate(self.layout) if not leaf.frozen and not leaf.is_split]

    def _by_form(self, rank: int, sums: Buffers) -> tuple[Gradients, Gradients]:
        """Unpack a rank's summed gradients, of fetched and of resident leaves; None if frozen."""
        layout = self.wire_plan.layouts[rank]
        found = iter(self.gradients.unpack(rank, sums))
        fetched, resident = (
            [None if layout.leaves[i].frozen else next(found) for i in layout.indices(fetched=form)]
            for form in (True, False)
        )
        return fetched, resident
