"""`make_step`: one compiled training step of any Flax model, its state split over every device."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zeroxla.adapters import Adapted, adapt
from zeroxla.collectives import Collectives
from zeroxla.config import ZeroConfig
from zeroxla.describe import Description, describe
from zeroxla.differentiate import Differentiator
from zeroxla.layout import Layout, make_layout, place_opt_state, place_params
from zeroxla.mesh import BATCH_AXES, DEVICE, NODE, as_auto, world_size
from zeroxla.placement import Placement
from zeroxla.reuse import Limits
from zeroxla.state import LossScale, TrainState, natural, state_shardings, stored
from zeroxla.validate import check_batch, check_state

REPLICATED = PartitionSpec()
BY_ROWS = PartitionSpec(BATCH_AXES)


def make_step(
    model: Any,
    mesh: Mesh,
    optimizer: optax.GradientTransformation | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    config: ZeroConfig | None = None,
) -> Step:
    """Make the training step of a model on a mesh.

    Args:
      model: a flax.linen module, a function `rngs -> flax.nnx module` (an nnx module itself is
        accepted with a warning: it was allocated whole), or a pair `(init, loss)` with
        `init(key, batch) -> params` and `loss(params, batch, key) -> scalar | (scalar, metrics)`.
      mesh: with the axes `node` and `device`, see `make_mesh`.
      optimizer: any optax transformation; AdamW with learning rate 3e-4 if None.
      loss: `loss(apply, batch, *, train) -> scalar | (scalar, metrics)`, where `apply` calls the
        module; the module's own method `loss(batch, *, train)` if None.
      config: see `ZeroConfig`.

    Returns:
      A `Step`.

    Raises:
      ValueError: the mesh lacks an axis, the model has no loss, or an option is out of range.

    >>> import zeroxla, optax
    >>> from models import MLP
    >>> step = zeroxla.make_step(MLP.small(), zeroxla.make_mesh(nodes=1), optax.sgd(0.1))
    """
    if optimizer is None:
        optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=3e-4)
    return Step(
        adapted=adapt(model, loss), mesh=as_auto(mesh), optimizer=optimizer,
        config=config or ZeroConfig(),
    )  # fmt: skip


class Step:
    """A training step: call it with a state and a batch. Made by `make_step`.

    Attributes:
      mesh: the mesh, with Auto axes.
      config: the options.
      optimizer: the optax transformation.
    """

    def __init__(
        self,
        *,
        adapted: Adapted,
        mesh: Mesh,
        optimizer: optax.GradientTransformation,
        config: ZeroConfig,
    ) -> None:
        self.adapted, self.mesh, self.optimizer, self.config = adapted, mesh, optimizer, config
        self._collectives = Collectives(
            nodes=mesh.shape[NODE],
            devices=mesh.shape[DEVICE],
            wire_dtype=jnp.dtype(config.compute_dtype),
            reduce_dtype=jnp.dtype(config.reduce_dtype or "float32"),
        )
        self._step = jax.jit(self._train, donate_argnums=0)
        self._eval = jax.jit(self._evaluate)
        self._grad = jax.jit(self._gradients)
        self._shapes: Any = None  # of the model, from init: what describe() traces
        self._checked: set[Any] = set()  # structures of states that fitted
        self._last_call: float | None = None

    # ---------------------------------------------------------------- what users call

    def init(self, key: jax.Array, batch: Any) -> TrainState:
        """Make the state: every leaf is born split, no device ever holds the model.

        Args:
          key: a PRNG key. The model's parameters are initialised with it as they would be on one
            device, bit for bit.
          batch: a pytree of arrays or ShapeDtypeStructs, leading dim the global batch.

        Returns:
          The state before the first step.

        Raises:
          ValueError: the batch does not divide over the devices, or a leaf is not floating.
        """
        batch = check_batch(batch, self.mesh, self.config)
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(key)
        rows = self._first_rows(batch)
        placements = self._placements(key, rows)
        make = functools.partial(self._init, placements=placements)
        shardings = state_shardings(jax.eval_shape(make, key, rows), self.mesh)
        return jax.jit(make, out_shardings=shardings)(key, rows)

    def abstract_state(self, batch: Any) -> TrainState:
        """Return the state's shapes, dtypes and shardings without computing anything: for `lower`
        and for restoring checkpoints."""
        batch = check_batch(batch, self.mesh, self.config)
        key = jax.random.key(0)
        rows = jax.eval_shape(self._first_rows, batch)
        placements = self._placements(key, rows)
        shapes = jax.eval_shape(functools.partial(self._init, placements=placements), key, rows)
        shardings = state_shardings(shapes, self.mesh)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
        )

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Take one optimizer step. The state is donated: use the returned one.

        Args:
          state: from `init`, an earlier step, or a checkpoint.
          batch: as in `init`.

        Returns:
          The next state, and metrics: `loss`, `grad_norm` (before any clipping), `finite`,
          `skipped` (steps so far whose gradient was not finite: nothing but the counters changed),
          `loss_scale` (float16), `learning_rate` if the optimizer's state holds it, the model's own,
          and, from the second call on, `examples_per_s` (and `tokens_per_s` for batches with
          `tokens`) since the call before.
        """
        batch = self._put(check_batch(batch, self.mesh, self.config))
        self._check(state)
        state, metrics = self._step(state, batch)
        return state, {**metrics, **self._rates(batch)}

    def eval(self, state: TrainState, batch: Any) -> dict[str, Any]:
        """Return the loss and the model's metrics on a batch, with `train=False`."""
        batch = self._put(check_batch(batch, self.mesh, self.config, accumulate=1))
        self._check(state)
        return self._eval(state, batch)

    def grad(self, state: TrainState, batch: Any) -> tuple[jax.Array, Any]:
        """Return the loss and the gradients that a step would use, in natural shapes, as float32
        global arrays; zeros for frozen leaves. For tests and debugging."""
        batch = self._put(check_batch(batch, self.mesh, self.config))
        self._check(state)
        return self._grad(state, batch)

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        """Lower the step for (shapes of) a state and a batch, as `jax.jit(...).lower` does."""
        batch = check_batch(batch, self.mesh, self.config)
        rows = NamedSharding(self.mesh, BY_ROWS)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch
        )
        return self._step.lower(state, shapes)

    def describe(self) -> Description:
        """Return the table of leaves: shape, placement, unit, bytes of a shard.

        Raises:
          ValueError: before `init` or a first call, when the model has not been traced.
        """
        if self._shapes is None:
            raise ValueError("nothing to describe yet; call step.init(key, batch) first")
        layout, model_state, (rows, key) = self._shapes
        differentiator = self._differentiator(layout)
        plan, _ = self._in_mesh(
            lambda rows, key: differentiator.plan(model_state, rows, key, train=True), rows, key
        )
        return describe(layout, plan, self.mesh)

    def with_config(self, config: ZeroConfig) -> Step:
        """Return another program for the same state."""
        return Step(
            adapted=self.adapted, mesh=self.mesh, optimizer=self.optimizer, config=config
        )

    # ---------------------------------------------------------------- traced

    def _train(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        grads, metrics, model_state = self._local_gradients(state, batch)
        layout = self._layout(state)
        in_params, in_opt = state.placements
        with jax.named_scope("update"):
            params = natural(state.params, in_params)
            masked = optax.MaskedNode()
            updates, opt_state = self.optimizer.update(
                layout.trainable(natural(grads, in_params), masked),
                natural(state.opt_state, in_opt),
                layout.trainable(params, masked),
            )
            new = optax.apply_updates(layout.trainable(params, masked), updates)
            new_params = stored(layout.with_frozen(new, params), in_params)
            new_opt = stored(opt_state, in_opt)
        finite = metrics["finite"]
        keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
        config = self.config
        loss_scale = state.loss_scale.after(
            finite, dynamic=config.compute_dtype == "float16", window=config.loss_scale_window
        )
        new_state = TrainState(
            step=state.step + 1,
            params=keep(new_params, state.params),
            opt_state=keep(new_opt, state.opt_state),
            model_state=keep(model_state, state.model_state),
            key=state.key,
            loss_scale=loss_scale,
            wire_state=state.wire_state,
            placements=state.placements,
        )
        shardings = state_shardings(new_state, self.mesh)
        new_state = jax.lax.with_sharding_constraint(new_state, shardings)
        metrics["skipped"] = loss_scale.skipped
        if config.compute_dtype == "float16":
            metrics["loss_scale"] = state.loss_scale.scale
        rate = optax.tree_utils.tree_get(state.opt_state, "learning_rate", None)
        if rate is not None:
            metrics["learning_rate"] = rate
        return new_state, metrics

    def _gradients(self, state: TrainState, batch: Any) -> tuple[jax.Array, Any]:
        grads, metrics, _ = self._local_gradients(state, batch)
        return metrics["loss"], natural(grads, state.placements[0])

    def _local_gradients(self, state: TrainState, batch: Any) -> tuple[Any, dict[str, Any], Any]:
        layout = self._layout(state)
        differentiator = self._differentiator(layout)
        specs = [p.spec for p in layout.placements]

        def local(params: Any, *rest: Any) -> Any:
            grads, metrics, model_state = differentiator.gradients(params, *rest)
            leaves = jax.tree.leaves(params)
            grads = [jnp.zeros_like(x) if g is None else g for g, x in zip(grads, leaves)]
            return grads, metrics, model_state

        grads, metrics, model_state = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(layout.tree.unflatten(specs), REPLICATED, BY_ROWS, REPLICATED, REPLICATED),
            out_specs=(specs, REPLICATED, REPLICATED),
            check_vma=False,
        )(
            state.params,
            state.model_state,
            batch,
            jax.random.fold_in(state.key, state.step),
            state.loss_scale.scale,
        )
        return layout.tree.unflatten(grads), metrics, model_state

    def _evaluate(self, state: TrainState, batch: Any) -> dict[str, Any]:
        layout = self._layout(state)
        specs = layout.tree.unflatten([p.spec for p in layout.placements])
        return jax.shard_map(
            self._differentiator(layout).evaluate,
            mesh=self.mesh,
            in_specs=(specs, REPLICATED, BY_ROWS, REPLICATED),
            out_specs=REPLICATED,
            check_vma=False,
        )(state.params, state.model_state, batch, jax.random.fold_in(state.key, state.step))

    def _init(self, key: jax.Array, rows: Any, placements: Any) -> TrainState:
        params, model_state = self.adapted.init(key, rows)
        params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        layout = make_layout(params, placements[0], self.config)
        opt_state = self.optimizer.init(layout.trainable(params, optax.MaskedNode()))
        scale = self.config.init_loss_scale if self.config.compute_dtype == "float16" else 1.0
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=stored(params, placements[0]),
            opt_state=stored(opt_state, placements[1]),
            model_state=model_state,
            key=jax.random.fold_in(key, 1),
            loss_scale=LossScale.create(scale),
            placements=placements,
        )

    # ---------------------------------------------------------------- decided once

    def _placements(
        self, key: jax.Array, rows: Any
    ) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
        params, model_state = jax.eval_shape(self.adapted.init, key, rows)
        whole = tuple(Placement(shape=x.shape) for x in jax.tree.leaves(params))
        layout = make_layout(params, whole, self.config)
        differentiator = self._differentiator(layout)
        dims = self._in_mesh(
            lambda rows, key: differentiator.layer_dims(model_state, rows, key), rows, key
        )
        placed = place_params(params, world_size(self.mesh), dims)
        layout = make_layout(params, placed, self.config)
        trainable = layout.trainable(params, optax.MaskedNode())
        opt_state = jax.eval_shape(self.optimizer.init, trainable)
        opt = place_opt_state(opt_state, params, placed, world_size(self.mesh))
        self._shapes = (layout, model_state, jax.eval_shape(lambda x: x, (rows, key)))
        return placed, opt

    def _in_mesh(self, fun: Callable[..., Any], *args: Any) -> Any:
        """Call `fun` where the mesh's axes are bound, on shapes; return what it returns."""
        found: list[Any] = []
        mapped = jax.shard_map(
            lambda *args: found.append(fun(*args)),
            mesh=self.mesh,
            in_specs=REPLICATED,
            out_specs=REPLICATED,
            check_vma=False,
        )
        jax.eval_shape(mapped, *args)
        return found[0]

    def _check(self, state: TrainState) -> None:
        structure = jax.tree.structure(state)
        if structure not in self._checked:
            check_state(state, self.optimizer, self.config)
            self._checked.add(structure)

    def _layout(self, state: TrainState) -> Layout:
        return make_layout(state.params, state.placements[0], self.config)

    def _differentiator(self, layout: Layout) -> Differentiator:
        config = self.config
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        prefetch = config.prefetch_bucket
        return Differentiator(
            adapted=self.adapted,
            layout=layout,
            collectives=self._collectives,
            unit_elements=config.unit_elements,
            limits=Limits(
                prefetch=0 if prefetch is None and on_cpu else prefetch,
                max_live=config.max_live_parameters,
                max_reuse=config.max_reuse_distance,
            ),
            accumulate=config.accumulate,
        )

    def _first_rows(self, batch: Any) -> Any:
        """Rank 0's first micro-batch."""
        parts = world_size(self.mesh) * self.config.accumulate

        def first(x: Any) -> Any:
            rows = x.shape[0] // parts
            if isinstance(x, jax.ShapeDtypeStruct):
                return jnp.zeros((rows, *x.shape[1:]), x.dtype)
            return x[:rows]

        return jax.tree.map(first, batch)

    def _put(self, batch: Any) -> Any:
        rows = NamedSharding(self.mesh, BY_ROWS)
        return jax.tree.map(lambda x: jax.device_put(x, rows), batch)

    def _rates(self, batch: Any) -> dict[str, float]:
        now, last = time.perf_counter(), self._last_call
        self._last_call = now
        if last is None:
            return {}
        rates = {"examples_per_s": jax.tree.leaves(batch)[0].shape[0] / (now - last)}
        if isinstance(batch, dict) and "tokens" in batch:
            rows, length = batch["tokens"].shape
            rates["tokens_per_s"] = rows * (length - 1) / (now - last)
        return rates
