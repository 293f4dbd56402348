"""The options of reinforcement learning, and how sequences are laid out under them."""

from __future__ import annotations

import dataclasses
from typing import Literal

KL = {"ppo": 0.003, "grpo": 0.05}
"""Default penalty per nat of divergence, by algorithm."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How one iteration generates, scores and trains.

    Responses are drawn at temperature 1 from all tokens: the policy that is trained is the one that
    is sampled, and importance ratios begin at 1.
    """

    algorithm: Literal["ppo", "grpo"] = "grpo"
    """ppo: a critic, generalized advantage estimation, divergence in the rewards. grpo: advantages
    within groups of responses to the same prompt, divergence in the loss, no critic."""
    prompt_length: int
    """The most tokens of a prompt."""
    new_tokens: int
    """The most tokens of a response."""
    rows: int
    """Number of responses in an iteration, over all devices and groups."""
    group: int = 8
    """Number of responses to each prompt. It divides `rows`. PPO needs only 1."""
    minibatch: int | None = None
    """Number of rows in an optimizer step. It divides `rows`. None means all rows."""
    epochs: int = 1
    """How often an iteration's rows are trained on."""
    clip: float = 0.2
    """The ratio to the policy that drew a token counts within 1 - this and 1 + this."""
    kl: float | None = None
    """Penalty per nat of divergence from the reference. None means 0.003 for PPO and 0.05 for GRPO.
    PPO pays at each token, and 0.003 suits scores between 0 and 1. GRPO pays for the mean over a
    response, and 0.05 suits its advantages of about 1."""
    entropy: float = 0.0
    """Bonus per nat of the policy's entropy."""
    gamma: float = 1.0
    """Discount of PPO: a reward counts this many times as much one token earlier."""
    lam: float = 0.95
    """Lambda of PPO's generalized advantage estimation."""
    value_clip: float = 0.2
    """How far a value of PPO's critic may move in an iteration."""
    eos: int | None = None
    """The token that ends a response. None: all responses have `new_tokens` tokens."""
    pad: int = 0
    """The token after a row's end. Nothing depends on it."""

    def __post_init__(self) -> None:
        if self.algorithm not in ("ppo", "grpo"):
            raise ValueError(f"algorithm={self.algorithm!r}; choose 'ppo' or 'grpo'")
        for name in ("prompt_length", "new_tokens", "rows", "group", "minibatch", "epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be 1 or more")
        for name in ("kl", "entropy"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name}={value} must be 0 or more")
        for name in ("clip", "value_clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie between 0 and 1")
        if self.algorithm == "grpo" and self.group < 2:
            raise ValueError(
                "group=1: GRPO compares responses to the same prompt; give 2 or more, or "
                "algorithm='ppo'"
            )
        for name, size in (("group", self.group), ("minibatch", self.minibatch or self.rows)):
            if self.rows % size:
                raise ValueError(
                    f"rows={self.rows} do not divide into {name}={size}; use a divisor of "
                    f"{self.rows}"
                )

    @property
    def kl_cost(self) -> float:
        """Penalty per nat of divergence."""
        return KL[self.algorithm] if self.kl is None else self.kl

    @property
    def num_prompts(self) -> int:
        """Number of prompts in an iteration."""
        return self.rows // self.group

    @property
    def length(self) -> int:
        """L, the number of tokens in a row."""
        return self.prompt_length + self.new_tokens

    @property
    def minibatch_rows(self) -> int:
        """Number of rows in an optimizer step."""
        return self.minibatch or self.rows
