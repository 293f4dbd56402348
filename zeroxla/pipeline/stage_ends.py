"""The two ends of a pipelined step: leaves come to their stages before the first tick, gradients go
back after the last.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.mesh.axes import PIPE
from zeroxla.pipeline.stage import StageProgram
from zeroxla.pipeline.stage_buffers import Packing, make_packing
from zeroxla.pipeline.stage_moves import Buffers, Moves, each_stage
from zeroxla.pipeline.stage_wire_state import StagesWireStatePlan
from zeroxla.step.once_per_step import Gradients
from zeroxla.wire.leaves import Layout
from zeroxla.wire.routes import Form, LeafSource
from zeroxla.wire.vectors import as_vector, from_vector
from zeroxla.wire.wire_state import WireState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Begun:
    """What a stage holds of its leaves through a step: packed.

    Attributes:
      resident: leaves that are whole.
      sources: what the others are gathered from.
    """

    resident: Buffers
    sources: Buffers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StagesEnds:
    """What the stages of a pipeline do once in a step.

    Attributes:
      programs: of the stages.
      wire_plan: what wires remember.
      layout: of the model.
      resident, sources, gradients: how these are packed, by stage.
      forms: of the sources, by stage.
    """

    programs: Sequence[StageProgram]
    wire_plan: StagesWireStatePlan
    layout: Layout
    resident: Packing
    sources: Packing
    gradients: Packing
    forms: Sequence[Sequence[Form]]

    @staticmethod
    def begin(
        programs: Sequence[StageProgram],
        wire_plan: StagesWireStatePlan,
        layout: Layout,
        stored: Sequence[jax.Array],
        wire_state: WireState | None,
        key: jax.Array | None,
    ) -> tuple[StagesEnds, Begun, WireState | None]:
        """Bring the leaves to their stages.

        Args:
          programs, wire_plan, layout: as the attributes.
          stored: what this device stores of the model's leaves.
          wire_state: what its wires remember; None where no copies are wanted.
          key: where a format rounds stochastically.

        Returns:
          The ends, what this device's stage holds, and the wire state with new copies.
        """
        moves = wire_plan.moves
        received = moves.to_stages(stored)

        def start(stage: int) -> tuple[list[jax.Array], list[LeafSource], WireState | None]:
            mine = moves.leaves(stage, received, stored)
            known = None if wire_state is None else wire_plan.unpack(stage, wire_state)
            (resident, sources), new = programs[stage].ends.begin(mine, known, key)
            return resident, sources, None if new is None else wire_plan.pack(stage, new)

        shapes = [jax.eval_shape(lambda s=s: start(s)) for s in range(len(programs))]
        ends = StagesEnds(
            programs=programs,
            wire_plan=wire_plan,
            layout=layout,
            resident=make_packing([resident for resident, _, _ in shapes]),
            sources=make_packing([[x.array for x in sources] for _, sources, _ in shapes]),
            gradients=make_packing([program.gradient_shapes for program in programs]),
            forms=[[x.form for x in sources] for _, sources, _ in shapes],
        )

        def packed(stage: int) -> tuple[Begun, WireState | None]:
            resident, sources, new = start(stage)
            begun = Begun(
                resident=ends.resident.pack(stage, resident),
                sources=ends.sources.pack(stage, [x.array for x in sources]),
            )
            return begun, new

        return ends, *each_stage(len(programs), packed)

    @property
    def moves(self) -> Moves:
        return self.wire_plan.moves

    def held(self, stage: int, begun: Begun) -> tuple[list[LeafSource], list[jax.Array]]:
        """Return what a stage holds: what leaves are gathered from, and whole ones."""
        arrays = self.sources.unpack(stage, begun.sources)
        sources = [LeafSource(x, form) for x, form in zip(arrays, self.forms[stage], strict=True)]
        return sources, self.resident.unpack(stage, begun.resident)

    def end(
        self, sums: Buffers, wire_state: WireState | None, key: jax.Array | None
    ) -> tuple[Gradients, WireState | None]:
        """Reduce what the stages have summed, and send it back.

        Args:
          sums: of the gradients of this device's stage, packed.
          wire_state: with the errors of the last step, where they are kept.
          key: where a format rounds stochastically.

        Returns:
          This device's shards of the gradients of all leaves, None of frozen ones, and the wire
          state with new errors.
        """
        trained = [i for i, leaf in enumerate(self.layout) if not leaf.frozen]
        tiny = [i for i in trained if not self.layout.leaves[i].is_split]
        own = [i for i in trained if self.layout.leaves[i].placement.stage_dim is not None]

        def run(
            stage: int,
        ) -> tuple[Buffers, list[jax.Array], list[jax.Array], WireState | None]:
            ends = self.programs[stage].ends
            known = None if wire_state is None else self.wire_plan.unpack(stage, wire_state)
            shards, new = ends.reduce(self._by_form(stage, sums), known, key)
            travel: list[jax.Array] = []
            stay: dict[int, jax.Array] = {}
            whole = {i: jnp.zeros(self.layout.leaves[i].placement.shape) for i in tiny}
            for piece, leaf, shard in zip(self.moves.pieces[stage], ends.layout, shards):
                if not leaf.is_split:
                    if shard is not None:
                        whole[piece.leaf] = piece.add_to(whole[piece.leaf], shard)
                    continue
                shape = leaf.placement.part_shape(ends.collectives.world)
                found = jnp.zeros(shape) if shard is None else shard
                if self.layout.leaves[piece.leaf].placement.stage_dim is None:
                    travel.append(found)
                else:
                    stay[piece.leaf] = found
            new = None if new is None else self.wire_plan.pack(stage, new)
            buffers = self.moves.packed(stage, travel)
            return buffers, [stay[i] for i in own], [whole[i] for i in tiny], new

        buffers, stayed, whole, wire_state = each_stage(len(self.programs), run)
        leaves = self.moves.from_stages(buffers)
        for i, x in zip(own, stayed, strict=True):
            leaves[i] = x
        summed = from_vector(lax.psum(as_vector(whole), PIPE), whole) if whole else []
        for i, x in zip(tiny, summed, strict=True):
            leaves[i] = x
        for i, leaf in enumerate(self.layout):
            if leaf.frozen:
                leaves[i] = None
            elif leaves[i] is None:  # no stage uses it
                leaves[i] = jnp.zeros(leaf.placement.part_shape(self.moves.world))
        return leaves, wire_state

    def _by_form(self, stage: int, sums: Buffers) -> tuple[Gradients, Gradients]:
        """Return a stage's sums: of fetched leaves and of resident ones, None of frozen ones."""
        layout = self.programs[stage].layout
        found = iter(self.gradients.unpack(stage, sums))
        fetched, resident = (
            [None if layout.leaves[i].frozen else next(found) for i in layout.indices(fetched=form)]
            for form in (True, False)
        )
        return fetched, resident
