"""A policy: a training step of a language model, with adapters or without."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from zeroxla.frontend.lora.model import LoraModel
from zeroxla.step.adapters import without_adapters
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
        """Return a state made from a copy of parameters.

        Args:
          params: parameters of the model without adapters, as `zeroxla.init_from` takes them.
          key: a PRNG key.
          model_state: see `zeroxla.init_from`.
        """
        return self.step.init_from(params, key, model_state=model_state)

    def without_adapters(self, state: TrainState) -> TrainState:
        """Return the state of a step with adapters, with adapters that change nothing."""
        assert self.adapters is not None, "the policy has no adapters"
        return without_adapters(state, self.adapters.plan)
