"""`Loop`: iterations of reinforcement learning that generate, score and train, each phase timed.

Shape letters: B rows, L tokens of a row, T = L - 1 targets.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.hybrid.engine import HybridEngine
from zeroxla.mesh.batches import process_shard
from zeroxla.rlhf.advantages import gae, group_advantages, token_rewards, whiten
from zeroxla.rlhf.objectives import batch_shapes, critic_shapes
from zeroxla.rlhf.policy import Policy
from zeroxla.rlhf.rewards import Reward, checked
from zeroxla.rlhf.rollouts import Prompts, Rollouts, minibatches
from zeroxla.rlhf.settings import Settings
from zeroxla.rlhf.states import Scored, States
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step

PHASES = ("generate", "score", "train")


class Loop:
    """Trains an actor on the rewards of its own responses.

    Attributes:
      settings: the options.
      actor: the policy that is trained.
      reference: the policy that the actor must not stray from. None means the actor without its
        adapters.
      critic: the step of the critic. None with GRPO.
      engine: generates from the actor's state.
      reference_engine, critic_engine: score with the states of reference and critic.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        actor: Policy,
        reward: Reward,
        reference: Policy | None = None,
        critic: Step | None = None,
        tensor: int = 1,
    ) -> None:
        """Plan the engines. Nothing is computed with the models' weights.

        Args:
          settings: the options; the steps' losses must be made from them.
          actor: the policy to train; its step has `loss=actor_loss(settings)`.
          reward: scores responses.
          reference: the policy to which the divergence is taken; its step has the same loss. None
            means the actor without its adapters.
          critic: a step with `loss=critic_loss(settings)`. Only PPO has one.
          tensor: number of devices that share a copy of a model while it generates or scores; see
            `HybridEngine`.

        Raises:
          ValueError: there is a critic with GRPO or none with PPO, no reference and no adapters,
            rows are longer than the model's context or do not divide over the devices; or for the
            reasons of `HybridEngine`.
        """
        if (critic is None) == (settings.algorithm == "ppo"):
            raise ValueError(
                "PPO needs the step of a critic: pass critic="
                if critic is None
                else "GRPO has no critic; leave out critic=, or choose algorithm='ppo'"
            )
        if reference is None and actor.adapters is None:
            raise ValueError(
                "the actor has no adapters without which it would be its own reference; pass "
                "reference="
            )
        if actor.step.config.outer is not None:
            raise ValueError(
                f"the config has outer={actor.step.config.outer}: islands exchange one model while "
                "it trains, and an iteration trains an actor and a critic in turns, and generates "
                "in between; leave outer out"
            )
        context = actor.context
        if context is not None and settings.length > context:
            raise ValueError(
                f"prompt_length={settings.prompt_length} and new_tokens={settings.new_tokens} make "
                f"{settings.length} tokens, and the model's context is {context}; lower one of them"
            )
        self.settings, self.reward = settings, reward
        self.actor, self.reference, self.critic = actor, reference, critic

        def engine(step: Step, shapes: Any) -> HybridEngine:
            step.abstract_state(shapes)  # an engine needs a step that has been traced
            return HybridEngine(step, tensor=tensor)

        shapes = batch_shapes(settings)
        self.engine = self.reference_engine = engine(actor.step, shapes)
        if reference is not None:
            self.reference_engine = engine(reference.step, shapes)
        self.critic_engine = None
        if critic is not None:
            self.critic_engine = engine(critic, critic_shapes(settings))
        self._advantages: Any = jax.jit(partial(_advantages, settings))

    def begin(self, params: Any, key: jax.Array, model_state: Any = None) -> States:
        """Make states from given parameters; actor, critic and reference begin with the same ones.

        Args:
          params: the `params` of a state of the model without adapters, on the same mesh and made
            with the same config. They are copied.
          key: a PRNG key.
          model_state: the `model_state` of that state, if the model keeps any.

        Cost: memory for the actor's state, the critic's state and the reference's parameters, split
        over all devices.
        """
        keys = jax.random.split(key, 3)
        critic = None if self.critic is None else Policy(step=self.critic)
        return States(
            actor=self.actor.begin(params, keys[0], model_state),
            critic=critic and critic.begin(params, keys[1], model_state),
            reference=self.reference and self.reference.begin(params, keys[2], model_state),
        )

    def iterate(
        self, states: States, prompts: Prompts, key: jax.Array
    ) -> tuple[States, dict[str, float]]:
        """Generate responses, score them, and train on them.

        Args:
          states: the states of the steps. They are donated: use the returned ones.
          prompts: `settings.num_prompts` prompts of up to `settings.prompt_length` tokens, the same
            ones in each process. Each prompt gets `settings.group` responses.
          key: a PRNG key. Key, states and prompts determine the iteration.

        Returns:
          The next states, and metrics: `reward` and `reward_std` over the responses; `kl`, the mean
          of `logprobs - ref_logprobs` over their tokens; `length`, the mean number of tokens in a
          response; `loss`, `entropy`, `clipped` and `grad_norm` of the actor; `value_loss` of the
          critic; `skipped` and `value_skipped`, the numbers of optimizer steps of actor and critic
          whose loss or gradient was not finite, and which changed nothing; the seconds
          `generate_s`, `score_s` and `train_s`.

        Raises:
          ValueError: the prompts are not as described above, or the reward did not return a finite
            number for each response.
        """
        clock = _Clock()
        rollouts = self.generate(states, prompts, key)
        clock.lap("generate")
        scored = self.score(states, rollouts)
        clock.lap("score")
        states, trained = self.train(states, scored, key)
        clock.lap("train")
        count = rollouts.mask_BT.sum()
        # The plain mean, because `kl_estimate` has a heavy tail if the two are far apart.
        strayed_BT = rollouts.logprobs_BT - scored.ref_logprobs_BT
        metrics = {
            "reward": float(scored.scores_B.mean()),
            "reward_std": float(scored.scores_B.std()),
            "kl": float((strayed_BT * rollouts.mask_BT).sum() / count),
            "length": float(rollouts.lengths_B.mean()),
        }
        return states, {**metrics, **trained, **clock.seconds}

    def generate(self, states: States, prompts: Prompts, key: jax.Array) -> Rollouts:
        """Draw `settings.group` responses to each prompt; they are next to each other."""
        settings = self.settings
        if len(prompts) != settings.num_prompts:
            raise ValueError(
                f"{len(prompts)} prompts in groups of {settings.group} do not make the "
                f"rows={settings.rows} of the settings; pass {settings.num_prompts}"
            )
        if (longest := max(map(len, prompts))) > settings.prompt_length:
            raise ValueError(
                f"a prompt has {longest} tokens, more than prompt_length={settings.prompt_length}; "
                "cut it, or raise prompt_length"
            )
        rows: list[Any] = [prompt for prompt in prompts for _ in range(settings.group)]
        generated = self.engine.generate(
            states.actor,
            rows,
            key=key,
            max_new_tokens=settings.new_tokens,
            eos=settings.eos,
            pad=settings.pad,
        )
        return Rollouts.of(rows, generated, length=settings.length, pad=settings.pad)

    def score(self, states: States, rollouts: Rollouts) -> Scored:
        """Score rollouts; return the scores and the columns to train on."""
        tokens_BL, mask_BT = rollouts.tokens_BL, rollouts.mask_BT
        scores_B = checked(self.reward(rollouts), len(tokens_BL))
        # Numbers outside of responses mean nothing; 0 keeps them harmless.
        ref_BT = self.reference_engine.logprobs(self.reference_state(states), tokens_BL)
        ref_BT = ref_BT * mask_BT
        columns = {"tokens": tokens_BL, "mask": mask_BT}
        actor = {**columns, "logprobs": rollouts.logprobs_BT}
        critic: dict[str, np.ndarray] = {}
        if self.critic_engine is None:
            actor["advantages"] = np.asarray(
                group_advantages(jnp.asarray(scores_B), self.settings.group)
            )
            actor["ref_logprobs"] = ref_BT
        else:
            assert states.critic is not None
            values_BT = self.critic_engine.values(states.critic, tokens_BL)[:, :-1] * mask_BT
            advantages_BT, returns_BT = self._advantages(
                scores_B, rollouts.logprobs_BT, ref_BT, values_BT, mask_BT
            )
            actor["advantages"] = np.asarray(advantages_BT)
            critic = {**columns, "values": values_BT, "returns": np.asarray(returns_BT)}
        return Scored(scores_B=scores_B, ref_logprobs_BT=ref_BT, actor=actor, critic=critic)

    def reference_state(self, states: States) -> TrainState:
        """Return the state of the reference, which may be the actor's with adapters that change
        nothing."""
        if states.reference is not None:
            return states.reference
        return self.actor.without_adapters(states.actor)

    def train(
        self, states: States, scored: Scored, key: jax.Array
    ) -> tuple[States, dict[str, float]]:
        """Train the actor, and the critic if there is one, on scored rollouts."""
        actor, critic = states.actor, states.critic
        found: list[dict[str, Any]] = []
        for batch in self._minibatches(self.actor.step, scored.actor, key):
            actor, metrics = self.actor.step(actor, batch)
            found.append(metrics)
        names = [name for name in ("entropy", "clipped", "loss", "grad_norm") if name in found[0]]
        values = jax.device_get([{n: metrics[n] for n in (*names, "finite")} for metrics in found])
        trained = {name: float(np.mean([metrics[name] for metrics in values])) for name in names}
        trained["skipped"] = sum(not metrics["finite"] for metrics in values)
        if self.critic is not None:
            losses = []
            for batch in self._minibatches(self.critic, scored.critic, key):
                critic, metrics = self.critic(critic, batch)  # pyright: ignore[reportArgumentType]
                losses.append((metrics["loss"], metrics["finite"]))
            values = jax.device_get(losses)
            trained["value_loss"] = float(np.mean([loss for loss, _ in values]))
            trained["value_skipped"] = sum(not finite for _, finite in values)
        return dataclasses.replace(states, actor=actor, critic=critic), trained

    def _minibatches(
        self, step: Step, columns: dict[str, np.ndarray], key: jax.Array
    ) -> Iterator[Any]:
        settings = self.settings
        index, count = process_shard(step.mesh)
        seed = np.asarray(jax.random.key_data(key)).ravel().tolist()
        for batch in minibatches(
            columns, settings.minibatch_rows, epochs=settings.epochs, seed=seed
        ):
            mine = {name: np.split(x, count)[index] for name, x in batch.items()}
            yield step.place(mine)


def _advantages(
    settings: Settings,
    scores_B: jax.Array,
    logprobs_BT: jax.Array,
    ref_BT: jax.Array,
    values_BT: jax.Array,
    mask_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return PPO's whitened advantages and its returns."""
    rewards_BT = token_rewards(scores_B, logprobs_BT, ref_BT, mask_BT, kl=settings.kl_cost)
    advantages_BT, returns_BT = gae(
        rewards_BT, values_BT, mask_BT, gamma=settings.gamma, lam=settings.lam
    )
    return whiten(advantages_BT, mask_BT), returns_BT


class _Clock:
    """Measures the seconds of phases that follow each other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[f"{phase}_s"], self._last = now - self._last, now
