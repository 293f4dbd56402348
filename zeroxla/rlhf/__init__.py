"""Learning from rewards (PPO, GRPO) on a training state that generates, and from pairs (DPO)."""

from zeroxla.rlhf.advantages import gae, group_advantages, token_rewards, whiten
from zeroxla.rlhf.dpo_loss import DpoSettings, dpo_loss, pair_shapes, preference_loss
from zeroxla.rlhf.dpo_trainer import Dpo, dpo
from zeroxla.rlhf.loop import Loop
from zeroxla.rlhf.losses import (
    entropy,
    grpo_loss,
    kl_estimate,
    ppo_loss,
    target_logprobs,
    value_loss,
)
from zeroxla.rlhf.make import Storage, make_loop
from zeroxla.rlhf.objectives import actor_loss, critic_loss
from zeroxla.rlhf.pairs import Pairs
from zeroxla.rlhf.phase_sums import PhaseMemory, PhasesMemory, memory_by_phase
from zeroxla.rlhf.policy import Policy
from zeroxla.rlhf.rewards import REWARDS, ModelReward, Reward, TextReward
from zeroxla.rlhf.rollouts import Rollouts, minibatches
from zeroxla.rlhf.settings import Settings
from zeroxla.rlhf.states import Scored, States

__all__ = [  # noqa: RUF022 (grouped)
    # the loop
    "Loop",
    "Policy",
    "Scored",
    "Settings",
    "States",
    "Storage",
    "make_loop",
    # preferences
    "Dpo",
    "DpoSettings",
    "Pairs",
    "dpo",
    # rewards
    "REWARDS",
    "ModelReward",
    "Reward",
    "TextReward",
    # rollouts
    "Rollouts",
    "minibatches",
    # advantages and losses, as functions
    "actor_loss",
    "critic_loss",
    "dpo_loss",
    "entropy",
    "gae",
    "group_advantages",
    "grpo_loss",
    "kl_estimate",
    "pair_shapes",
    "ppo_loss",
    "preference_loss",
    "target_logprobs",
    "token_rewards",
    "value_loss",
    "whiten",
    # reports
    "PhaseMemory",
    "PhasesMemory",
    "memory_by_phase",
]
