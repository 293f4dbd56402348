"""`--metric MODULE:FUNCTION`: metrics of the user's own, computed in evaluations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.cli.named_object import named_object
from zeroxla.cli.train.model import alexnet
from zeroxla.cli.train.options import TrainOptions
from zeroxla.frontend import adapt
from zeroxla.frontend.base import Adapted, AdaptsItself
from zeroxla.frontend.staged import StagedModel

Metric = Callable[[jax.Array, Mapping[str, jax.Array]], Any]


def with_metrics(
    model: Any, metrics: Mapping[str, Metric], options: TrainOptions, *, preferences: bool
) -> Any:
    """Return a run's model, whose evaluation then has metrics besides the loss.

    Args:
      model: the model, as `make_step` takes it.
      metrics: the metrics, as `named_metrics` returns them; without any, the model is returned.
      options: the run's options.
      preferences: whether the run learns from preferences.

    Raises:
      ValueError: its evaluation has no logits that a function can take.
    """
    if not metrics:
        return model
    if preferences:
        raise ValueError(
            "--metric: the loss of preferences is of the sums of two responses, and margin and "
            "accuracy are shown anyway; leave it out"
        )
    if options.pipeline.pipe > 1:
        raise ValueError(
            f"--metric with --pipe {options.pipeline.pipe}: the logits are in the last stage only; "
            "leave one of them out"
        )
    if options.model.model == "alexnet":
        return WithMetrics(model, metrics, image_inputs, alexnet(options))
    return WithMetrics(model, metrics, text_inputs)


def named_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Return the functions that `--metric` names, by their own names.

    Raises:
      ValueError: a name stands for nothing that can be called, or two functions have one name.
    """
    found: dict[str, Metric] = {}
    for name in names:
        function, own = named_object(name, "--metric"), name.rpartition(":")[2].rpartition(".")[2]
        if not callable(function):
            raise ValueError(
                f"--metric {name}: {own} is a {type(function).__name__}; name a function of "
                "(logits, batch)"
            )
        if own in found or own in ("loss", "weight", "perplexity"):
            raise ValueError(f"--metric {name}: there is a metric {own} already; rename one")
        found[own] = function
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class WithMetrics(AdaptsItself):
    """A model for `make_step` whose evaluation has metrics besides the loss.

    Attributes:
      model: the model.
      metrics: functions of the logits of a batch and the batch, by name. They are traced. Each
        returns a number for each target, or for each image; the mean is over those that count.
      inputs: a function from a batch to the arguments with which the model is called.
      called: a module with the same parameters, if the model is a list of layers, which has no
        call.
    """

    model: Any
    metrics: Mapping[str, Metric]
    inputs: Callable[[Mapping[str, jax.Array]], tuple[Any, dict[str, Any]]]
    called: Any = None

    def adapt(self, loss: Callable[..., Any] | None) -> Adapted:
        """Return the model as pure functions; see `AdaptsItself`."""
        staged = isinstance(self.model, StagedModel)
        inner = self.model.adapted if staged else adapt(self.model, loss)
        apply = (inner if self.called is None else adapt(self.called)).apply
        assert apply is not None

        def measured(
            params: Any, model_state: Any, batch: Any, key: Any, *, train: bool
        ) -> tuple[jax.Array, dict[str, jax.Array], Any]:
            value, found, state = inner.loss(params, model_state, batch, key, train=train)
            if train:
                return value, found, state
            first, more = self.inputs(batch)
            logits = apply(params, model_state, first, **more)
            mask = batch.get("mask")
            shape = logits.shape[:-1]
            own = {
                name: _mean(name, metric(logits, batch), shape, mask)
                for name, metric in self.metrics.items()
            }
            return value, {**found, **own}, state

        return dataclasses.replace(inner, loss=measured)


def text_inputs(batch: Mapping[str, jax.Array]) -> tuple[Any, dict[str, Any]]:
    """Return the tokens of a batch of text, and the places and segments of packed rows."""
    names = {"positions": "positions_BL", "segments": "segments_BL"}
    more = {own: batch[name] for name, own in names.items() if name in batch}
    return batch["tokens"][:, :-1], more


def image_inputs(batch: Mapping[str, jax.Array]) -> tuple[Any, dict[str, Any]]:
    """Return the images of a batch."""
    return batch["image"], {}


def _mean(name: str, values: Any, shape: tuple[int, ...], mask: jax.Array | None) -> jax.Array:
    values = jnp.asarray(values).astype(jnp.float32)
    if values.shape != shape:
        raise ValueError(
            f"--metric {name} returned an array of shape {values.shape}; return one number for "
            f"each target, shape {shape}"
        )
    if mask is None:
        return values.mean()
    counted = (mask != 0).astype(jnp.float32)
    # What does not count may be anything, also NaN.
    return jnp.where(counted > 0, values, 0).sum() / jnp.maximum(counted.sum(), 1)
