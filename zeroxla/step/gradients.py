"""One device's part of a step: from its rows of the batch to its shards of the mean gradient.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.fetch.segments import FetchPlan
from zeroxla.fetch.ties import tie
from zeroxla.program.random_keys import EVALUATION
from zeroxla.program.trace import Value
from zeroxla.step.agreed_state import agree
from zeroxla.step.loss_plan import LossPlanner, TracedLoss
from zeroxla.step.means import mean_metrics, means_over_devices
from zeroxla.step.metrics import counts, weight_of, weighted
from zeroxla.step.micro_batches import micro_batches
from zeroxla.step.once_per_step import Gradients, OncePerStep
from zeroxla.wire.collectives import Collectives
from zeroxla.wire.leaves import Layout
from zeroxla.wire.resolve import Wiring
from zeroxla.wire.routes import LeafSource
from zeroxla.wire.wire_state import WireState

Copies = dict[int, jax.Array]
"""New copies, by the number of the leaf."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Differentiator:
    """Computes losses and gradients of a model.

    Attributes:
      planner: traces the model's loss and plans its gathers.
      accumulate: the number of micro-batches.
    """

    planner: LossPlanner
    accumulate: int

    @property
    def layout(self) -> Layout:
        """The model's leaves."""
        return self.planner.layout

    @property
    def wiring(self) -> Wiring:
        """How the leaves travel."""
        return self.planner.wiring

    @property
    def collectives(self) -> Collectives:
        """The collectives of the mesh."""
        return self.wiring.collectives

    @property
    def _once(self) -> OncePerStep:
        return OncePerStep(layout=self.layout, wiring=self.wiring)

    def gradients(
        self,
        params: Any,
        model_state: Any,
        batch: Any,
        key: jax.Array,
        scale: jax.Array,
        wire_state: WireState | None,
    ) -> tuple[list[jax.Array | None], dict[str, Any], Any, WireState | None]:
        """Compute this device's gradient shards and the metrics of the whole batch.

        Args:
          params: this device's shards.
          model_state: the model's state, whole.
          batch: this device's rows.
          key: the step's key.
          scale: the loss scale.
          wire_state: the wire state before the step; None if nothing is remembered.

        Returns:
          Float32 shards of the gradient of the mean loss, None for frozen leaves; the metrics
          `loss`, `grad_norm`, `finite` and the model's own; the model state, equal on all devices;
          and the new wire state.
        """
        wire_key = self.wiring.key(key)
        if self.planner.overwritten(model_state):
            # These leaves ask how large the gradient of the mean over all devices is.
            scale = scale / self.collectives.world
        rows, keys = micro_batches(batch, key, self.accumulate)
        first = jax.tree.map(lambda x: x[0], rows)
        traced = self.planner.trace(model_state, first, keys[0], train=True)
        (resident, sources), wire_state = self._once.begin(
            jax.tree.leaves(params), wire_state, wire_key, self._later(traced)
        )

        add = functools.partial(self._add_micro_batch, traced, resident, sources, scale)
        start = (self._once.zeros(resident), model_state)
        if self.accumulate == 1:
            (grads, model_state), (sums, copies) = add(start, (first, keys[0]))
            wire_state = wire_state and wire_state.with_copies(copies)
        else:
            (grads, model_state), (sums, _) = lax.scan(add, start, (rows, keys))
            sums = jax.tree.map(lambda x: x.sum(0), sums)

        grads, wire_state = self._once.reduce(grads, wire_state, wire_key)
        grads, metrics = means_over_devices(
            grads, sums, scale, layout=self.layout, collectives=self.collectives
        )
        overwritten = self.planner.overwritten(model_state)
        model_state = agree(model_state, overwritten, self.collectives)
        return grads, metrics, model_state, wire_state

    def evaluate(self, params: Any, model_state: Any, batch: Any, key: jax.Array) -> dict[str, Any]:
        """Return the metrics of the whole batch, without gradients."""
        stored = jax.tree.leaves(params)
        resident = self._once.resident(stored)
        shards = [stored[i] for i in self.layout.indices(fetched=True)]
        key = jax.random.fold_in(jax.random.fold_in(key, EVALUATION), self.collectives.rank())
        traced = self.planner.trace(model_state, batch, key, train=False)
        inputs = _inputs(resident, model_state, batch, key)
        sources = dict(zip(traced.runner.plan.leaves, map(LeafSource.stored, shards), strict=True))
        outputs, _ = traced.runner.forward(
            sources, inputs, record=False, keep=False, key=self.wiring.key(key)
        )
        loss, metrics, _ = traced.result.unflatten(outputs)
        return mean_metrics(weighted(loss, metrics), self.collectives)

    def _later(self, traced: TracedLoss) -> frozenset[int]:
        """Return the numbers of the leaves whose outer hops are left to the micro-batch.

        If a step has one micro-batch, these are the leaves that the plan's own segments gather: the
        hop over `node` of one unit then runs beside the computation of another. Leaves that a body
        gathers make their outer hops before, because a body returns no copies.
        """
        if self.accumulate > 1:
            return frozenset()
        plan = traced.runner.plan
        return frozenset(i for i, v in self._fetched(plan) if v in plan.own_leaves)

    def _fetched(self, plan: FetchPlan) -> Iterator[tuple[int, Value]]:
        """Yield the number of each fetched leaf and its value in a plan."""
        return zip(self.layout.indices(fetched=True), plan.leaves, strict=True)

    def _add_micro_batch(
        self,
        traced: TracedLoss,
        resident: Sequence[jax.Array],
        sources: list[LeafSource],
        scale: jax.Array,
        carry: tuple[tuple[Gradients, Gradients], Any],
        micro_batch: tuple[Any, jax.Array],
    ) -> tuple[tuple[tuple[Gradients, Gradients], Any], tuple[dict[str, jax.Array], Copies]]:
        """Add the gradients of one micro-batch to the sums so far: the body of a `lax.scan`.

        Args:
          traced: the loss.
          resident: the leaves that are whole through the step.
          sources: the sources from which the fetched leaves are gathered.
          scale: the loss scale.
          carry: the sums of fetched and of resident leaves' gradients, and the model state.
          micro_batch: this device's rows of it, and its key.

        Returns:
          The new carry; then the weighted sums of the loss and its metrics, and the copies of the
          leaves that sent differences.
        """
        grads, model_state = carry
        rows, key = micro_batch
        key = jax.random.fold_in(key, self.collectives.rank())
        if self.accumulate > 1:
            sources, rows = self._after_rows(sources, rows)
        new, sums, model_state, copies = self._forward_backward(
            traced, sources, resident, model_state, rows, key, scale
        )
        return (jax.tree.map(jnp.add, grads, new), model_state), (sums, copies)

    def _after_rows(self, sources: list[LeafSource], rows: Any) -> tuple[list[LeafSource], Any]:
        """Tie the sources of gathers to a micro-batch's rows.

        Otherwise the first unit's gather, which is the same in every turn, leaves the loop. That is
        one gather fewer, but the unit is then alive through all micro-batches.
        """
        leaves, tree = jax.tree.flatten(rows)
        arrays, form = jax.tree.flatten(sources)
        arrays, leaves = tie(arrays, leaves, by_data=self.collectives.ties_by_data)
        return form.unflatten(arrays), tree.unflatten(leaves)

    def _forward_backward(
        self,
        traced: TracedLoss,
        sources: Sequence[LeafSource],
        resident: Sequence[jax.Array],
        model_state: Any,
        rows: Any,
        key: jax.Array,
        scale: jax.Array,
    ) -> tuple[tuple[Gradients, Gradients], dict[str, jax.Array], Any, Copies]:
        """Run one micro-batch forward and backward.

        Args:
          traced: the loss.
          sources: the sources from which the fetched leaves are gathered.
          resident: the leaves that are whole through the step.
          model_state: the model's state before this micro-batch.
          rows: this device's rows of the micro-batch.
          key: the key of the loss.
          scale: the loss scale.

        Returns:
          The float32 gradients of the fetched leaves, reduced, and of the resident ones, not
          reduced; the weighted sums of the loss and its metrics; the new model state; and the
          copies of the leaves that sent differences.
        """
        runner = traced.runner
        held = dict(zip(runner.plan.leaves, sources, strict=True))
        inputs = _inputs(resident, model_state, rows, key)
        wire_key = self.wiring.key(key)
        with jax.named_scope("forward"):
            outputs, tape = runner.forward(held, inputs, record=True, key=wire_key)
        after = runner.passes.after(held, tape)
        copies = {
            i: copy for i, v in self._fetched(runner.plan) if (copy := after[v].copy) is not None
        }
        loss, metrics, model_state = traced.result.unflatten(outputs)
        seed, loss = seed_of_backward(loss, metrics, scale, by_data=self.collectives.ties_by_data)
        with jax.named_scope("backward"):
            known = dict(zip(runner.plan.inputs, inputs, strict=True))
            cotangents = [seed, *(None for _ in outputs[1:])]
            counted = counts(metrics)
            reduced, whole = runner.backward(
                held, known, tape, cotangents, key=wire_key, counts=counted
            )
        state, tree = jax.tree.flatten(model_state)
        of_state = whole[len(resident) :]
        state = [
            x
            if i not in traced.overwritten or (ct := of_state[i]) is None
            else ct
            if counted is None
            else jnp.where(counted, ct, x)
            for i, x in enumerate(state)
        ]
        model_state = tree.unflatten(state)
        zeros = self._once.zeros(resident)
        of_fetched = [
            None if zero is None else reduced.get(v, zero)
            for v, zero in zip(runner.plan.leaves, zeros[0], strict=True)
        ]
        of_resident = [
            None if zero is None else zero if ct is None else ct.astype(jnp.float32)
            for ct, zero in zip(whole, zeros[1], strict=False)
        ]
        return (of_fetched, of_resident), weighted(loss, metrics), model_state, copies


def seed_of_backward(
    loss: jax.Array, metrics: dict[str, jax.Array], scale: jax.Array, *, by_data: bool
) -> tuple[jax.Array, jax.Array]:
    """Return the cotangent of a micro-batch's loss, and the loss tied to it.

    The cotangent waits for the loss, so that no gather of backward can start before forward has
    ended. The loss must be read as it is returned.

    Args:
      loss: the mean loss of the micro-batch.
      metrics: the loss's metrics; `weight` among them scales the cotangent.
      scale: the loss scale.
      by_data: see `tie`.
    """
    seed = (scale * weight_of(metrics)).astype(loss.dtype)
    (seed,), (loss,) = tie([seed], [loss], by_data=by_data)
    return seed, loss


def _inputs(
    resident: Sequence[jax.Array], model_state: Any, batch: Any, key: jax.Array
) -> list[jax.Array]:
    """Return the inputs of a loss's plan: everything but the fetched leaves."""
    return [*resident, *jax.tree.leaves((model_state, batch)), key]
