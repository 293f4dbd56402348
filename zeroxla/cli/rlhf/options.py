"""The options of `zeroxla rlhf`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zeroxla.cli.option_groups import OptionGroups, flag
from zeroxla.cli.train.options import (
    MeshOptions,
    ModelOptions,
    TextOptions,
    TrainingOptions,
    TrainOptions,
)
from zeroxla.rlhf.make import TARGETS, Storage
from zeroxla.rlhf.settings import Settings


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """The model, and what it has learned before it is rewarded: text, here, or in another run."""

    init_run: Path | None = None
    """Start from the newest checkpoint of this run of `zeroxla train`: its model, and its text for
    prompts."""
    data: tuple[str, ...] = ()
    """Files or folders of text; default: those of --init-run, else the Python files of the running
    interpreter's standard library."""
    pretrain_steps: int = 150
    """Steps of learning text before; without --init-run."""
    length: int = 64
    """The model's context in bytes."""
    layers: int = 2
    """Transformer blocks."""
    width: int = 64
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads; must divide the width."""


@dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """How actor and reference are stored."""

    reference: Literal["int8", "int4", "float32"] = "int8"
    """Of the frozen reference: its dense leaves in 8 bits, in 4, or all as float32."""
    lora_rank: int | None = None
    """Of the actor's adapters on the frozen reference, which is then its base. Default: none, the
    actor is trained whole."""
    lora_alpha: float = 16.0
    """The adapters count alpha / rank times."""
    lora_targets: str = TARGETS
    """A regular expression of leaf paths: those with adapters."""


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """What is rewarded, and how responses are drawn: at temperature 1, from all tokens."""

    algorithm: Literal["ppo", "grpo"] = "grpo"
    """ppo trains a critic beside the actor; grpo compares the responses to the same prompt."""
    reward: Literal["brackets", "vowels", "brief"] = "brackets"
    """Of a response: the share of characters in pairs of brackets; that of vowels; or
    1 / (1 + characters), which needs --eos."""
    prompt_length: int = 16
    """Tokens of a prompt: a piece of the text."""
    new_tokens: int = 16
    """The most tokens of a response."""
    rows: int = 64
    """Responses of an iteration, over all devices."""
    group_size: int | None = None
    """Responses to each prompt. Default: 8 with grpo, 1 with ppo."""
    eos: int | None = None
    """The token that ends a response, such as 10, the end of a line. Default: none."""


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """The optimization: Adam with clipping, at constant rates."""

    steps: int = 40
    """Iterations in all: each generates, scores and trains."""
    minibatch: int = 32
    """Rows of an optimizer step."""
    epochs: int = 2
    """How often an iteration's rows are trained on."""
    learning_rate: float = 1e-3
    """Of the actor."""
    critic_learning_rate: float = 3e-3
    """Of the critic of ppo."""
    kl: float | None = None
    """What a nat of divergence from the reference costs. Default: 0.05 with grpo, 0.003 with
    ppo."""
    ratio_clip: float = 0.2
    """How far the ratio to the policy that drew a token may count."""
    entropy: float = 0.0
    """What a nat of the actor's entropy is worth."""
    clip: float = 1.0
    """Global gradient norm to clip at; 0 for no clipping."""
    seed: int = 0
    """Seed of the parameters, the prompts and the responses."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How models lie while they generate and score."""

    tensor: int = 1
    """Devices of a node that share a copy."""


@dataclass(frozen=True, kw_only=True)
class RlhfRunOptions:
    """The run folder and checkpoints."""

    run: Path | None = None
    """The run folder. Default: a new one under runs/; with --resume the newest there."""
    resume: bool = False
    """Continue the run in the folder from its newest checkpoint, with its own options."""
    save_every: int = 20
    """Iterations between checkpoints; there is always one at the end and on Ctrl-C."""
    keep: int = 2
    """Checkpoints to keep."""
    samples: int = 4
    """Responses to print and to keep as text, before and after; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class RlhfOptions(OptionGroups):
    """Train a language model on a reward of its own responses, with PPO or GRPO: it generates from
    the training state, is scored, and trained, the state split over all devices.

    Without an accelerator the devices are simulated: 8 on this machine's CPU, as 2 nodes of 4.
    """

    start: StartOptions = field(default_factory=StartOptions)
    storage: StorageOptions = field(default_factory=StorageOptions)
    task: TaskOptions = field(default_factory=TaskOptions)
    learning: LearningOptions = field(default_factory=LearningOptions)
    mesh: MeshOptions = field(default_factory=MeshOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    output: RlhfRunOptions = field(default_factory=RlhfRunOptions)

    def __post_init__(self) -> None:
        self.check_at_least(
            {
                "start.pretrain_steps": 1,
                "start.length": 2,
                "task.prompt_length": 2,
                "learning.steps": 1,
                "learning.clip": 0,
                "learning.seed": 0,
                "engine.tensor": 1,
                "output.save_every": 1,
                "output.keep": 1,
                "output.samples": 0,
            }
        )
        for name in ("learning_rate", "critic_learning_rate"):
            if not getattr(self.learning, name) > 0:
                raise ValueError(f"{flag(name)} {getattr(self.learning, name)} must be above 0")
        if self.task.reward == "brief" and self.task.eos is None:
            raise ValueError(
                "--reward brief: without an end token all responses are equally long; give --eos, "
                "such as 10 for the end of a line"
            )
        # Refuse what they refuse.
        _ = self.settings, self.as_train(), self.as_storage().with_adapters(None)

    @property
    def settings(self) -> Settings:
        """The options of an iteration."""
        task, learning = self.task, self.learning
        default = 8 if task.algorithm == "grpo" else 1
        return Settings(
            algorithm=task.algorithm,
            prompt_length=task.prompt_length,
            new_tokens=task.new_tokens,
            rows=task.rows,
            group=default if task.group_size is None else task.group_size,
            minibatch=min(learning.minibatch, task.rows),
            epochs=learning.epochs,
            clip=learning.ratio_clip,
            kl=learning.kl,
            entropy=learning.entropy,
            eos=task.eos,
        )

    def as_storage(self) -> Storage:
        """Return how actor and reference are stored."""
        own = self.storage
        return Storage(
            frozen=None if own.reference == "float32" else own.reference,
            rank=own.lora_rank,
            alpha=own.lora_alpha,
            targets=own.lora_targets,
        )

    def as_train(self) -> TrainOptions:
        """Return the options of `zeroxla train` that train the same model on the same text."""
        start = self.start
        return TrainOptions(
            text=TextOptions(data=start.data, batch=32, length=start.length),
            model=ModelOptions(layers=start.layers, width=start.width, heads=start.heads),
            training=TrainingOptions(
                steps=start.pretrain_steps, learning_rate=3e-3, seed=self.learning.seed
            ),
            mesh=self.mesh,
        )
