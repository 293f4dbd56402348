"""`Programs`: a training setup's functions that JAX compiles: init, step, evaluation, gradients.

The configuration has its effect while a program is traced: it picks functions and constants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.offload.disk.tickets import leaf_dtype, spec_of
from zeroxla.offload.memory_kinds import is_on_host, put
from zeroxla.offload.update.stream import stream
from zeroxla.program.shapes import shapes_of
from zeroxla.step.axes.split_batch import specs_of
from zeroxla.step.first_states import FirstStates
from zeroxla.step.model_on_mesh import REPLICATED
from zeroxla.step.owners.owned_update import OwnedUpdate, TracedUpdate
from zeroxla.step.owners.owners_report import OwnersReport
from zeroxla.step.state import TrainState, as_in_model, natural, state_shardings
from zeroxla.step.update import OptimizerUpdate, keep_if
from zeroxla.wire.wire_state import WireState


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Programs(FirstStates):
    """Functions of a state and a batch, for `jax.jit`."""

    _owners: dict[Any, TracedUpdate] = dataclasses.field(default_factory=dict, init=False)

    def train(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Take one optimizer step. Return the next state and the metrics."""
        grads, rest, metrics = self.begin(state, batch)
        args = (state.params, state.opt_state, grads, metrics["finite"], metrics["loss"])
        with jax.named_scope("update"):
            params, opt_state, rates = self._updated(state, args)
        new_state = dataclasses.replace(rest, params=params, opt_state=opt_state)
        new_state = jax.tree.map(put, new_state, state_shardings(new_state, self.mesh))
        return new_state, metrics | self.rate_of(rates)

    def _updated(self, state: TrainState, args: tuple[Any, ...]) -> Any:
        """Return the results of the update; see `OptimizerUpdate` for the arguments."""
        owned = self.owned_update_of(state)
        if not any(map(is_on_host, jax.tree.leaves(args))):
            return owned(*args)
        placements = [p for placed in state.placements for p in placed]
        return stream(
            owned.update,
            args,
            [p.sharding(self.mesh) for p in placements],
            offload=self.config.offload,
            mesh=self.mesh,
            layer_dims=[p.unsplit_layers for p in placements],
            run_of=owned.run_of,
        )

    def begin(self, state: TrainState, batch: Any) -> tuple[Any, TrainState, dict[str, Any]]:
        """Return the gradients in stored form, the next state without parameters and optimizer
        state, and the metrics."""
        entered = state.loss_scale.entered(self.first_loss_scale)
        state = dataclasses.replace(state, loss_scale=entered)
        grads, metrics, model_state, wire_state = self._local_gradients(state, batch)
        # Otherwise the compiler fuses the scaling of a gradient into the update. It would then
        # round differently from a configuration whose update is another program.
        grads = jax.tree.map(jax.lax.optimization_barrier, grads)
        config, finite = self.config, metrics["finite"]
        keep = keep_if(finite)
        scales = self.first_loss_scale is not None
        loss_scale = state.loss_scale.after(
            finite, window=config.loss_scale_window if scales else None
        )
        rest = TrainState(
            step=state.step + 1,
            params=None,
            opt_state=None,
            model_state=keep(model_state, state.model_state),
            key=state.key,
            loss_scale=loss_scale,
            wire_state=self._next_wire_state(state, wire_state, finite),
            placements=state.placements,
            indices=state.indices,
            containers=state.containers,
        )
        metrics["skipped"] = loss_scale.skipped
        if scales:
            metrics["loss_scale"] = state.loss_scale.scale
        return grads, rest, metrics

    def update_of(self, state: TrainState) -> OptimizerUpdate:
        """Return the update of states of this structure."""
        return OptimizerUpdate(
            optimizer=self.optimizer, layout=self.layout(state), placements=state.placements
        )

    def owned_update_of(self, state: TrainState) -> OwnedUpdate:
        """Return the update of states of this structure, with owners for its matrices."""
        return OwnedUpdate(
            update=self.update_of(state),
            placements=state.placements,
            mesh=self.mesh,
            is_on=self.config.owners,
            known=self._owners,
        )

    def describe_owners(self, state: TrainState) -> OwnersReport | None:
        """Return which matrices of the update have owners, from shapes alone; None if it needs no
        matrix whole, or nothing may have an owner.

        If parts of the state are on the host or on disk, the sub-groups of the update share their
        matrices each for itself, and the busiest device may have more to do than the report says.
        """
        placed = [p for placements in state.placements for p in placements]
        on_host = self.config.offload.update == "host" and any(p.memory for p in placed)
        if on_host or not self.config.owners or self.mesh.size == 1:
            return None
        shapes = shapes_of((state.params, state.opt_state))
        scalars = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((), jnp.float32)
        update = self.owned_update_of(state)
        program, _, plan = update.plan(*shapes, shapes[0], *scalars)
        layout = self.layout(state)
        num, inputs = len(layout.leaves), program.inputs
        paths = [leaf.path for leaf in layout]
        gradients = inputs[len(placed) :]
        names = dict(zip((*inputs[:num], *gradients[:num]), 2 * paths, strict=True))
        return OwnersReport.of(program, plan, names, self.mesh.size)

    @staticmethod
    def rate_of(rates: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """Return the metric `learning_rate`; {} if the optimizer has several rates or none."""
        return {"learning_rate": rates[0]} if len(rates) == 1 else {}

    def gradients(self, state: TrainState, batch: Any) -> tuple[jax.Array, Any]:
        """Return the loss and the gradients in natural shapes, under the model's own keys."""
        entered = state.loss_scale.entered(self.first_loss_scale)
        state = dataclasses.replace(state, loss_scale=entered)
        grads, metrics, *_ = self._local_gradients(state, batch)
        return metrics["loss"], as_in_model(natural(grads, state.placements[0]), state)

    def evaluate(self, state: TrainState, batch: Any) -> dict[str, Any]:
        """Return the metrics of a batch with `train=False`."""
        layout, key = self.layout(state), jax.random.fold_in(state.key, state.step)
        batch = self.split(layout, state.model_state, batch, key, train=False)
        return jax.shard_map(
            self.differentiator(layout).evaluate,
            mesh=self.mesh,
            in_specs=(self._specs(state), REPLICATED, specs_of(batch), REPLICATED),
            out_specs=REPLICATED,
            check_vma=False,
        )(state.params, state.model_state, batch, key)

    def _next_wire_state(
        self, state: TrainState, new: WireState | None, finite: jax.Array
    ) -> WireState | None:
        """Return the wire state after a step.

        A skipped step leaves no new errors. Its new copies are kept: they are copies of the weights
        before the step.
        """
        feedback = self.wiring.feedback
        old = state.wire_state
        if new is None or old is None or feedback is None:
            return new
        drop = (state.step + 1) % feedback.reset_every == 0
        errors = jax.tree.map(
            lambda new, old: jnp.where(drop, 0, jnp.where(finite, new, old)).astype(new.dtype),
            new.errors,
            old.errors,
        )
        return dataclasses.replace(new, errors=errors)

    def _local_gradients(
        self, state: TrainState, batch: Any
    ) -> tuple[Any, dict[str, Any], Any, WireState | None]:
        layout, key = self.layout(state), jax.random.fold_in(state.key, state.step)
        batch = self.split(layout, state.model_state, batch, key, train=True)
        differentiator = self.differentiator(layout)
        specs = [p.spec for p in layout.placements]

        def local(params: Any, *rest: Any) -> Any:
            grads, *others = differentiator.gradients(params, *rest)
            leaves = zip(grads, jax.tree.leaves(params), layout.placements, strict=True)
            # Zeros for frozen leaves. Not zeros_like: a ticket has another shape than its leaf.
            grads = [
                jnp.zeros(p.shard_shape(self.mesh), leaf_dtype(x)) if g is None else g
                for g, x, p in leaves
            ]
            return grads, *others

        wires = state.wire_state and state.wire_state.specs(layout.placements)
        grads, *others = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(
                self._specs(state),
                REPLICATED,
                specs_of(batch),
                REPLICATED,
                REPLICATED,
                wires,
            ),
            out_specs=(specs, REPLICATED, REPLICATED, wires),
            check_vma=False,
        )(
            state.params,
            state.model_state,
            batch,
            key,
            state.loss_scale.scale,
            state.wire_state,
        )
        return layout.tree.unflatten(grads), *others

    @staticmethod
    def _specs(state: TrainState) -> Any:
        """Return how a program's parameters are split; a ticket is whole on every device."""
        leaves, tree = jax.tree.flatten(state.params)
        pairs = zip(leaves, state.placements[0], strict=True)
        return tree.unflatten([spec_of(x, placement) for x, placement in pairs])
