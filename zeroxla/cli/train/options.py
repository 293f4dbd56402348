"""The options of `zeroxla train`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zeroxla.cli.adapter_options import LoraOptions
from zeroxla.cli.data.images import MIN_SIZE
from zeroxla.cli.mesh_options import AxesOptions, MeshOptions, PipelineOptions
from zeroxla.cli.offload_options import OffloadOptions
from zeroxla.cli.optimizer_options import OptimizerOptions
from zeroxla.cli.option_groups import JobOptions, check_seed
from zeroxla.cli.outer_options import OUTER_LEAST, IslandsOptions
from zeroxla.cli.tracking.options import TrackingOptions
from zeroxla.cli.zero_options import (
    LEAST,
    FetchOptions,
    HopOptions,
    WireOptions,
    ZeroOptions,
    check_offload,
)


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The data, and how it is cut into batches."""

    data: tuple[str, ...] = ()
    """Data to train on. gpt: files or folders of text, or files of rows (.jsonl, .json, .parquet),
    each with a weight or none, such as chat.jsonl=0.7; default: the Python files of the running
    interpreter's standard library. alexnet: a folder or a .tar.gz with CIFAR-10, in its binary or
    its Python form; default: the digits of scikit-learn."""
    holdout: float = 0.05
    """Share of the files, or of the rows, that is held out for validation; with fewer than 20 files
    of text, share of each file's bytes. alexnet: 0.2 of the digits. CIFAR-10 has validation images
    of its own."""
    batch: int = 16
    """Sequences, preferences or images per step, over all devices and micro-batches; with --outer,
    of one island. alexnet: 32."""
    length: int = 128
    """Bytes (with --init, tokens) per sequence."""


@dataclass(frozen=True, kw_only=True)
class RowsOptions:
    """Rows: conversations, pairs of prompt and response, texts, or preferences, as JSON objects."""

    packing: bool = False
    """Let short rows share a sequence. Each is a segment of its own, and attention stays inside a
    segment."""
    too_long: Literal["cut", "bad"] = "cut"
    """What becomes of a conversation, a pair or a preference that is longer than a sequence. cut:
    its beginning is kept. bad: it counts as a bad row. A longer text gives several sequences."""
    max_bad_rows: float = 0.01
    """Share of the rows that may be bad. They are named, and left out; more are an error."""
    chat_template: Path | None = None
    """File with the chat template in Jinja2. Default: the one in the folder of --init, or a plain
    one."""


