"""`dpo`: trains a policy on pairs of responses, without a reward and without generating."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.hybrid.engine import HybridEngine
from zeroxla.mesh.axes import PIPE
from zeroxla.mesh.batches import process_shard
from zeroxla.rlhf.dpo_objective import DpoSettings, pair_shapes, preference_loss
from zeroxla.rlhf.make import Storage
from zeroxla.rlhf.pairs import Pairs
from zeroxla.rlhf.policy import Policy
from zeroxla.rlhf.states import States
from zeroxla.step.make import make_step
from zeroxla.step.notices import two_optimizers, warn

_METRICS = ("loss", "margin", "accuracy", "chosen_reward", "rejected_reward", "grad_norm")


def dpo(
    model: Any,
    mesh: Mesh,
    settings: DpoSettings,
    *,
    optimizer: optax.GradientTransformation | None = None,
    storage: Storage | None = None,
    tensor: int = 1,
    config: ZeroConfig | None = None,
) -> Dpo:
    """Make a trainer by direct preference optimisation; see `Dpo.begin` and `Dpo.iterate`.

    Args:
      model: a language model: a flax module, or a function of rngs that returns one.
      mesh: the mesh of all steps, without stages.
      settings: the options.
      optimizer: the actor's optimizer. None means `config.optimizer`, and without one AdamW with
        learning rate 3e-4.
      storage: how actor and reference are stored. None: the actor whole, the reference in 8 bits.
        With a rank the reference is the actor without its adapters, and no second model is stored.
      tensor: number of devices that share a copy of the reference while it scores.
      config: the options of all steps.

    Raises:
      ValueError: the mesh has stages, rows are longer than the model's context or do not divide
        over the devices; or for the reasons of `make_step`, `lora` and `HybridEngine`.

    Source: DPO, arXiv 2305.18290.

    >>> import jax, numpy as np, optax, zeroxla
    >>> from zeroxla.models import GPT
    >>> mesh, model = zeroxla.make_mesh(nodes=1, devices_per_node=2), GPT.tiny(layers=1, width=16)
    >>> step = zeroxla.make_step(model, mesh)
    >>> params = step.init(jax.random.key(0), {"tokens": np.zeros((2, 9), int)}).params
    >>> trainer = dpo(model, mesh, DpoSettings(length=6, rows=2), storage=Storage(rank=2))
    >>> states = trainer.begin(params, jax.random.key(0))
    >>> pairs = Pairs.of([[1], [2]], [[3, 4], [5]], [[6], [7, 8]], length=6)
    >>> states, metrics = trainer.iterate(states, pairs)
    >>> round(metrics["loss"], 4)  # log 2: no margin yet
    0.6931
    """
    storage = storage or Storage()
    config = config or ZeroConfig()
    warn(two_optimizers(optimizer, config), stacklevel=3)
    optimizer = config.optimizer if optimizer is None else optimizer
    config = dataclasses.replace(config, optimizer=None)
    if mesh.shape.get(PIPE, 1) > 1:
        raise ValueError(
            f"dpo on a mesh of {mesh.shape[PIPE]} stages: chosen and rejected rows go through the "
            "model together, which stages do not cut; use make_mesh without pipe="
        )

    if config.outer is not None:
        raise ValueError(
            f"the config has outer={config.outer}, and this trainer's steps are called by "
            "themselves, not by an Island; leave outer out, or let islands train in zeroxla train"
        )

    adapters = None if storage.rank is None else storage.with_adapters(model)
    loss = preference_loss(settings)
    step = make_step(adapters or model, mesh, optimizer, loss=loss, config=config)
    actor, reference = Policy(step=step, adapters=adapters), None
    if adapters is None:
        reference = frozen_reference(model, mesh, settings, storage=storage, config=config)
    return Dpo(settings, actor=actor, reference=reference, tensor=tensor)


def frozen_reference(
    model: Any, mesh: Mesh, settings: DpoSettings, *, storage: Storage, config: ZeroConfig
) -> Policy:
    """Return the policy of a reference beside an actor that is trained whole; `begin` gives it the
    first weights.

    Args:
      model, mesh, settings, config: as for `dpo`.
      storage: `frozen` says in which form its dense leaves are stored.
    """
    still = None if storage.frozen is None else storage.with_adapters(model)
    step = make_step(
        still or model,
        mesh,
        optax.set_to_zero(),
        loss=preference_loss(settings),
        config=dataclasses.replace(config, optimizer=None),
    )
    return Policy(step=step, adapters=still)


class Dpo:
    """Trains an actor to prefer chosen responses to rejected ones.

    Attributes:
      settings: the options.
      actor: the policy that is trained.
      reference: the policy to which preferences are compared. None means the actor without its
        adapters.
      engine: scores with the state of the reference.
    """

    def __init__(
        self,
        settings: DpoSettings,
        *,
        actor: Policy,
        reference: Policy | None = None,
        tensor: int = 1,
    ) -> None:
        """Plan the engine. Nothing is computed with the models' weights.

        Args:
          settings: the options; the steps' losses must be made from them.
          actor: the policy to train; its step has `loss=preference_loss(settings)`.
          reference: the policy to compare with; its step has the same loss. None means the actor
            without its adapters.
          tensor: number of devices that share a copy of the reference while it scores.

        Raises:
          ValueError: there is no reference and no adapters, or rows are longer than the model's
            context; or for the reasons of `HybridEngine`.
        """
        if reference is None and actor.adapters is None:
            raise ValueError(
                "the actor has no adapters without which it would be its own reference; pass "
                "reference="
            )
        context = actor.context
        if context is not None and settings.length > context + 1:
            raise ValueError(
                f"length={settings.length} tokens of a row, and the model's context is {context}: "
                f"a row has one more at most, which is a target alone; use {context + 1} or less"
            )
        self.settings, self.actor, self.reference = settings, actor, reference
        shapes = pair_shapes(settings)
        for one in (actor, reference):
            if one is not None:
                one.step.abstract_state(shapes)  # an engine needs a step that has been traced
        self.engine = HybridEngine((reference or actor).step, tensor=tensor)

    def begin(self, params: Any, key: jax.Array, model_state: Any = None) -> States:
        """Make states from given parameters; actor and reference begin with the same ones.

        Args:
          params: parameters of the model without adapters, as `zeroxla.init_from` takes them. They
            are copied.
          key: a PRNG key.
          model_state: see `zeroxla.init_from`.
        """
        keys = jax.random.split(key)
        return States(
            actor=self.actor.begin(params, keys[0], model_state),
            reference=self.reference and self.reference.begin(params, keys[1], model_state),
        )

    def iterate(self, states: States, pairs: Pairs) -> tuple[States, dict[str, float]]:
        """Score pairs with the reference, and take one optimizer step on them.

        Args:
          states: the states. They are donated: use the returned ones.
          pairs: `settings.rows` pairs, the same ones in each process.

        Returns:
          The next states, and metrics: `loss`; `margin`, `accuracy`, `chosen_reward` and
          `rejected_reward`, as `dpo_loss` describes them; `grad_norm`; `skipped`, 1 if the loss or
          the gradient was not finite, so that the step changed nothing.

        Raises:
          ValueError: the pairs are not as described above.
        """
        return self.train(states, self.score(states, pairs))

    def score(self, states: States, pairs: Pairs) -> dict[str, np.ndarray]:
        """Return the columns of a batch: the pairs, and the log-probability of each response under
        the reference. They do not change while the actor learns: pairs that are trained on several
        times may be scored once.

        Raises:
          ValueError: the pairs do not have the settings' shape.
        """
        want = self.settings.rows, self.settings.length
        if pairs.chosen_BL.shape != want or pairs.rejected_BL.shape != want:
            raise ValueError(
                f"pairs of rows {pairs.chosen_BL.shape} and {pairs.rejected_BL.shape} are not the "
                f"rows={want[0]} of length={want[1]} of the settings; make them with "
                f"Pairs.of(..., length={want[1]})"
            )
        state = states.reference
        if state is None:
            state = self.actor.without_adapters(states.actor)
        rows = np.concatenate([pairs.chosen_BL, pairs.rejected_BL])
        masks = np.concatenate([pairs.chosen_mask_BT, pairs.rejected_mask_BT])
        counts_B = self.settings.of_rows(self.engine.logprobs(state, rows), masks)
        chosen_B, rejected_B = np.split(counts_B.astype(np.float32), 2)
        return {
            "chosen": pairs.chosen_BL,
            "rejected": pairs.rejected_BL,
            "chosen_mask": pairs.chosen_mask_BT,
            "rejected_mask": pairs.rejected_mask_BT,
            "ref_chosen": chosen_B,
            "ref_rejected": rejected_B,
        }

    def train(
        self, states: States, columns: Mapping[str, np.ndarray]
    ) -> tuple[States, dict[str, float]]:
        """Take one optimizer step on scored pairs; see `iterate`."""
        step = self.actor.step
        index, count = process_shard(step.mesh)
        batch = step.place({name: np.split(x, count)[index] for name, x in columns.items()})
        actor, metrics = step(states.actor, batch)
        values = jax.device_get({name: metrics[name] for name in (*_METRICS, "finite")})
        found = {name: float(values[name]) for name in _METRICS}
        found["skipped"] = float(not values["finite"])
        return dataclasses.replace(states, actor=actor), found
