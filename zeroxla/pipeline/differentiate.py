"""One device's part of a pipelined step: its rows of the batch -> its shards of the mean gradient.

Everything here runs inside `shard_map` over `pipe`, `node` and `device`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.collectives import Collectives
from zeroxla.finish import finish
from zeroxla.layout import Layout, Leaf
from zeroxla.metrics import check_metrics, means
from zeroxla.pipeline.body import Body
from zeroxla.pipeline.moves import Buffers, Moves, Piece
from zeroxla.pipeline.pipeline import Pipeline
from zeroxla.pipeline.stage import StageProgram
from zeroxla.pipeline.ticks import Ticks
from zeroxla.reuse import Limits
from zeroxla.trace import is_float
from zeroxla.vectors import as_vector, from_vector
from zeroxla.wire_state import WireState
from zeroxla.wiring import Wiring


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PipelineDifferentiator:
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

    pipeline: Pipeline
    num_stages: int
    layout: Layout
    wiring: Wiring
    unit_elements: int | None
    limits: Limits
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
        _check_stateless(model_state)
        stored = jax.tree.leaves(params)
        rows, keys = self._micro_batches(batch, key, self.microbatches)
        stages, halves = self._stages(rows, keys, train=True)
        body, begun = Body.make(stages, halves, self._moves(stages), self.layout, stored)
        ticks = self._ticks(body, train=True, count=self.microbatches)

        def forward(x: Buffers, i: jax.Array, carry: Any) -> tuple[Buffers, Any]:
            return body.forward(begun, x, _row(rows, i), keys[i]), carry

        def backward(x: Buffers, g: Buffers, i: jax.Array, carry: Any) -> tuple[Buffers, Any]:
            return body.backward(begun, x, g, _row(rows, i), keys[i], scale, carry)

        def weight(x: Buffers, g: Buffers, i: jax.Array, carry: Any) -> Any:
            return body.weight(begun, x, g, _row(rows, i), keys[i], scale, carry)

        zeros = (body.zero_gradients(), body.zero_sums())
        grads, sums = ticks.run(forward, backward, zeros, weight if halves else None)
        shards = body.end(grads)
        grads, metrics = finish(shards, sums, scale, layout=self.layout, collectives=self.across)
        return grads, metrics, model_state, wire_state

    def evaluate(self, params: Any, model_state: Any, batch: Any, key: jax.Array) -> dict[str, Any]:
        """Return the metrics of the whole batch, without gradients."""
        _check_stateless(model_state)
        stored = jax.tree.leaves(params)
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        count = max(n for n in range(1, self.microbatches + 1) if num_rows % n == 0)
        rows, keys = self._micro_batches(batch, key, count)
        stages, _ = self._stages(rows, keys, train=False)
        body, begun = Body.make(stages, (), self._moves(stages), self.layout, stored)
        ticks = self._ticks(body, train=False, count=count)

        def forward(x: Buffers, i: jax.Array, carry: Any) -> tuple[Buffers, Any]:
            return body.evaluate(begun, x, _row(rows, i), keys[i], carry)

        sums = ticks.run(forward, None, body.zero_sums())
        return means(from_vector(self.across.sum(as_vector(sums)), sums))

    def _ticks(self, body: Body, *, train: bool, count: int) -> Ticks:
        schedule = self.pipeline.schedule(self.num_stages, count, train=train)
        firmly = self.inside.firm_ties
        return Ticks.make(schedule, body.activations, body.cotangents, firmly=firmly)

    def _micro_batches(self, batch: Any, key: jax.Array, count: int) -> tuple[Any, jax.Array]:
        rows = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count))
        return rows, jax.vmap(lambda k: jax.random.fold_in(k, self.inside.rank()))(keys)

    def _stages(
        self, rows: Any, keys: jax.Array, *, train: bool
    ) -> tuple[list[StageProgram], list[tuple[StageProgram, StageProgram]]]:
        """Cut the model and trace its stages; of a schedule that splits backward, its halves."""
        dtype = self.inside.compute_dtype
        tree = self.layout.tree.unflatten(
            [jax.ShapeDtypeStruct(leaf.placement.shape, dtype) for leaf in self.layout]
        )
        first = jax.eval_shape(lambda rows: jax.tree.map(self._cast, _row(rows, 0)), rows)
        key = jax.eval_shape(lambda keys: keys[0], keys)
        cut, _ = self.pipeline.cut(self.num_stages, tree, first, key, train=train)
        count = jax.tree.leaves(rows)[0].shape[0]
        splits = train and self.pipeline.schedule(self.num_stages, count, train=True).splits
        programs: list[StageProgram] = []
        halves: list[tuple[StageProgram, StageProgram]] = []
        x = None
        for stage in cut:
            make = functools.partial(
                StageProgram.make,
                stage,
                [self._leaf(piece) for piece in stage.pieces],
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
        return programs, halves

    def _leaf(self, piece: Piece) -> Leaf:
        """Return a stage's leaf as the stage's devices store it."""
        leaf = self.layout.leaves[piece.leaf]
        placement = dataclasses.replace(
            leaf.placement, shape=piece.shape(leaf.placement.shape), axes=("device", "node")
        )
        persistent = leaf.persistent or self.weights == "step"
        return dataclasses.replace(leaf, placement=placement, persistent=persistent)

    def _moves(self, stages: Sequence[StageProgram]) -> Moves:
        split = [
            [p for p in program.stage.pieces if self.layout.leaves[p.leaf].is_split]
            for program in stages
        ]
        return Moves.make(
            self.layout.placements,
            split,
            world=self.inside.world * self.num_stages,
            dtype=jnp.dtype("float32"),
        )

    def _cast(self, x: jax.Array) -> jax.Array:
        return x.astype(self.inside.compute_dtype) if is_float(x.dtype) else x


def _check_stateless(model_state: Any) -> None:
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
