"""`make_loop`: actor, reference and critic of one model, from one set of parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zeroxla.config import ZeroConfig
from zeroxla.hybrid.engine import HybridEngine
from zeroxla.make import make_step
from zeroxla.rlhf.loop import Loop, States
from zeroxla.rlhf.objectives import actor_loss, batch_shapes, critic_loss
from zeroxla.rlhf.reference import Reference
from zeroxla.rlhf.rewards import Reward
from zeroxla.rlhf.settings import Settings
from zeroxla.step import Step


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
      tensor: devices that share a copy of a model that generates or scores.
      config: of all steps.

    Returns:
      (the loop, its first states).

    Raises:
      ValueError: as `Loop` and `make_step`.

    Cost: the actor's state, of PPO the critic's, and the reference, split over all devices.
    """
    losses = actor_loss(settings), critic_loss(settings)
    actor = make_step(model, mesh, optimizer, loss=losses[0], config=config)
    critic = None
    if settings.algorithm == "ppo":
        critic = make_step(model, mesh, critic_optimizer, loss=losses[1], config=config)
    reference = kept_reference(model, mesh, params, settings, key=key, tensor=tensor, config=config)
    loop = Loop(
        settings, actor=actor, critic=critic, reference=reference, reward=reward, tensor=tensor
    )
    states = States(
        actor=_on(actor, params, jax.random.fold_in(key, 0)),
        critic=None if critic is None else _on(critic, params, jax.random.fold_in(key, 1)),
    )
    return loop, states


def kept_reference(
    model: Any,
    mesh: Mesh,
    params: Any,
    settings: Settings,
    *,
    key: jax.Array,
    tensor: int = 1,
    config: ZeroConfig | None = None,
) -> Reference:
    """Return a reference with a copy of the parameters, see `make_loop`."""
    step = make_step(model, mesh, optax.set_to_zero(), loss=actor_loss(settings), config=config)
    step.abstract_state(batch_shapes(settings))
    return Reference.kept(HybridEngine(step, tensor=tensor), _on(step, params, key))


def _on(step: Step, params: Any, key: jax.Array) -> Any:
    """Return a state on a copy of parameters: a step takes the memory of those that it is given."""
    return step.init_from(jax.tree.map(jnp.copy, params), key)
