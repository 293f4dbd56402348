"""The options of `zeroxla rlhf`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zeroxla.cli.adapter_options import AdapterOptions
from zeroxla.cli.mesh_options import MeshOptions, PipelineOptions
from zeroxla.cli.offload_options import OffloadOptions
from zeroxla.cli.optimizer_options import OptimizerOptions
from zeroxla.cli.option_groups import LARGEST, JobOptions, check_seed, flag
from zeroxla.cli.tracking.options import TrackingOptions
from zeroxla.cli.train.options import ModelOptions, TextOptions, TrainingOptions, TrainOptions
from zeroxla.cli.zero_options import (
    LEAST,
    FetchOptions,
    HopOptions,
    WireOptions,
    ZeroOptions,
    check_offload,
)
from zeroxla.rlhf.make import Storage
from zeroxla.rlhf.settings import Settings


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """The model at the start. It has learned text before: in this run, in another, or elsewhere."""

    init: Path | None = None
    """Folder of a language model in Hugging Face's format, to start from: config.json, safetensors
    and the tokenizer. Prompts are pieces of --data, in its tokens."""
    init_run: Path | None = None
    """Folder of a run of `zeroxla train`. Training starts from its newest checkpoint, and prompts
    are pieces of its text."""
    data: tuple[str, ...] = ()
    """Files or folders of text. Default: the text of --init-run, or the Python files of the running
    interpreter's standard library."""
    pretrain_steps: int = 150
    """Steps in which the model learns text first; without --init and --init-run."""
    length: int = 64
    """Context of the model, in bytes; without --init and --init-run."""
    layers: int = 2
    """Transformer blocks."""
    width: int = 64
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads; must divide the width."""


@dataclass(frozen=True, kw_only=True)
class StorageOptions(AdapterOptions):
    """The storage of actor and reference. With --lora-rank the frozen reference is the base of the
    actor, which has adapters."""

    reference: Literal["int8", "int4", "float32"] = "int8"
    """Format of the frozen reference's dense leaves; float32 stores all leaves as float32."""


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The reward, and the responses: they are drawn at temperature 1, from all tokens."""

    algorithm: Literal["ppo", "grpo"] = "grpo"
    """Algorithm. ppo trains a critic beside the actor; grpo compares responses to one prompt."""
    reward: Literal["brackets", "vowels", "brief"] = "brackets"
    """Reward of a response. brackets: the share of characters in pairs of brackets. vowels: the
    share of vowels. brief: 1 / (1 + characters), which needs --eos."""
    prompt_length: int = 16
    """Tokens of a prompt, which is a piece of the text."""
    new_tokens: int = 16
    """Largest number of tokens of a response."""
    rows: int = 64
    """Responses per iteration, over all devices."""
    group_size: int | None = None
    """Responses to each prompt. Default: 8 with grpo, 1 with ppo."""
    eos: int | None = None
    """Token that ends a response, such as 10, the end of a line. Default: none."""


@dataclass(frozen=True, kw_only=True)
class LearningOptions(OptimizerOptions):
    """The optimizer: Adam with clipping, at constant learning rates."""

    steps: int = 40
    """Iterations in all. Each one generates, scores and trains."""
    minibatch: int = 32
    """Responses per optimizer step."""
    epochs: int = 2
    """Number of times that each response is trained on."""
    learning_rate: float = 1e-3
    """Learning rate of the actor."""
    critic_learning_rate: float = 3e-3
    """Learning rate of ppo's critic."""
    kl: float | None = None
    """Penalty per nat of divergence from the reference. Default: 0.05 with grpo, 0.003 with ppo."""
    ratio_clip: float = 0.2
    """Clipping range of the ratio between the present policy and the one that drew a token."""
    entropy: float = 0.0
    """Bonus per nat of the actor's entropy."""
    max_skipped: int = 20
    """Number of optimizer steps in a row whose loss or gradient is not finite, after which the run
    stops. 0 never stops it."""
    seed: int = 0
    """Seed of the parameters, the prompts and the responses."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The layout of models while they generate and score."""

    tensor: int = 1
    """Number of devices of a node that share a copy of a model."""


