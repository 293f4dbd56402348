"""`FirstStates`: the functions that make a training state before its first step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zeroxla.mesh.placement import Placement
from zeroxla.offload.disk.tickets import spec_of
from zeroxla.offload.memory_kinds import put, to_device
from zeroxla.program.one_by_one import one_after_another
from zeroxla.program.random_keys import STATE
from zeroxla.step.setup import Placements, Setup
from zeroxla.step.state import LossScale, TrainState, natural, stored
from zeroxla.wire.wire_state import WireState


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FirstStates(Setup):
    """Functions of a key and a batch, for `jax.jit`."""

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
        self,
        params: Any,
        model_state: Any,
        key: jax.Array,
        batch: Any,
        placements: Placements,
    ) -> TrainState:
        """Make the state for given parameters, which are stored as their placements say.

        The returned state does not hold them. The model's own parameters are not computed, as
        nothing here depends on them. A model state of None is made as `init` makes it.
        """
        rows = self.first_rows(batch)
        if model_state is None:
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
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=opt_state,
            model_state=model_state,
            key=jax.random.fold_in(key, STATE),
            loss_scale=LossScale.create(self.first_loss_scale),
            placements=placements,
            indices=self.adapted.indices,
            containers=self.adapted.containers(),
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
        wire_plan = self.wire_state_plan(layout, state.model_state, batch, state.key)
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
