"""Learning from rewards (PPO, GRPO) on a training state that generates, and from pairs (DPO).

A name is imported when it is first used: the options of `zeroxla rlhf` need not wait for JAX.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:  # what follows in `_PLACES`, for those who read types
    from zeroxla.rlhf.advantages import gae, group_advantages, token_rewards, whiten
    from zeroxla.rlhf.dpo_objective import DpoSettings, dpo_loss, pair_shapes, preference_loss
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

_PLACES = {
    "advantages": (
        "gae",
        "group_advantages",
        "token_rewards",
        "whiten",
    ),
    "dpo_objective": (
        "DpoSettings",
        "dpo_loss",
        "pair_shapes",
        "preference_loss",
    ),
    "dpo_trainer": (
        "Dpo",
        "dpo",
    ),
    "loop": ("Loop",),
    "losses": (
        "entropy",
        "grpo_loss",
        "kl_estimate",
        "ppo_loss",
        "target_logprobs",
        "value_loss",
    ),
    "make": (
        "Storage",
        "make_loop",
    ),
    "objectives": (
        "actor_loss",
        "critic_loss",
    ),
    "pairs": ("Pairs",),
    "phase_sums": (
        "PhaseMemory",
        "PhasesMemory",
        "memory_by_phase",
    ),
    "policy": ("Policy",),
    "rewards": (
        "REWARDS",
        "ModelReward",
        "Reward",
        "TextReward",
    ),
    "rollouts": (
        "Rollouts",
        "minibatches",
    ),
    "settings": ("Settings",),
    "states": (
        "Scored",
        "States",
    ),
}
_PLACE_OF = {name: f"zeroxla.rlhf.{place}" for place, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> _Any:
    """Import what a public name stands for, once."""
    if name not in _PLACE_OF:
        raise AttributeError(f"module 'zeroxla.rlhf' has no attribute {name!r}")
    globals()[name] = getattr(_import_module(_PLACE_OF[name]), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
