"""`make_step`: the training step of any Flax model on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import optax
from jax.sharding import Mesh

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
        axis_names=checked_axis_names(axis_names),
        microbatches=microbatches,
    )
