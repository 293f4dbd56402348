"""Reinforcement learning from rewards: PPO and GRPO on a training state that generates."""

from .advantages import gae, group_advantages, token_rewards, whiten
from .loop import Loop
from .losses import entropy, grpo_loss, kl_estimate, ppo_loss, target_logprobs, value_loss
from .make import Storage, make_loop
from .memory import PhaseMemory, PhasesMemory, memory_by_phase
from .objectives import actor_loss, critic_loss
from .policy import Policy
from .rewards import REWARDS, ModelReward, Reward, TextReward
from .rollouts import Rollouts, minibatches
from .settings import Settings
from .states import Scored, States

__all__ = [  # noqa: RUF022 (grouped)
    # the loop
    "Loop",
    "Policy",
    "Scored",
    "Settings",
    "States",
    "Storage",
    "make_loop",
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
    "entropy",
    "gae",
    "group_advantages",
    "grpo_loss",
    "kl_estimate",
    "ppo_loss",
    "target_logprobs",
    "token_rewards",
    "value_loss",
    "whiten",
    # reports
    "PhaseMemory",
    "PhasesMemory",
    "memory_by_phase",
]
