"""The reference policy: what the actor must not stray from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.hybrid.engine import HybridEngine
from zeroxla.low_rank.plan import LORA
from zeroxla.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A policy that is not trained.

    Attributes:
      engine: of its step.
      state_of: the actor's state to the reference's: one that is kept beside the actor's, or, where
        the actor is a frozen base with adapters, that base.
    """

    engine: HybridEngine
    state_of: Callable[[TrainState], TrainState]

    @staticmethod
    def kept(engine: HybridEngine, state: TrainState) -> Reference:
        """Return the reference whose state is kept beside the actor's."""
        return Reference(engine=engine, state_of=lambda actor: state)

    @staticmethod
    def base_of_actor(engine: HybridEngine) -> Reference:
        """Return the reference that is the actor itself without its adapters, which costs nothing.

        Args:
          engine: of the actor's step.
        """
        return Reference(engine=engine, state_of=without_adapters)

    def logprobs(self, actor: TrainState, tokens_BL: np.ndarray) -> np.ndarray:
        """Return the log-probability of each token but the first, float32[B, T]."""
        return self.engine.logprobs(self.state_of(actor), tokens_BL)


def without_adapters(state: TrainState) -> TrainState:
    """Return a state with its adapters at zero; the base is the same arrays."""
    zeros = jax.tree.map(jnp.zeros_like, state.params[LORA])
    return dataclasses.replace(state, params={**state.params, LORA: zeros})
