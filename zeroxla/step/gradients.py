"""One device's part of a step: its rows of the batch -> its shards of the mean gradient.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.fetch.fetch_plan import make_plan
from zeroxla.fetch.runner import FetchRunner
from zeroxla.fetch.segments import FetchPlan, layer_dims
from zeroxla.fetch.ties import tie
from zeroxla.frontend import Adapted
from zeroxla.program.random_keys import EVALUATION
from zeroxla.program.trace import Program, is_float, trace
from zeroxla.step.means import finish
from zeroxla.step.metrics import check_metrics, means, weight_of, weighted
from zeroxla.step.once_per_step import OncePerStep
from zeroxla.wire.collectives import Collectives
from zeroxla.wire.leaves import Layout
from zeroxla.wire.resolve import Wiring
from zeroxla.wire.routes import LeafSource
from zeroxla.wire.vectors import as_vector, as_words, from_vector, from_words
from zeroxla.wire.wire_state import WireState


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TracedLoss:
    """A model's loss as a plan, for one batch shape and train or eval.

    Attributes:
      runner: of the plan; its leaves are those of the layout that are fetched, in order.
      result: tree structure of (loss, metrics, model_state).
    """

    runner: FetchRunner
    result: Any


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Differentiator:
    """Computes losses and gradients of a model.

    Attributes:
      adapted: the model.
      layout: its leaves.
      wiring: how they travel.
      unit_elements: see `ZeroConfig`.
      limits: see `ZeroConfig`.
      accumulate: micro-batches.
    """

    adapted: Adapted
    layout: Layout
    wiring: Wiring
    unit_elements: int | None
    limits: FetchLimits
    accumulate: int

    @property
    def _ends(self) -> OncePerStep:
        return OncePerStep(layout=self.layout, wiring=self.wiring)

    @property
    def collectives(self) -> Collectives:
        """Of the mesh."""
        return self.wiring.collectives

    def gradients(
        self,
        params: Any,
        model_state: Any,
        batch: Any,
        key: jax.Array,
        scale: jax.Array,
        wire_state: WireState | None,
    ) -> tuple[list[jax.Array | None], dict[str, Any], Any, WireState | None]:
        """Return this device's gradient shards, the metrics of the whole batch, the model state.

        Args:
          params: this device's shards.
          model_state: whole.
          batch: this device's rows.
          key: of the step.
          scale: the loss scale.
          wire_state: what wires remember.

        Returns:
          Float32 shards of the gradient of the mean loss, None for frozen leaves; metrics `loss`,
          `grad_norm`, `finite` and the model's own; the model state, equal on all devices; what
          wires remember of this step.
        """
        wire_key = self.wiring.key(key)
        stored = jax.tree.leaves(params)
        begun, wire_state = self._ends.begin(stored, wire_state, wire_key)
        resident, sources = begun
        rows = self._micro_batches(batch)
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(self.accumulate))
        first = jax.tree.map(lambda x: x[0], rows)
        traced = self.trace(model_state, first, keys[0], train=True)

        def micro(carry: Any, x: Any) -> tuple[Any, Any]:
            grads, model_state = carry
            rows, key = x
            key = jax.random.fold_in(key, self.collectives.rank())
            here = sources
            if self.accumulate > 1:
                # Else the first unit's gather, the same in every turn, leaves the loop: one gather
                # fewer, but that unit is then alive through all micro-batches.
                leaves, tree = jax.tree.flatten(rows)
                held, form = jax.tree.flatten(sources)
                held, leaves = tie(held, leaves, by_data=self.collectives.firm_ties)
                here, rows = form.unflatten(held), tree.unflatten(leaves)
            new, sums, model_state = self._one(
                traced, here, resident, model_state, rows, key, scale
            )
            return (jax.tree.map(jnp.add, grads, new), model_state), sums

        start = (self._ends.zeros(resident), model_state)
        if self.accumulate == 1:
            (grads, model_state), sums = micro(start, (first, keys[0]))
        else:
            (grads, model_state), sums = lax.scan(micro, start, (rows, keys))
            sums = jax.tree.map(lambda x: x.sum(0), sums)

        grads, wire_state = self._ends.reduce(grads, wire_state, wire_key)
        grads, metrics = finish(
            grads, sums, scale, layout=self.layout, collectives=self.collectives
        )
        return grads, metrics, self._agree(model_state), wire_state

    def evaluate(self, params: Any, model_state: Any, batch: Any, key: jax.Array) -> dict[str, Any]:
        """Return the metrics of the whole batch, without gradients."""
        stored = jax.tree.leaves(params)
        resident = self._ends.resident(stored)
        shards = [stored[i] for i in self.layout.indices(fetched=True)]
        key = jax.random.fold_in(jax.random.fold_in(key, EVALUATION), self.collectives.rank())
        traced = self.trace(model_state, batch, key, train=False)
        inputs = self._inputs(resident, model_state, batch, key)
        sources = dict(zip(traced.runner.plan.leaves, map(LeafSource.stored, shards), strict=True))
        outputs, _ = traced.runner.forward(
            sources, inputs, record=False, keep=False, key=self.wiring.key(key)
        )
        loss, metrics, _ = traced.result.unflatten(outputs)
        sums = self.collectives.sum(as_vector(weighted(loss, metrics)))
        return means(from_vector(sums, weighted(loss, metrics)))

    def trace(self, model_state: Any, batch: Any, key: jax.Array, *, train: bool) -> TracedLoss:
        """Trace the loss on this device's micro-batch and make its fetch plan."""
        plan, result = self.plan(model_state, batch, key, train=train)
        fetched = [self.layout.leaves[i] for i in self.layout.indices(fetched=True)]
        routes = {v: self.wiring.route(leaf) for v, leaf in zip(plan.leaves, fetched, strict=True)}
        runner = FetchRunner(plan, self.collectives, routes, self.limits)
        return TracedLoss(runner=runner, result=result)

    def plan(
        self, model_state: Any, batch: Any, key: jax.Array, *, train: bool
    ) -> tuple[FetchPlan, Any]:
        """Return the fetch plan of the loss and the structure of its result."""
        program, result = self._program(model_state, batch, key, train=train)
        fetched = self.layout.indices(fetched=True)
        plan = make_plan(
            program,
            [program.inputs[i] for i in fetched],
            [v for v, leaf in zip(program.inputs, self.layout, strict=False) if not leaf.frozen],
            unit_elements=self.unit_elements,
            split_dims={program.inputs[i]: self.layout.leaves[i].placement.dim for i in fetched},
            gradient_of=program.outputs[:1],
        )
        check_metrics(result)
        return plan, result

    def layer_dims(self, model_state: Any, batch: Any, key: jax.Array) -> list[tuple[int, ...]]:
        """Return the dims along which the model's loops slice each leaf."""
        program, _ = self._program(model_state, batch, key, train=True)
        leaves = program.inputs[: len(self.layout.leaves)]
        plan = make_plan(program, leaves, (), unit_elements=None, split_dims=dict.fromkeys(leaves))
        dims = layer_dims(plan)
        return [tuple(sorted(dims.get(v, ()))) for v in leaves]

    def _program(
        self, model_state: Any, batch: Any, key: jax.Array, *, train: bool
    ) -> tuple[Program, Any]:
        def loss(leaves: list[jax.Array], model_state: Any, batch: Any, key: jax.Array) -> Any:
            params = self.layout.tree.unflatten(leaves)
            return self.adapted.loss(params, model_state, self._cast(batch), key, train=train)

        dtype = self.collectives.compute_dtype
        shapes = [
            jax.ShapeDtypeStruct(leaf.placement.shape, jnp.uint8 if leaf.is_wire else dtype)
            for leaf in self.layout
        ]
        return trace(loss, shapes, model_state, batch, key)

    def _cast(self, batch: Any) -> Any:
        dtype = self.collectives.compute_dtype
        return jax.tree.map(lambda x: x.astype(dtype) if is_float(x.dtype) else x, batch)

    def _micro_batches(self, batch: Any) -> Any:
        k = self.accumulate
        return jax.tree.map(lambda x: x.reshape(k, x.shape[0] // k, *x.shape[1:]), batch)

    def _inputs(
        self, resident: Sequence[jax.Array], model_state: Any, batch: Any, key: jax.Array
    ) -> list[jax.Array]:
        return [*resident, *jax.tree.leaves((model_state, batch)), key]

    def _one(
        self,
        traced: TracedLoss,
        sources: list[LeafSource],
        resident: list[jax.Array],
        model_state: Any,
        batch: Any,
        key: jax.Array,
        scale: jax.Array,
    ) -> tuple[Any, Any, Any]:
        """Loss and gradient sums of one micro-batch: those of whole leaves not yet reduced."""
        runner = traced.runner
        held = dict(zip(runner.plan.leaves, sources, strict=True))
        inputs = self._inputs(resident, model_state, batch, key)
        wire_key = self.wiring.key(key)
        with jax.named_scope("forward"):
            outputs, tape = runner.forward(held, inputs, record=True, key=wire_key)
        loss, metrics, model_state = traced.result.unflatten(outputs)
        weight = weight_of(metrics)
        # Tied to the loss, so that no gather of backward can start before forward has ended.
        seed = (scale * weight).astype(loss.dtype)
        (seed,), (loss,) = tie([seed], [loss], by_data=self.collectives.firm_ties)
        with jax.named_scope("backward"):
            known = dict(zip(runner.plan.inputs, inputs, strict=True))
            cotangents = [seed, *(None for _ in outputs[1:])]
            reduced, whole = runner.backward(held, known, tape, cotangents, key=wire_key)
        zeros = self._ends.zeros(resident)
        grads = [
            None if zero is None else reduced.get(v, zero)
            for v, zero in zip(runner.plan.leaves, zeros[0], strict=True)
        ]
        whole = [
            None if zero is None else zero if ct is None else ct.astype(jnp.float32)
            for ct, zero in zip(whole, zeros[1], strict=False)
        ]
        return (grads, whole), weighted(loss, metrics), model_state

    def _agree(self, model_state: Any) -> Any:
        """Make the model state equal on all devices: floats are averaged, the rest is rank 0's."""
        leaves, tree = jax.tree.flatten(model_state)
        floats = {i: x for i, x in enumerate(leaves) if is_float(x.dtype)}
        others = {i: x for i, x in enumerate(leaves) if i not in floats}
        agreed = from_vector(self.collectives.sum(as_vector(floats)), floats)
        agreed = {
            i: (x / self.collectives.world).astype(floats[i].dtype) for i, x in agreed.items()
        }
        first = self.collectives.rank() == 0
        words = jax.tree.map(lambda x: jnp.where(first, as_words(x), 0), others)
        words = from_vector(self.collectives.sum(as_vector(words, jnp.uint32)), words)
        agreed.update({i: from_words(w, others[i]) for i, w in words.items()})
        return tree.unflatten([agreed[i] for i in range(len(leaves))])
