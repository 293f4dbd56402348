"""`make_step`: the training step of any Flax model on a mesh. `init_from`: its state for weights
that are there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Never

import jax
import optax
from jax.sharding import Mesh

from zeroxla.config.keywords import check_keywords
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.frontend import adapt
from zeroxla.frontend.staged import StagedModel
from zeroxla.mesh.axes import PIPE, as_auto
from zeroxla.step.checks import (
    check_is_config,
    check_is_optimizer,
    check_weights,
    checked_axis_names,
)
from zeroxla.step.notices import two_optimizers, useless_without_stages, warn
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step


def make_step(
    model: Any,
    mesh: Mesh,
    optimizer: optax.GradientTransformation | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    config: ZeroConfig | None = None,
    microbatches: int | None = None,
    weights: Literal["step", "tick"] = "step",
    axis_names: Mapping[str, str | Sequence[str]] | None = None,
    **misspelt: Never,
) -> Step:
    """Make the training step of a model on a mesh.

    Args:
      model: a flax.linen module, a function `rngs -> flax.nnx module` (an nnx module itself is
        accepted with a warning: it was allocated whole), or a pair `(init, loss)` with
        `init(key, batch) -> params` and `loss(params, batch, key) -> scalar | (scalar, metrics)`.
        It may also be one of these with adapters, from `zeroxla.lora`, or a `zeroxla.Pipeline`.
      mesh: a mesh with the axes `node` and `device`, see `make_mesh`.
      optimizer: any optax transformation, except those with a line search. None means AdamW with
        learning rate 3e-4.
      loss: `loss(apply, batch, *, train) -> scalar | (scalar, metrics)`, where `apply` calls the
        module. None means the module's own method `loss(batch, *, train)`.
      config: the options. None means `ZeroConfig()`, plain ZeRO-3.
      microbatches: number of micro-batches that a batch is cut into, by a pipeline or for gradient
        accumulation. None means `config.accumulate`; both above 1 must agree.
      weights: how often a stage of a pipeline gathers its leaves. "step": once in a step, and it
        keeps them whole. "tick": in every tick.
      axis_names: other names of mesh axes, for a model that sums over devices itself as models
        written for `pmap` do: `{"batch": ("node", "device")}` lets `BatchNorm(axis_name="batch")`
        and `psum(x, "batch")` mean all devices. A model may always name `node` and `device`.

    Returns:
      A `Step`.

    Raises:
      ValueError: an argument is of another kind than described, the mesh lacks an axis, the model
        has no loss, or an option is out of range.

    >>> import zeroxla, optax
    >>> from zeroxla.models import MLP
    >>> step = zeroxla.make_step(MLP.small(), zeroxla.make_mesh(nodes=1), optax.sgd(0.1))
    """
    check_keywords("make_step", misspelt, tuple(inspect.signature(make_step).parameters)[:-1])
    config = ZeroConfig() if config is None else config
    check_is_config(config)
    warn(two_optimizers(optimizer, config), stacklevel=3)
    optimizer = config.optimizer if optimizer is None else optimizer
    if optimizer is None:
        optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=3e-4)
    check_is_optimizer(optimizer)
    pipeline = model if isinstance(model, StagedModel) else None
    mesh = as_auto(mesh, pipeline=pipeline is not None)
    check_weights(weights)
    if pipeline is not None and loss is not None:
        raise ValueError("a Pipeline has its own loss; leave out loss= of make_step")
    warn(useless_without_stages(weights, mesh.shape.get(PIPE, 1)), stacklevel=3)
    return Step(
        adapted=pipeline.adapted if pipeline else adapt(model, loss),
        mesh=mesh,
        optimizer=optimizer,
        config=config,
        pipeline=pipeline if mesh.shape.get(PIPE, 1) > 1 else None,
        weights=weights,
        axis_names=checked_axis_names(axis_names, num_stages=mesh.shape.get(PIPE, 1)),
        microbatches=microbatches,
    )


def init_from(
    step: Step,
    params: Any,
    key: jax.Array,
    batch: Any = None,
    *,
    model_state: Any = None,
    donate: bool = False,
) -> TrainState:
    """Make the state for given parameters: whole arrays, which are cast to float32, padded and
    split over the mesh one at a time. The rest is as `init` makes it.

    Args:
      step: a step of the model.
      params: the parameters, in natural shapes and any floating dtype: the `variables` of a
        linen module, an nnx module or its state, a nested dict, a dict of names ("a/b" or
        "a.b"), or the tree that a pair's `init` returns. Leaves are arrays of NumPy or JAX,
        split in any way, anything that is indexed like them (`np.memmap`), or functions without
        arguments that return one. `params` may also be one function of a leaf's name "a/b" and
        its shape. Each is called when its leaf is stored. For a model with adapters these are
        the parameters of its base, or of both. Parameters of another state are taken too.
      key: a PRNG key, as for `init`.
      batch: as for `init`. None means the batch that the step has last seen.
      model_state: the model's other collections or variables, if they are not in `params`, such
        as the `model_state` of another state. If neither has them, they are made as `init`
        makes them, with a warning if there are any.
      donate: take the memory of JAX arrays in `params`: arrays that are split as the state
        stores them become part of it, and others are deleted. Otherwise all are copied.

    Returns:
      The state before the first step.

    Raises:
      ValueError: there is no batch; a leaf is missing, unknown, or of another shape or dtype
        than the model's (all are named, with both shapes); or functions fail, in any process.

    Each of several processes gives the same arrays, and takes its own parts of them.

    Cost: one leaf beside the state and what is given. Of an array that is indexed, only the
    parts of this process's devices are read. Parameters on disk are written one by one.

    >>> import jax, numpy as np, optax, zeroxla
    >>> from zeroxla.models import MLP
    >>> step = zeroxla.make_step(MLP.tiny(), zeroxla.make_mesh(nodes=1), optax.sgd(0.1))
    >>> batch = {"image": np.zeros((8, 28, 28)), "label": np.zeros(8, int)}
    >>> zeros = lambda name, shape: np.zeros(shape)  # or read from a file
    >>> state = zeroxla.init_from(step, zeros, jax.random.key(0), batch)
    >>> round(float(step.eval(state, batch)["loss"]), 3)  # ln 10
    2.303
    """
    return step.init_from(params, key, batch, model_state=model_state, donate=donate)
