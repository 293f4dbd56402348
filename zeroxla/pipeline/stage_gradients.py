"""One device's part of a pipelined step: from its rows of the batch to its gradient shards.

Everything here runs inside `shard_map` over `pipe`, `node` and `device`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.frontend.staged import StagedDifferentiator
from zeroxla.mesh.axes import PIPE
from zeroxla.pipeline.cut_model import CutModel
from zeroxla.pipeline.leaf_piece import LeafPiece
from zeroxla.pipeline.micro_batches import MicroBatches
from zeroxla.pipeline.model_shapes import ModelShapes
from zeroxla.pipeline.partition import Partition, StageStorage
from zeroxla.pipeline.rank_leaves import RankLeaves
from zeroxla.pipeline.schedule import Schedule
from zeroxla.pipeline.stage import Stage
from zeroxla.pipeline.stage_calls import StageCalls
from zeroxla.pipeline.stage_ends import HeldLeaves, StageEnds
from zeroxla.pipeline.stage_moves import LeafMoves, stage_dims_of
from zeroxla.pipeline.stage_state import put_together
from zeroxla.pipeline.stage_wire_state import StagesWireStatePlan
from zeroxla.pipeline.stage_work import StageWork
from zeroxla.pipeline.stash import Stash, make_stash, ring_size
from zeroxla.pipeline.ticks import Ticks
from zeroxla.pipeline.traced_stages import TracedStages
from zeroxla.program.shapes import shapes_of
from zeroxla.step.agreed_state import agree
from zeroxla.step.loss_plan import cast_floats, leaf_shapes
from zeroxla.step.means import mean_metrics, means_over_devices
from zeroxla.step.micro_batches import num_evaluated
from zeroxla.wire.collectives import Collectives
from zeroxla.wire.leaves import Layout, Leaf
from zeroxla.wire.resolve import Wiring
from zeroxla.wire.wire_state import WireState


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PipelineDifferentiator(StagedDifferentiator):
    """Computes losses and gradients of a pipeline.

    Attributes:
      model: the model, and how it is cut and scheduled.
      num_ranks: the length of the axis `pipe`.
      layout: the model's leaves, split over all devices.
      wiring: how leaves travel between the devices of a stage.
      unit_elements: see `ZeroConfig`.
      limits: how far gathers run ahead, and which gathered leaves are kept.
      microbatches: the number of micro-batches of a step.
      weights: "step" gathers a stage's leaves once in a step, "tick" in every tick.
      losses: by `train`, the loss of the parts that `layout` describes, if axes split the work on
        one row, or the loss that is rewritten; None for the model's own loss.
    """

    model: CutModel
    num_ranks: int
    layout: Layout
    wiring: Wiring
    unit_elements: int | None
    limits: FetchLimits
    microbatches: int
    weights: str
    losses: Mapping[bool, Callable[..., Any]] | None = None

    @property
    def inside(self) -> Collectives:
        """The collectives among the devices of one rank."""
        return self.wiring.collectives

    @property
    def across(self) -> Collectives:
        """The collectives among the devices of all ranks."""
        return dataclasses.replace(self.wiring.collectives, stages=self.num_ranks)

    def gradients(
        self,
        params: Any,
        model_state: Any,
        batch: Any,
        key: jax.Array,
        scale: jax.Array,
        wire_state: WireState | None,
    ) -> tuple[list[jax.Array | None], dict[str, Any], Any, WireState | None]:
        """Return this device's gradient shards, the metrics, the model state and the wire state."""
        schedule = self.model.schedule_for(self.num_ranks, self.microbatches, train=True)
        stash = make_stash(schedule)
        micro_batches = self._micro_batches(batch, key, self.microbatches)
        keeps_tapes = self.model.stash == "activations"
        apart = keeps_tapes or schedule.splits
        stages = self._trace(micro_batches, model_state, train=True, apart=apart)
        wire_key = self._wire_key(key)
        ends, held, wire_state = self._begin(stages, params, wire_state, wire_key)
        state = jax.tree.leaves(model_state)
        calls = StageCalls.make(
            stages.programs,
            stages.without_ties,
            stages.arguments(ends, held, micro_batches, shapes_of(state), scale),
            "cpu" if self.inside.ties_by_data else None,
            tapes=keeps_tapes,
            splits=schedule.splits,
        )
        work = StageWork.make(stages.programs, calls, ends, held, micro_batches, scale)
        start = work.start(state, stash, num_states=ring_size(schedule))
        found = self._ticks(schedule, stash, work).run(work.training(), start)
        shards, wire_state = ends.end(found.gradients, wire_state, wire_key)
        grads, metrics = means_over_devices(
            shards, found.sums, scale, layout=self.layout, collectives=self.across
        )
        keeps = [program.keeps for program in stages.programs]
        agreed = [jax.tree.leaves(agree(state.leaves, (), self.inside)) for state in found.states]
        new_state = put_together(agreed, keeps, schedule.ranks)
        model_state = jax.tree.unflatten(jax.tree.structure(model_state), new_state)
        return grads, metrics, model_state, wire_state

    def evaluate(self, params: Any, model_state: Any, batch: Any, key: jax.Array) -> dict[str, Any]:
        """Return the metrics of the whole batch, without gradients.

        The batch is cut into as many micro-batches as divide it, at most `microbatches`.
        """
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        count = num_evaluated(num_rows, self.microbatches)
        schedule = self.model.schedule_for(self.num_ranks, count, train=False)
        micro_batches = self._micro_batches(batch, key, count)
        stages = self._trace(micro_batches, model_state, train=False)
        ends, held, _ = self._begin(stages, params, None, self._wire_key(key))
        calls = StageCalls(backwards=())
        work = StageWork.make(stages.programs, calls, ends, held, micro_batches, jnp.ones(()))
        ticks = self._ticks(schedule, make_stash(schedule), work)
        sums = ticks.run(work.evaluation(jax.tree.leaves(model_state)), work.no_sums())
        return mean_metrics(sums, self.across)

    def wire_state_plan(self, model_state: Any, rows: Any, key: jax.Array) -> StagesWireStatePlan:
        """Return the plan of the wire state, from shapes."""
        return self._wire_state_plan(*self._cut(model_state, rows, key))

    def stage_layouts(self, model_state: Any, rows: Any, key: jax.Array) -> Sequence[Layout]:
        """Return the layout of each rank's leaves, as its devices store and gather them."""
        return self.wire_state_plan(model_state, rows, key).layouts

    def describe(
        self, model_state: Any, rows: Any, key: jax.Array, at_rest: Sequence[str]
    ) -> Partition:
        """Return how the layers are cut into stages, and what these hold."""
        stages, partition = self._cut(model_state, rows, key)
        held = self._wire_state_plan(stages, partition).held
        storage = tuple(self._storage(held.layout_of(stage)) for stage in range(len(stages)))
        return dataclasses.replace(
            partition, storage=storage, at_rest=tuple(at_rest), ranks=held.ranks
        )

    def _storage(self, layout: Layout) -> StageStorage:
        """Return what a device of a stage with these leaves holds in a step."""
        total = 0
        for leaf in layout:
            itemsize = self.inside.compute_dtype.itemsize
            elements = leaf.elements
            if leaf.fetched:
                world = self.inside.num_holders(leaf.placement.axes)
                itemsize, elements = 4, math.prod(leaf.placement.part_shape(world))
            total += elements * (1 if leaf.is_wire else itemsize)
        gradients = sum(map(self.wiring.gradient_bytes, layout))
        return StageStorage(leaf_bytes=total, gradient_bytes=gradients)

    def stage_dims(
        self, model_state: Any, rows: Any, key: jax.Array, leaves: Sequence[Any]
    ) -> dict[int, int]:
        """Return which leaves are stored by stage, and the dim that the stages split. Where a rank
        has several stages, their layers are not consecutive, and none is."""
        if self.model.ranks(self.num_ranks) != tuple(range(self.num_ranks)):
            return {}
        return stage_dims_of(self._cut(model_state, rows, key)[0], leaves)

    def _cut(
        self, model_state: Any, rows: Any, key: jax.Array, *, train: bool = True
    ) -> tuple[list[Stage], Partition]:
        """Cut the model into stages, for the shapes of one device's micro-batch and its key."""
        leaves = leaf_shapes(self.layout, self.inside.compute_dtype)
        shapes = ModelShapes(
            params=self.layout.tree.unflatten(leaves),
            model_state=model_state,
            batch=jax.eval_shape(self._cast, rows),
            key=key,
            kinds=tuple(dataclasses.replace(leaf, path="") for leaf in self.layout),
            losses=self.losses,
        )
        return self.model.cut(self.num_ranks, shapes, train=train)

    def _micro_batches(self, batch: Any, key: jax.Array, count: int) -> MicroBatches:
        return MicroBatches.of(self._cast(batch), key, count, self.inside)

    def _begin(
        self,
        stages: TracedStages,
        params: Any,
        wire_state: WireState | None,
        wire_key: jax.Array | None,
    ) -> tuple[StageEnds, HeldLeaves, WireState | None]:
        """Move the leaves to their stages; see `StageEnds.begin`."""
        stored = jax.tree.leaves(params)
        return StageEnds.begin(stages.wire_plan, self.layout, stored, wire_state, wire_key)

    def _ticks(self, schedule: Schedule, stash: Stash, work: StageWork) -> Ticks:
        return Ticks.make(
            schedule,
            stash,
            work.activations,
            work.cotangents,
            tapes=bool(work.calls.forwards),
            by_data=self.inside.ties_by_data,
        )

    def _wire_key(self, key: jax.Array) -> jax.Array | None:
        """Return this device's key for roundings at a step's ends; None if nothing rounds so."""
        return self.wiring.key(jax.random.fold_in(key, lax.axis_index(PIPE)))

    def _trace(
        self, micro_batches: MicroBatches, model_state: Any, *, train: bool, apart: bool = False
    ) -> TracedStages:
        """Cut the model and trace its stages; see `TracedStages.make`."""
        rows, key = micro_batches.shapes()
        model_state = shapes_of(model_state)
        cut, partition = self._cut(model_state, rows, key, train=train)
        wire_plan = self._wire_state_plan(cut, partition)
        return TracedStages.make(
            cut,
            wire_plan,
            (rows, key, model_state),
            wiring=self.wiring,
            unit_elements=self.unit_elements,
            limits=self.limits,
            apart=apart,
        )

    def _wire_state_plan(
        self, stages: Sequence[Stage], partition: Partition
    ) -> StagesWireStatePlan:
        ranks = self.model.ranks(self.num_ranks)
        held = RankLeaves.make(ranks, [stage.pieces for stage in stages], self._leaf)
        worlds = [self.across.num_holders(leaf.placement.axes) for leaf in self.layout]
        moves = LeafMoves.make(self.layout.leaves, held.pieces, worlds=worlds)
        return StagesWireStatePlan.make(held, moves, self.wiring, partition.boundaries)

    def _leaf(self, piece: LeafPiece) -> Leaf:
        """Return a piece of a leaf as a leaf of its stage, stored by the stage's devices."""
        leaf = self.layout.leaves[piece.leaves[0]]
        axes = tuple(axis for axis in leaf.placement.axes if axis != PIPE)
        placement = piece.placement(leaf.placement, axes=axes, stage_dim=None)
        persistent = leaf.persistent or self.weights == "step"
        return dataclasses.replace(leaf, placement=placement, persistent=persistent)

    def _cast(self, batch: Any) -> Any:
        """Return a batch with its floating arrays in the compute dtype."""
        return cast_floats(batch, self.inside.compute_dtype)
