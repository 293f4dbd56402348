"""`make_loop`: actor, reference and critic of one model, from one set of parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zeroxla.config import ZeroConfig
from zeroxla.hybrid.engine import HybridEngine
from zeroxla.low_rank.at_rest import Frozen
from zeroxla.low_rank.model import LoraModel, lora
from zeroxla.make import make_step
from zeroxla.rlhf.loop import Loop, States
from zeroxla.rlhf.objectives import actor_loss, batch_shapes, critic_loss
from zeroxla.rlhf.reference import Reference
from zeroxla.rlhf.rewards import Reward
from zeroxla.rlhf.settings import Settings
from zeroxla.state import TrainState
from zeroxla.step import Step

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
            rank=self.rank or 1,
            alpha=self.alpha,
            frozen=self.frozen,
        )


def make_loop(
    model: Any,
    mesh: Mesh,
    params: Any,
    settings: Settings,
    *,
    reward: Reward,
    key: jax.Array,
    optimizer: optax.GradientTransformation | None = None,
    critic_optimizer: optax.GradientTransformation | None = None,
    storage: Storage | None = None,
    tensor: int = 1,
    config: ZeroConfig | None = None,
) -> tuple[Loop, States]:
    """Make a loop, and states on given parameters: actor, reference and critic begin alike.

    Args:
      model: a flax module, or a function of rngs that returns one: a language model.
      mesh: of all steps.
      params: the `params` of a state of the model on this mesh, made with this config; copied.
      settings: the options.
      reward: scores responses, see `TextReward`, `ModelReward`.
      key: a PRNG key of the states.
      optimizer: of the actor; AdamW with learning rate 3e-4 if None.
      critic_optimizer: of the critic of PPO; the same if None.
      storage: of actor and reference; None: the actor whole, the reference in 8 bits.
      tensor: devices that share a copy of a model that generates or scores.
      config: of all steps.

    Returns:
      (the loop, its first states).

    Raises:
      ValueError: as `Loop`, `make_step` and `lora`.

    Cost: the actor's state, of PPO the critic's, and the reference's parameters, all split over all
    devices; with adapters the reference's are the actor's.
    """
    storage = storage or Storage()
    keys = jax.random.split(key, 3)
    own = model if storage.rank is None else storage.with_adapters(model)
    actor = make_step(own, mesh, optimizer, loss=actor_loss(settings), config=config)
    critic = None
    if settings.algorithm == "ppo":
        critic = make_step(model, mesh, critic_optimizer, loss=critic_loss(settings), config=config)
    reference = None
    if storage.rank is None:
        still = model if storage.frozen is None else storage.with_adapters(model)
        step = make_step(still, mesh, optax.set_to_zero(), loss=actor_loss(settings), config=config)
        step.abstract_state(batch_shapes(settings))
        engine = HybridEngine(step, tensor=tensor)
        reference = Reference.kept(engine, state_on(still, step, params, keys[0]))
    loop = Loop(
        settings, actor=actor, critic=critic, reference=reference, reward=reward, tensor=tensor
    )
    states = States(
        actor=state_on(own, actor, params, keys[1]),
        critic=None if critic is None else state_on(model, critic, params, keys[2]),
    )
    return loop, states


def state_on(model: Any, step: Step, params: Any, key: jax.Array) -> TrainState:
    """Return a state on a copy of parameters: a step takes the memory of those that it is given.

    Args:
      model: of the step, which has seen a batch.
      step: whose state it is.
      params: of the model without adapters.
      key: a PRNG key.
    """
    params = jax.tree.map(jnp.copy, params)
    if isinstance(model, LoraModel):
        return model.init_from(step, params, key)
    return step.init_from(params, key)