@dataclass(frozen=True, kw_only=True)
class RlhfRunOptions:
    """The run folder and checkpoints."""

    run: Path | None = None
    """Run folder. Default: a new one under runs/; with --resume, the newest one there."""
    resume: bool = False
    """Continue the run in the run folder from its newest checkpoint, with its own options."""
    save_every: int = 20
    """Iterations between checkpoints. There is always one at the end and on Ctrl-C."""
    keep: int = 2
    """Number of checkpoints to keep."""
    samples: int = 4
    """Number of responses that are printed and written as text, before and after training; 0 for
    none."""


@dataclass(frozen=True, kw_only=True)
class RlhfOptions(JobOptions):
    """Train a language model on rewards of its own responses, with PPO or GRPO. It generates from
    the training state, which is split over all devices; then its responses are scored, and it is
    trained on them.

    Without an accelerator the devices are simulated: 8 on this machine's CPU, as 2 nodes of 4.
    """

    start: StartOptions = field(default_factory=StartOptions)
    storage: StorageOptions = field(default_factory=StorageOptions)
    task: TaskOptions = field(default_factory=TaskOptions)
    learning: LearningOptions = field(default_factory=LearningOptions)
    mesh: MeshOptions = field(default_factory=MeshOptions)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    zero: ZeroOptions = field(default_factory=ZeroOptions)
    wires: WireOptions = field(default_factory=WireOptions)
    hops: HopOptions = field(default_factory=HopOptions)
    fetch: FetchOptions = field(default_factory=FetchOptions)
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    tracking: TrackingOptions = field(default_factory=TrackingOptions)
    output: RlhfRunOptions = field(default_factory=RlhfRunOptions)

    def __post_init__(self) -> None:
        self.check_at_least(
            {
                "start.pretrain_steps": 1,
                "start.length": 2,
                "task.prompt_length": 2,
                "learning.steps": 1,
                "learning.max_skipped": 0,
                "engine.tensor": 1,
                "pipeline.pipe": 1,
                "output.save_every": 1,
                "output.keep": 1,
                "output.samples": 0,
                **LEAST,
            }
        )
        check_seed(self.learning.seed)
        self.tracking.profiled(self.learning.steps)
        check_offload(self, self.pipeline.pipe)
        for name in ("learning_rate", "critic_learning_rate"):
            rate = getattr(self.learning, name)
            if not 0 < rate <= LARGEST:
                raise ValueError(f"{flag(name)} {rate} must be above 0, and finite in float32")
        if self.task.reward == "brief" and self.task.eos is None:
            raise ValueError(
                "--reward brief: without an end token all responses are equally long; give --eos, "
                "such as 10 for the end of a line"
            )
        # Values that these refuse are refused here, too.
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
        """Return the storage of actor and reference."""
        own = self.storage
        targets = {} if own.lora_targets is None else {"targets": own.lora_targets}
        return Storage(
            frozen=None if own.reference == "float32" else own.reference,
            rank=own.lora_rank,
            alpha=own.lora_alpha,
            rank_stabilized=own.lora_rank_stabilized,
            dora=own.lora_dora,
            **targets,
        )

    def as_train(self) -> TrainOptions:
        """Return the options of `zeroxla train` that train the same model on the same text."""
        start = self.start
        if start.init is not None:  # It does not train on text: one row of a few tokens is traced.
            return TrainOptions(
                text=TextOptions(data=start.data, batch=self.settings.minibatch_rows, length=2),
                model=ModelOptions(init=start.init),
                training=TrainingOptions(seed=self.learning.seed),
                mesh=self.mesh,
                pipeline=self.pipeline,
            )
        return TrainOptions(
            text=TextOptions(data=start.data, batch=32, length=start.length),
            model=ModelOptions(layers=start.layers, width=start.width, heads=start.heads),
            training=TrainingOptions(
                steps=start.pretrain_steps, learning_rate=3e-3, seed=self.learning.seed
            ),
            mesh=self.mesh,
            pipeline=self.pipeline,
        )
