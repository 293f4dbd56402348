"""The states and arrays that pass from phase to phase of an iteration.

Shape letters: B rows, T targets of a row.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from zeroxla.step.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """The states of actor, critic and reference.

    Attributes:
      actor: the policy's state.
      critic: the critic's state. None with GRPO.
      reference: the frozen reference's state. None if the actor without its adapters is the
        reference.
    """

    actor: TrainState
    critic: TrainState | None = None
    reference: TrainState | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The scores of rollouts, and the columns to train on.

    Attributes:
      scores_B: float32, the reward of each response.
      ref_logprobs_BT: float32, log-probabilities of the tokens under the reference.
      actor, critic: the columns to train each of them on. `critic` is {} without a critic.
    """

    scores_B: np.ndarray
    ref_logprobs_BT: np.ndarray
    actor: dict[str, np.ndarray]
    critic: dict[str, np.ndarray]
