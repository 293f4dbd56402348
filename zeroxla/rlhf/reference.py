"""The reference policy: what the actor must not stray from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from zeroxla.hybrid.engine import HybridEngine
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

    def logprobs(self, actor: TrainState, tokens_BL: np.ndarray) -> np.ndarray:
        """Return the log-probability of each token but the first, float32[B, T]."""
        return self.engine.logprobs(self.state_of(actor), tokens_BL)
