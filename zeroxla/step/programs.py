"""`Programs`: a training setup's functions that JAX compiles: init, step, evaluation, gradients.

The configuration has its effect while a program is traced: it picks functions and constants.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from zeroxla.mesh.axes import BATCH_AXES
from zeroxla.mesh.placement import Placement
from zeroxla.offload.disk.tickets import leaf_dtype, spec_of
from zeroxla.offload.memory_kinds import put, to_device
from zeroxla.offload.update.stream import stream
from zeroxla.program.one_by_one import one_after_another
from zeroxla.program.random_keys import STATE
from zeroxla.step.setup import REPLICATED, Placements, Setup
from zeroxla.step.state import LossScale, TrainState, natural, state_shardings, stored
from zeroxla.wire.leaves import Layout
from zeroxla.wire.wire_state import WireState

BY_ROWS = PartitionSpec(BATCH_AXES)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Programs(Setup):
    """Functions of a state and a batch, for `jax.jit`."""

    def init(self, key: jax.Array, batch: Any, placements: Placements) -> TrainState:
        """Make the state."""
        params, model_state = self._first(key, batch, placements[0], None)
        return self._start(params, model_state, key, batch, placements)

    def first_params(
        self, key: jax.Array, batch: Any, *, placements: Placements, only: Sequence[int]
    ) -> list[jax.Array]:
        """Return some of the parameters that `init` makes, by their positions."""
        params, _ = self._first(key, batch, placements[0], only)
        return jax.tree.leaves(params)

    def _first(
        self,
        key: jax.Array,
        batch: Any,
        placements: Sequence[Placement],
        only: Collection[int] | None,
    ) -> tuple[Any, Any]:
        """Return the first parameters, in stored form, and the first model state.

        `only` holds the positions of the parameters to compute; None means all.
        """

        def keep_shard(i: int, x: jax.Array) -> jax.Array:
            if i >= len(placements):
                return x
            x = x if x.dtype == jnp.uint8 else x.astype(jnp.float32)  # wires stay as they are
            return put(placements[i].stored(x), placements[i].sharding(self.mesh))

        rows = self.first_rows(batch)
        return one_after_another(self.adapted.init, keep_shard, key, rows, only=only)

    def init_from(
        self, params: Any, key: jax.Array, batch: Any, placements: Placements
    ) -> TrainState:
        """Make the state for given parameters, which are stored as their placements say.

        The returned state does not hold them. The model's own parameters are not computed, as
        nothing here depends on them.
        """
        rows = self.first_rows(batch)
        model_state = one_after_another(
            lambda key, rows: self.adapted.init(key, rows)[1], lambda i, x: x, key, rows
        )
        state = self._start(params, model_state, key, batch, placements)
        return dataclasses.replace(state, params=None)

    def _start(
        self, params: Any, model_state: Any, key: jax.Array, batch: Any, placements: Placements
    ) -> TrainState:
        opt_state = self.first_opt_state(params, placements)
        leaves, tree = jax.tree.flatten(opt_state)
        shardings = [p.sharding(self.mesh) for p in placements[1]]
        opt_state = tree.unflatten(map(put, leaves, shardings))
        scale = self.config.init_loss_scale if self.config.compute_dtype == "float16" else 1.0
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=opt_state,
            model_state=model_state,
            key=jax.random.fold_in(key, STATE),
            loss_scale=LossScale.create(scale),
            placements=placements,
        )
        return dataclasses.replace(state, wire_state=self.wire_state(state, batch))

    def first_opt_state(self, params: Any, placements: Placements) -> Any:
        """Return the optimizer's state before the first step, padded and on the devices."""
        layout = self.layout_of(params, placements[0])
        here = jax.tree.map(to_device, params)
        trainable = layout.trainable(natural(here, placements[0]), optax.MaskedNode())
        return stored(self.optimizer.init(trainable), placements[1])

    def wire_state(self, state: TrainState, batch: Any) -> WireState | None:
        """Make the wire state of this configuration, for a state with another one or none.

        The parts of the state's own wire state that fit are kept. Only the shapes of the batch
        matter.
        """
        layout = self.layout(state)
        wire_plan = self.wire_state_plan(layout, batch, state.key)
        if wire_plan.is_empty:
            return None
        leaves = jax.tree.leaves(state.params)
        specs = [spec_of(x, p) for x, p in zip(leaves, layout.placements, strict=True)]
        start: Callable[..., WireState] = jax.shard_map(
            wire_plan.start,
            mesh=self.mesh,
            in_specs=(specs,),
            out_specs=wire_plan.specs(),
            check_vma=False,
        )
        return start(leaves).keeping(state.wire_state)

    def train(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Take one optimizer step. Return the next state and the metrics."""
        grads, rest, metrics = self.begin(state, batch)
        args = (state.params, state.opt_state, grads, metrics["finite"])
        with jax.named_scope("update"):
            placements = [p for placed in state.placements for p in placed]
            params, opt_state, rates = stream(
                self.update_of(state),
                args,
                [p.sharding(self.mesh) for p in placements],
                offload=self.config.offload,
                mesh=self.mesh,
                layer_dims=[p.unsplit_layers for p in placements],
            )
        new_state = dataclasses.replace(rest, params=params, opt_state=opt_state)
        new_state = jax.tree.map(put, new_state, state_shardings(new_state, self.mesh))
        return new_state, metrics | self.rate_of(rates)

    def begin(self, state: TrainState, batch: Any) -> tuple[Any, TrainState, dict[str, Any]]:
        """Return the gradients in stored form, the next state without parameters and optimizer
        state, and the metrics."""
        grads, metrics, model_state, wire_state = self._local_gradients(state, batch)
        # Otherwise the compiler fuses the scaling of a gradient into the update. It would then
        # round differently from a configuration whose update is another program.
        grads = jax.tree.map(jax.lax.optimization_barrier, grads)
        config, finite = self.config, metrics["finite"]
        keep = _keep_if(finite)
        loss_scale = state.loss_scale.after(
            finite, dynamic=config.compute_dtype == "float16", window=config.loss_scale_window
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
        )
        metrics["skipped"] = loss_scale.skipped
        if config.compute_dtype == "float16":
            metrics["loss_scale"] = state.loss_scale.scale
        return grads, rest, metrics

    def update_of(self, state: TrainState) -> Callable[..., Any]:
        """Return the function (params, opt_state, gradients, whether these are finite) -> (params,
        opt_state, learning rates). All arrays are in stored form."""
        return functools.partial(
            self._update, layout=self.layout(state), placements=state.placements
        )

    @staticmethod
    def rate_of(rates: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """Return the metric `learning_rate`; {} if the optimizer has several rates or none."""
        return {"learning_rate": rates[0]} if len(rates) == 1 else {}

    def _update(
        self,
        params: Any,
        opt_state: Any,
        grads: Any,
        finite: jax.Array,
        *,
        layout: Layout,
        placements: Placements,
    ) -> tuple[Any, Any, list[jax.Array]]:
        """Return the parameters and the optimizer's state after a step, in stored form, and the
        learning rates that the optimizer's state holds."""
        in_params, in_opt = placements
        masked = optax.MaskedNode()
        whole = natural(params, in_params)
        updates, new_state = self.optimizer.update(
            layout.trainable(natural(grads, in_params), masked),
            natural(opt_state, in_opt),
            layout.trainable(whole, masked),
        )
        new = optax.apply_updates(layout.trainable(whole, masked), updates)
        new_params = stored(layout.with_frozen(new, whole), in_params)
        keep = _keep_if(finite)
        # The state of a schedule has the same name, and is no array.
        found = optax.tree_utils.tree_get_all_with_path(new_state, "learning_rate")
        rates = [x for _, x in found if isinstance(x, jax.Array)]
        kept = layout.with_frozen(layout.trainable(keep(new_params, params), masked), params)
        return kept, keep(stored(new_state, in_opt), opt_state), rates

    def gradients(self, state: TrainState, batch: Any) -> tuple[jax.Array, Any]:
        """Return the loss and the gradients in natural shapes."""
        grads, metrics, *_ = self._local_gradients(state, batch)
        return metrics["loss"], natural(grads, state.placements[0])

    def evaluate(self, state: TrainState, batch: Any) -> dict[str, Any]:
        """Return the metrics of a batch with `train=False`."""
        layout = self.layout(state)
        return jax.shard_map(
            self.differentiator(layout).evaluate,
            mesh=self.mesh,
            in_specs=(self._specs(state), REPLICATED, BY_ROWS, REPLICATED),
            out_specs=REPLICATED,
            check_vma=False,
        )(state.params, state.model_state, batch, jax.random.fold_in(state.key, state.step))

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
        layout = self.layout(state)
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
            in_specs=(self._specs(state), REPLICATED, BY_ROWS, REPLICATED, REPLICATED, wires),
            out_specs=(specs, REPLICATED, REPLICATED, wires),
            check_vma=False,
        )(
            state.params,
            state.model_state,
            batch,
            jax.random.fold_in(state.key, state.step),
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


def _keep_if(finite: jax.Array) -> Callable[[Any, Any], Any]:
    """Return the function (new, old) -> new if the step was finite, old otherwise."""
    return functools.partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