@dataclass(frozen=True, kw_only=True)
class DpoOptions:
    """Preferences: rows with a chosen and a rejected response (DPO). The reference is the model
    without its adapters; without --lora-rank and --lora-init it is a copy of the first weights."""

    dpo_beta: float = 0.1
    """Strength of the reference: a nat by which the model prefers a response more than the
    reference does counts as this much reward."""
    dpo_label_smoothing: float = 0.0
    """Share of the preferences that is taken to be wrong; below 0.5 (cDPO)."""
    dpo_length_normalized: bool = False
    """Take the mean log-probability of a response's tokens, and not their sum."""
    dpo_tensor: int = 1
    """Devices that share a copy of the reference while it scores. With 1 each holds all of it."""
    dpo_reference: Literal["float32", "int8", "int4"] | None = None
    """Format of the dense leaves of the reference's copy, without adapters. Default: int8. With
    float32 margins begin at exactly 0."""


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The size of alexnet and of its images."""

    image_size: int = 224
    """Height and width to which images are enlarged; at least 63. Small images take a fraction of
    the time: use 63 on a laptop."""
    width_multiplier: float = 1.0
    """Multiplier of AlexNet's channels and hidden units. 1 has 57 million parameters, 0.25 has 3.6
    million."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model: a byte-level GPT, of 3.3 million parameters by default; the model of --init; or
    AlexNet, for images."""

    model: Literal["gpt", "alexnet"] = "gpt"
    """Model to train. gpt learns text, alexnet learns images of ten classes."""
    init: Path | None = None
    """Folder of a model in Hugging Face's format, whose weights are trained further. Its
    config.json describes the model, and its tokenizer.json turns text into tokens; without a
    tokenizer.json the model reads bytes."""

    layers: int = 4
    """Transformer blocks."""
    width: int = 256
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads; must divide the width."""
    dropout: float = 0.0
    """Dropout rate. alexnet: 0.5."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(OptimizerOptions):
    """The optimizer: AdamW (beta2 0.95) with clipping and a learning-rate schedule."""

    steps: int = 300
    """Steps in all. The learning-rate schedule spans them. alexnet: 60."""
    learning_rate: float = 2e-3
    """Peak learning rate. It is reached after the warm-up; then a cosine leads down to a twentieth
    of it. alexnet: 0.0003."""
    warmup: float = 0.1
    """Share of the steps over which the learning rate rises."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only. sgd adds it to the gradient."""
    max_skipped: int = 20
    """Number of steps in a row whose loss or gradient is not finite, after which the run stops. 0
    never stops it."""
    seed: int = 0
    """Seed of the parameters, of the pieces of text or images that are drawn, and of dropout."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The run folder, evaluation and checkpoints."""

    run: Path | None = None
    """Run folder. Default: a new one under runs/; with --resume, the newest one there."""
    resume: bool = False
    """Continue the run in the run folder from its newest checkpoint, with its own options."""
    eval_every: int = 100
    """Steps between evaluations. The last step is always evaluated. alexnet: 20."""
    eval_batches: int = 16
    """Validation batches per evaluation, always the same ones. alexnet: 8."""
    save_every: int = 100
    """Steps between checkpoints. There is always one at the end and on Ctrl-C. alexnet: 20."""
    keep: int = 2
    """Number of checkpoints to keep."""
    prompt: str = "def "
    """Text that the trained model continues at the end. A model that was trained on conversations
    is given it as what the user says."""
    sample_bytes: int = 300
    """Length of that continuation, in bytes (with --init, tokens). 0 prints none."""
    temperature: float = 0.7
    """Sampling temperature. 0 takes the likeliest byte each time."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(JobOptions):
    """Train a byte-level GPT on text, or AlexNet on images. ZeRO-3 splits the state over all
    devices; --pipe splits the layers over stages too, --tensor and --context the work on a row.

    Without an accelerator the devices are simulated: 8 on this machine's CPU, as 2 nodes of 4.
    """

    younger_groups = JobOptions.younger_groups | {"dpo"}

    text: TextOptions = field(default_factory=TextOptions)
    rows: RowsOptions = field(default_factory=RowsOptions)
    dpo: DpoOptions = field(default_factory=DpoOptions)
    images: ImageOptions = field(default_factory=ImageOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    mesh: MeshOptions = field(default_factory=MeshOptions)
    axes: AxesOptions = field(default_factory=AxesOptions)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    zero: ZeroOptions = field(default_factory=ZeroOptions)
    wires: WireOptions = field(default_factory=WireOptions)
    hops: HopOptions = field(default_factory=HopOptions)
    fetch: FetchOptions = field(default_factory=FetchOptions)
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    outer: IslandsOptions = field(default_factory=IslandsOptions)
    tracking: TrackingOptions = field(default_factory=TrackingOptions)
    output: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        self.check_at_least(
            {
                "rows.max_bad_rows": 0,
                "dpo.dpo_beta": 0,
                "dpo.dpo_label_smoothing": 0,
                "dpo.dpo_tensor": 1,
                "images.image_size": MIN_SIZE,
                "model.layers": 1,
                "model.width": 1,
                "model.heads": 1,
                "training.steps": 1,
                "training.learning_rate": 0,
                "training.warmup": 0,
                "training.max_skipped": 0,
                "axes.tensor": 1,
                "axes.context": 1,
                "axes.expert": 1,
                "pipeline.pipe": 1,
                "output.eval_every": 1,
                "output.eval_batches": 1,
                "output.save_every": 1,
                "output.keep": 1,
                "output.sample_bytes": 0,
                "output.temperature": 0,
                **LEAST,
                **OUTER_LEAST,
            }
        )
        check_seed(self.training.seed)
        self.tracking.profiled(self.training.steps)
        self.lora.check()
        if self.lora.lora_init is not None and self.model.init is None:
            raise ValueError(
                f"--lora-init {self.lora.lora_init} is an adapter for a base; give the base's "
                "folder with --init"
            )
        check_offload(self, self.pipeline.pipe)
        if self.outer.outer != "none" and self.offload.offload_params == "disk":
            raise ValueError(
                f"--outer {self.outer.outer} with --offload-params disk: islands exchange "
                "parameters from memory; use --offload-params host, or none"
            )
        if self.rows.max_bad_rows > 1:
            raise ValueError(f"--max-bad-rows {self.rows.max_bad_rows} is a share: at most 1")
        if not self.dpo.dpo_beta > 0:
            raise ValueError("--dpo-beta 0.0 must be above 0; 0.1 is usual")
        if not self.dpo.dpo_label_smoothing < 0.5:
            raise ValueError(
                f"--dpo-label-smoothing {self.dpo.dpo_label_smoothing} must be below 0.5, where "
                "preferences mean nothing"
            )
        if self.training.warmup > 1:
            raise ValueError(f"--warmup {self.training.warmup} is a share: at most 1")
        if not self.images.width_multiplier > 0:
            raise ValueError(
                f"--width-multiplier {self.images.width_multiplier} leaves no channel; give more "
                "than 0, 1 for AlexNet's own"
            )
        if self.model.width % self.model.heads:
            raise ValueError(
                f"--width {self.model.width} does not divide into --heads {self.model.heads}; "
                "change one of them"
            )


ALEXNET = TrainOptions(
    text=TextOptions(batch=32, holdout=0.2),
    model=ModelOptions(model="alexnet", dropout=0.5),
    training=TrainingOptions(steps=60, learning_rate=3e-4),
    output=RunOptions(eval_every=20, save_every=20, eval_batches=8),
)
"""The defaults of `--model alexnet`."""
