"""One device's part of a pipelined step: its rows of the batch -> its shards of the mean gradient.

Everything here runs inside `shard_map` over `pipe`, `node` and `device`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.frontend.staged import StagedGradients
from zeroxla.mesh.axes import LEAF_AXES, PIPE
from zeroxla.pipeline.partition import Partition
from zeroxla.pipeline.schedule import Schedule
from zeroxla.pipeline.stage import Stage, StageProgram
from zeroxla.pipeline.stage_ends import StagesEnds
from zeroxla.pipeline.stage_moves import Buffers, Moves, Piece, own_layers
from zeroxla.pipeline.stage_wire_state import StagesWireStatePlan
from zeroxla.pipeline.stage_work import Body, MicroBatch
from zeroxla.pipeline.ticks import Ticks
from zeroxla.program.trace import is_float
from zeroxla.step.means import finish
from zeroxla.step.metrics import check_metrics, means
from zeroxla.wire.collectives import Collectives
from zeroxla.wire.leaves import Layout, Leaf
from zeroxla.wire.resolve import Wiring
from zeroxla.wire.vectors import as_vector, from_vector
from zeroxla.wire.wire_state import WireState


class CutModel(Protocol):
    """What is asked of a `Pipeline`: its schedule and its stages."""

    def schedule(self, num_stages: int, microbatches: int, *, train: bool) -> Schedule: ...

    def cut(
        self, num_stages: int, tree: Any, batch: Any, key: jax.Array, *, train: bool
    ) -> tuple[list[Stage], Partition]: ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PipelineDifferentiator(StagedGradients):
    """Computes losses and gradients of a pipeline.

    Attributes:
      pipeline: the model.
      num_stages: length of the axis `pipe`.
      layout: the model's leaves, split over all devices.
      wiring: how leaves travel between the devices of a stage.
      unit_elements, limits: see `ZeroConfig`.
      microbatches: of a step.
      weights: "step": a stage's leaves are gathered once in a step; "tick": in every tick.
    """

    pipeline: CutModel
    num_stages: int
    layout: Layout
    wiring: Wiring
    unit_elements: int | None
    limits: FetchLimits
    microbatches: int
    weights: str

    @property
    def inside(self) -> Collectives:
        """Of the devices of a stage."""
        return self.wiring.collectives

    @property
    def across(self) -> Collectives:
        """Of all devices."""
        return dataclasses.replace(self.wiring.collectives, stages=self.num_stages)

    def gradients(
        self,
        params: Any,
        model_state: Any,
        batch: Any,
        key: jax.Array,
        scale: jax.Array,
        wire_state: WireState | None,
    ) -> tuple[list[jax.Array | None], dict[str, Any], Any, WireState | None]:
        """Return this device's gradient shards, the metrics, the model state and the wire state; as
        `Differentiator.gradients`."""
        check_stateless(model_state)
        rows, keys = self._micro_batches(batch, key, self.microbatches)
        stages, halves, wire_plan = self._stages(rows, keys, train=True)
        wire_key = self._wire_key(key)
        ends, begun, wire_state = StagesEnds.begin(
            stages, wire_plan, self.layout, jax.tree.leaves(params), wire_state, wire_key
        )
        body = Body.make(ends, begun, scale, halves)
        ticks = self._ticks(body, train=True, count=self.microbatches)

        def forward(x: Buffers, i: jax.Array, carry: Any) -> tuple[Buffers, Any]:
            return body.forward(MicroBatch(x, None, _row(rows, i), keys[i])), carry

        def backward(x: Buffers, g: Buffers, i: jax.Array, carry: Any) -> tuple[Buffers, Any]:
            return body.backward(MicroBatch(x, g, _row(rows, i), keys[i]), carry)

        def weight(x: Buffers, g: Buffers, i: jax.Array, carry: Any) -> Any:
            return body.weight(MicroBatch(x, g, _row(rows, i), keys[i]), carry)

        grads, sums = ticks.run(forward, backward, body.zeros(), weight if halves else None)
        shards, wire_state = ends.end(grads, wire_state, wire_key)
        grads, metrics = finish(shards, sums, scale, layout=self.layout, collectives=self.across)
        return grads, metrics, model_state, wire_state

    def evaluate(self, params: Any, model_state: Any, batch: Any, key: jax.Array) -> dict[str, Any]:
        """Return the metrics of the whole batch, without gradients."""
        check_stateless(model_state)
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        count = max(n for n in range(1, self.microbatches + 1) if num_rows % n == 0)
        rows, keys = self._micro_batches(batch, key, count)
        stages, _, wire_plan = self._stages(rows, keys, train=False)
        ends, begun, _ = StagesEnds.begin(
            stages, wire_plan, self.layout, jax.tree.leaves(params), None, self._wire_key(key)
        )
        body = Body.make(ends, begun, jnp.ones(()))
        ticks = self._ticks(body, train=False, count=count)

        def forward(x: Buffers, i: jax.Array, carry: Any) -> tuple[Buffers, Any]:
            return body.evaluate(MicroBatch(x, None, _row(rows, i), keys[i]), carry)

        sums = ticks.run(forward, None, body.zeros()[1])
        return means(from_vector(self.across.sum(as_vector(sums)), sums))

    def wire_state_plan(self, rows: Any, key: jax.Array) -> StagesWireStatePlan:
        """Return what wires remember, from shapes: of a device's micro-batch and its key."""
        return self._wire_state_plan(*self.cut(rows, key))

    def partition(self, rows: Any, key: jax.Array) -> Partition:
        """Return how the layers are cut into stages."""
        return self.cut(rows, key)[1]

    def stage_dims(
        self, model_state: Any, rows: Any, key: jax.Array, leaves: Sequence[Any]
    ) -> dict[int, int]:
        """Return which leaves are stored by stage, and the dim that the stages split."""
        check_stateless(model_state)
        return own_layers(self.cut(rows, key)[0], leaves)

    def cut(
        self, rows: Any, key: jax.Array, *, train: bool = True
    ) -> tuple[list[Stage], Partition]:
        """Cut the model into stages; `rows` and `key` are shapes of a device's micro-batch."""
        dtype = self.inside.compute_dtype
        tree = self.layout.tree.unflatten(
            [jax.ShapeDtypeStruct(leaf.placement.shape, dtype) for leaf in self.layout]
        )
        rows = jax.eval_shape(lambda rows: jax.tree.map(self._cast, rows), rows)
        return self.pipeline.cut(self.num_stages, tree, rows, key, train=train)

    def _ticks(self, body: Body, *, train: bool, count: int) -> Ticks:
        schedule = self.pipeline.schedule(self.num_stages, count, train=train)
        firmly = self.inside.firm_ties
        return Ticks.make(schedule, body.activations, body.cotangents, firmly=firmly)

    def _micro_batches(self, batch: Any, key: jax.Array, count: int) -> tuple[Any, jax.Array]:
        rows = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count))
        return rows, jax.vmap(lambda k: jax.random.fold_in(k, self.inside.rank()))(keys)

    def _wire_key(self, key: jax.Array) -> jax.Array | None:
        """Return this device's key of the roundings at a step's ends; None if there are none."""
        return self.wiring.key(jax.random.fold_in(key, lax.axis_index(PIPE)))

    def _stages(
        self, rows: Any, keys: jax.Array, *, train: bool
    ) -> tuple[list[StageProgram], list[tuple[StageProgram, StageProgram]], StagesWireStatePlan]:
        """Cut the model and trace its stages; of a schedule that splits backward, its halves."""
        first = jax.eval_shape(lambda rows: jax.tree.map(self._cast, _row(rows, 0)), rows)
        key = jax.eval_shape(lambda keys: keys[0], keys)
        cut, partition = self.cut(first, key, train=train)
        wire_plan = self._wire_state_plan(cut, partition)
        count = jax.tree.leaves(rows)[0].shape[0]
        splits = train and self.pipeline.schedule(self.num_stages, count, train=True).splits
        programs: list[StageProgram] = []
        halves: list[tuple[StageProgram, StageProgram]] = []
        x = None
        for stage, layout in zip(cut, wire_plan.layouts, strict=True):
            make = functools.partial(
                StageProgram.make,
                stage,
                layout,
                x,
                first,
                key,
                wiring=self.wiring,
                unit_elements=self.unit_elements,
                limits=self.limits,
            )
            if splits:
                halves.append((make(of_leaves=False)[0], make(of_inputs=False)[0]))
            program, x = make()
            programs.append(program)
        check_metrics_of(programs[-1])
        return programs, halves, wire_plan

    def _wire_state_plan(
        self, stages: Sequence[Stage], partition: Partition
    ) -> StagesWireStatePlan:
        layouts = []
        for stage in stages:
            leaves = [self._leaf(piece) for piece in stage.pieces]
            layouts.append(Layout(tree=jax.tree.structure(leaves), leaves=tuple(leaves)))
        moves = Moves.make(
            self.layout.placements,
            [stage.pieces for stage in stages],
            world=self.inside.world * self.num_stages,
            dtype=jnp.dtype("float32"),
        )
        return StagesWireStatePlan.make(layouts, moves, self.wiring, partition.boundaries)

    def _leaf(self, piece: Piece) -> Leaf:
        """Return a stage's leaf as the stage's devices store it."""
        leaf = self.layout.leaves[piece.leaf]
        placement = dataclasses.replace(
            leaf.placement,
            shape=piece.shape(leaf.placement.shape),
            axes=LEAF_AXES,
            stage_dim=None,
        )
        persistent = leaf.persistent or self.weights == "step"
        return dataclasses.replace(leaf, placement=placement, persistent=persistent)

    def _cast(self, x: jax.Array) -> jax.Array:
        return x.astype(self.inside.compute_dtype) if is_float(x.dtype) else x


def check_stateless(model_state: Any) -> None:
    """Check that a model keeps nothing between steps but its parameters.

    Raises:
      NotImplementedError: it does.
    """
    if found := jax.tree_util.tree_leaves_with_path(model_state):
        raise NotImplementedError(
            f"the model keeps a state between steps ({jax.tree_util.keystr(found[0][0])}), which "
            "pipelines do not carry yet; use layers without (LayerNorm for BatchNorm), or pipe=1"
        )


def check_metrics_of(program: StageProgram) -> None:
    """Check the names of a loss's metrics."""
    loss, metrics = program.tree.unflatten(range(program.tree.num_leaves))
    check_metrics(jax.tree.structure((loss, metrics, {})))


def _row(rows: Any, i: Any) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), rows)
