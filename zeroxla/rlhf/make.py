"""`make_loop`: actor, reference and critic of one model, from one set of parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import optax
from jax.sharding import Mesh

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.frontend.lora.at_rest import Frozen
from zeroxla.frontend.lora.model import LoraModel, lora
from zeroxla.rlhf.loop import Loop
from zeroxla.rlhf.objectives import actor_loss, critic_loss
from zeroxla.rlhf.policy import Policy
from zeroxla.rlhf.rewards import Reward
from zeroxla.rlhf.settings import Settings
from zeroxla.step.make import make_step

TARGETS = r"(attn|mlp)/(.*/)?kernel$"
"""The kernels of attention and perceptrons, in the names of `models.GPT` and `models.Llama`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """How the actor and the reference are stored."""

    frozen: Frozen | None = "int8"
    """Of the reference, and of the base of an actor with adapters: the dense leaves in 8 bits
    ("int8"), in 4 ("int4"), or as float32 (None)."""
    rank: int | None = None
    """Of the actor's adapters: it is the frozen reference with adapters, and both are stored once.
    None: the actor is trained whole, the reference stands beside it."""
    alpha: float = 16.0
    """The adapters count alpha / rank times."""
    targets: str = TARGETS
    """A regular expression of leaf paths: those with adapters. See `zeroxla.lora`."""

    def with_adapters(self, model: Any) -> LoraModel:
        """Return the model with the actor's adapters, or with the smallest: those of a reference,
        which stay zero."""
        return lora(
            model,
            targets=self.targets,
            rank=1 if self.rank is None else self.rank,
            alpha=self.alpha,
            frozen=self.frozen,
        )


def make_loop(
    model: Any,
    mesh: Mesh,
    settings: Settings,
    *,
    reward: Reward,
    optimizer: optax.GradientTransformation | None = None,
    critic_optimizer: optax.GradientTransformation | None = None,
    storage: Storage | None = None,
    tensor: int = 1,
    config: ZeroConfig | None = None,
) -> Loop:
    """Make a loop whose actor, reference and critic are of one model; see `Loop.begin`.

    Args:
      model: a flax module, or a function of rngs that returns one: a language model.
      mesh: of all steps.
      settings: the options.
      reward: scores responses, see `TextReward`, `ModelReward`.
      optimizer: of the actor; AdamW with learning rate 3e-4 if None.
      critic_optimizer: of the critic of PPO; the same if None.
      storage: of actor and reference; None: the actor whole, the reference in 8 bits.
      tensor: devices that share a copy of a model that generates or scores.
      config: of all steps.

    Raises:
      ValueError: as `Loop`, `make_step` and `lora`.

    >>> import jax, numpy as np, zeroxla
    >>> from zeroxla.models import GPT
    >>> mesh, model = zeroxla.make_mesh(nodes=1, devices_per_node=2), GPT.tiny(layers=1, width=16)
    >>> step = zeroxla.make_step(model, mesh)
    >>> params = step.init(jax.random.key(0), {"tokens": np.zeros((2, 9), int)}).params
    >>> settings = Settings(prompt_length=2, new_tokens=4, rows=8, group=4)
    >>> def length(rollouts):
    ...     return rollouts.lengths_B
    >>> loop = make_loop(model, mesh, settings, reward=length)
    >>> states = loop.begin(params, jax.random.key(0))
    >>> states, metrics = loop.iterate(states, [[1, 2], [3]], jax.random.key(1))
    >>> metrics["reward"]
    4.0
    """
    storage = storage or Storage()
    loss = actor_loss(settings)

    def policy(adapters: LoraModel | None, optimizer: Any) -> Policy:
        step = make_step(adapters or model, mesh, optimizer, loss=loss, config=config)
        return Policy(step=step, adapters=adapters)

    actor = policy(None if storage.rank is None else storage.with_adapters(model), optimizer)
    reference = critic = None
    if storage.rank is None:
        still = None if storage.frozen is None else storage.with_adapters(model)
        reference = policy(still, optax.set_to_zero())
    if settings.algorithm == "ppo":
        critic = make_step(model, mesh, critic_optimizer, loss=critic_loss(settings), config=config)
    return Loop(
        settings, actor=actor, reference=reference, critic=critic, reward=reward, tensor=tensor
    )
