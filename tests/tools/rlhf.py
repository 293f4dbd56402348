"""A tiny model, loops that train it, and a simple reward, for the tests of `zeroxla.rlhf`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zeroxla
from zeroxla import ZeroConfig, rlhf
from zeroxla.models import GPT
from zeroxla.step.state import TrainState

VOCAB, WANTED = 16, 3
PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9]]
CONFIG = ZeroConfig(persistence_threshold=0)


def settings(algorithm: str, **options: object) -> rlhf.Settings:
    """Return settings for 16 responses of up to 6 tokens to prompts of up to 3: 4 prompts with 4
    responses each for "grpo", 16 prompts otherwise."""
    group = 4 if algorithm == "grpo" else 1
    usual = {"prompt_length": 3, "new_tokens": 6, "rows": 16, "group": group, "minibatch": 8}
    return rlhf.Settings(algorithm=algorithm, **{**usual, **options})


def prompts(chosen: rlhf.Settings) -> list[list[int]]:
    return [PROMPTS[i % len(PROMPTS)] for i in range(chosen.num_prompts)]


def share_of_wanted(rollouts: rlhf.Rollouts) -> np.ndarray:
    """Return a reward that is easy to learn: the share of one token in each response."""
    return np.array([np.mean(row == WANTED) for row in rollouts.responses()], np.float32)


@dataclasses.dataclass(frozen=True)
class Begun:
    """A model, a loop, and its first states. Each test takes copies of the states."""

    model: object
    params: object
    loop: rlhf.Loop
    first: rlhf.States

    def states(self) -> rlhf.States:
        return rlhf.States(
            actor=jax.tree.map(jnp.copy, self.first.actor),
            critic=jax.tree.map(jnp.copy, self.first.critic),
            reference=self.first.reference,  # which nothing takes
        )

    def iterate(self, num_iterations: int, seed: int = 0) -> tuple[rlhf.States, list[dict]]:
        """Return the states after some iterations, and the metrics of each."""
        states, found = self.states(), []
        for i in range(num_iterations):
            key = jax.random.fold_in(jax.random.key(seed), i)
            states, metrics = self.loop.iterate(states, prompts(self.loop.settings), key)
            found.append(metrics)
        return states, found


def model(width: int = 16) -> GPT:
    return GPT.tiny(vocab=VOCAB, length=16, layers=1, width=width, heads=2, scan=False)


def wide() -> GPT:
    """Return a model with kernels large enough to be stored in 8 or 4 bits."""
    return model(width=64)


def num_wires(state: TrainState) -> int:
    """Return the number of leaves that are stored in 8 or 4 bits."""
    return sum(x.dtype == np.uint8 for x in jax.tree.leaves(state.params))


def begin(
    mesh: jax.sharding.Mesh,
    chosen: rlhf.Settings,
    *,
    reward: rlhf.Reward = share_of_wanted,
    module: object = None,
    config: ZeroConfig = CONFIG,
    **options: object,
) -> Begun:
    mine = module or model()
    plain = zeroxla.make_mesh(nodes=1, devices_per_node=2)
    step = zeroxla.make_step(mine, plain, optax.set_to_zero(), config=CONFIG)
    batch = {"tokens": np.zeros((8, 9), np.int32)}
    state = step.init(jax.random.key(0), batch)
    loop = rlhf.make_loop(
        mine,
        mesh,
        chosen,
        reward=reward,
        optimizer=optax.adam(3e-2),
        critic_optimizer=optax.adam(1e-2),
        config=config,
        **options,
    )
    states = loop.begin(state.params, jax.random.key(1))
    return Begun(mine, zeroxla.full_params(state), loop, states)
