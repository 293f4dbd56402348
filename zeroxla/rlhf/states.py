"""What passes from phase to phase of an iteration.

Shape letters: B rows, T targets of a row.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from zeroxla.step.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """What is trained, and what it must not stray from.

    Attributes:
      actor: the policy's state.
      critic: the critic's; None with GRPO.
      reference: the frozen reference's; None where that is the actor without its adapters.
    """

    actor: TrainState
    critic: TrainState | None = None
    reference: TrainState | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What rollouts were found to be worth.

    Attributes:
      scores_B: float32, of the reward.
      ref_logprobs_BT: float32, of the tokens under the reference.
      actor, critic: columns to train on; {} without a critic.
    """

    scores_B: np.ndarray
    ref_logprobs_BT: np.ndarray
    actor: dict[str, np.ndarray]
    critic: dict[str, np.ndarray]
