"""A policy: a training step of a language model, with adapters or without."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.frontend.lora.leaf_plan import LORA
from zeroxla.frontend.lora.model import LoraModel
from zeroxla.offload.disk.disk_array import DiskArray, in_memory
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A step of a language model.

    Attributes:
      step: its training step, with a loss of `objectives`.
      adapters: the step's model if `zeroxla.lora` made it, otherwise None.
    """

    step: Step
    adapters: LoraModel | None = None

    @property
    def context(self) -> int | None:
        """The longest sequence that the model takes; None if it does not say."""
        adapted = self.step.adapted
        return (adapted.base or adapted).context

    def begin(self, params: Any, key: jax.Array, model_state: Any = None) -> TrainState:
        """Return a state made from a copy of parameters, because a step takes the memory of its
        state.

        Args:
          params: parameters of the model without adapters, on the same mesh and config. Those on
            disk are read one after another.
          key: a PRNG key.
          model_state: see `Step.init_from`.
        """
        if self.adapters is None:
            params = jax.tree.map(lambda x: functools.partial(_copy, x), params)
            return self.step.init_from(params, key, model_state)
        params = jax.tree.map(lambda x: x if isinstance(x, DiskArray) else jnp.copy(x), params)
        return self.adapters.init_from(self.step, params, key, model_state)


def _copy(x: jax.Array | DiskArray) -> jax.Array:
    return in_memory(x) if isinstance(x, DiskArray) else jnp.copy(x)


def without_adapters(state: TrainState) -> TrainState:
    """Return a state with its adapters at zero and the same arrays as base."""
    zeros = jax.tree.map(jnp.zeros_like, state.params[LORA])
    return dataclasses.replace(state, params={**state.params, LORA: zeros})
