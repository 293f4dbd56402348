"""A policy: a training step of a language model, with adapters or without."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.frontend.lora.leaf_plan import LORA
from zeroxla.frontend.lora.model import LoraModel
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A step of a language model.

    Attributes:
      step: with a loss of this package.
      adapters: the step's model, if it is one that `zeroxla.lora` made.
    """

    step: Step
    adapters: LoraModel | None = None

    @property
    def context(self) -> int | None:
        """The longest sequence that the model takes, if it says so."""
        adapted = self.step.adapted
        return (adapted.base or adapted).context

    def begin(self, params: Any, key: jax.Array) -> TrainState:
        """Return a state on a copy of parameters: a step takes the memory of those it is given.

        Args:
          params: of the model without adapters, of the same mesh and config.
          key: a PRNG key.
        """
        params = jax.tree.map(jnp.copy, params)
        if self.adapters is None:
            return self.step.init_from(params, key)
        return self.adapters.init_from(self.step, params, key)


def without_adapters(state: TrainState) -> TrainState:
    """Return a state with its adapters at zero; the base is the same arrays."""
    zeros = jax.tree.map(jnp.zeros_like, state.params[LORA])
    return dataclasses.replace(state, params={**state.params, LORA: zeros})
