"""`make_loop`: a loop whose actor, reference and critic are built from one model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import optax
from jax.sharding import Mesh

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.frontend.lora.at_rest import Frozen
from zeroxla.frontend.lora.leaf_plan import NoTargetError
from zeroxla.frontend.lora.model import LoraModel, lora
from zeroxla.mesh.axes import PIPE
from zeroxla.pipeline.pipeline import Pipeline
from zeroxla.rlhf.loop import Loop
from zeroxla.rlhf.objectives import actor_loss, critic_loss
from zeroxla.rlhf.policy import Policy
from zeroxla.rlhf.rewards import Reward
from zeroxla.rlhf.settings import Settings
from zeroxla.step.make import make_step
from zeroxla.step.notices import two_optimizers, warn
from zeroxla.step.step import Step

TARGETS = r"(attn|mlp)/(.*/)?kernel$"
"""It finds the kernels of attention and perceptrons by the names in `models.GPT` and
`models.Llama`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """How the actor and the reference are stored."""

    frozen: Frozen | None = "int8"
    """Form of the dense leaves of the reference, which is also the base of an actor with adapters:
    8 bits ("int8"), 4 bits ("int4"), or float32 (None). Leaves with fewer than 4096 elements in a
    layer stay float32. If those are all, "int4" warns; "int8" does not, as it is the default."""
    rank: int | None = None
    """Rank of the actor's adapters. The actor is then the frozen reference with adapters, and the
    reference is stored once. None: the actor is trained whole, beside a reference of its own."""
    alpha: float = 16.0
    """The adapters count alpha / rank times."""
    rank_stabilized: bool = False
    """The adapters count alpha / sqrt(rank) times instead; see `zeroxla.lora`."""
    dora: bool = False
    """The adapters train the norms of columns, too; see `zeroxla.lora`."""
    targets: str = TARGETS
    """A regular expression that finds the paths of leaves with adapters. See `zeroxla.lora`."""

    def with_adapters(self, model: Any) -> LoraModel:
        """Return the model with the actor's adapters. A reference has the smallest ones, which stay
        zero."""
        made = lora(
            model,
            targets=self.targets,
            rank=1 if self.rank is None else self.rank,
            alpha=self.alpha,
            rank_stabilized=self.rank_stabilized,
            dora=self.dora and self.rank is not None,
            frozen=self.frozen,
        )
        return dataclasses.replace(made, asked=self.frozen != "int8", traced=[])


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
    pipeline: Mapping[str, Any] | None = None,
) -> Loop:
    """Make a loop whose actor, reference and critic are built from one model; see `Loop.begin`.

    Args:
      model: a language model: a flax module, or a function of rngs that returns one.
      mesh: the mesh of all steps.
      settings: the options.
      reward: scores responses; see `TextReward` and `ModelReward`.
      optimizer: the actor's optimizer. None means `config.optimizer`, and without one AdamW with
        learning rate 3e-4.
      critic_optimizer: the optimizer of PPO's critic. None means `optimizer`.
      storage: how actor and reference are stored. None: the actor whole, the reference in 8 bits.
      tensor: number of devices that share a copy of a model while it generates or scores.
      config: the options of all steps.
      pipeline: on a mesh with stages, options of `Pipeline.from_model`, such as `schedule`, and
        `weights` of `make_step`. A step has `config.accumulate` micro-batches.

    Raises:
      ValueError: for the reasons of `Loop`, `make_step`, `Pipeline.from_model` and `lora`; or
        there are options of pipelines, and no stages.

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
    config = config or ZeroConfig()
    warn(two_optimizers(optimizer, config), stacklevel=3)
    optimizer = config.optimizer if optimizer is None else optimizer
    critic_optimizer = optimizer if critic_optimizer is None else critic_optimizer
    config = dataclasses.replace(config, optimizer=None)
    staged = mesh.shape.get(PIPE, 1) > 1
    if pipeline and not staged:
        raise ValueError(f"pipeline={dict(pipeline)!r} on a mesh without stages; make_mesh(pipe=2)")

    own = dict(pipeline or {})
    weights = own.pop("weights", "step")

    def step_of(model: Any, optimizer: Any, loss: Any) -> Step:
        if staged:
            model, loss = Pipeline.from_model(model, loss, **own), None
        return make_step(model, mesh, optimizer, loss=loss, config=config, weights=weights)

    def policy(adapters: LoraModel | None, optimizer: Any) -> Policy:
        step = step_of(adapters or model, optimizer, actor_loss(settings))
        return Policy(step=step, adapters=adapters)

    actor = policy(None if storage.rank is None else storage.with_adapters(model), optimizer)
    reference = critic = None
    if storage.rank is None:
        still = None if storage.frozen is None else storage.with_adapters(model)
        reference = policy(still, optax.set_to_zero())
    if settings.algorithm == "ppo":
        critic = step_of(model, critic_optimizer, critic_loss(settings))
    try:
        return Loop(
            settings, actor=actor, reference=reference, critic=critic, reward=reward, tensor=tensor
        )
    except NoTargetError as error:
        if storage.rank is not None:
            raise
        raise ValueError(
            f"the reference cannot be stored as {storage.frozen}, because {error}; store it as "
            "float32 with Storage(frozen=None) (--reference float32), or name dense leaves of this "
            "model with Storage(targets=...) (--lora-targets)"
        ) from error
