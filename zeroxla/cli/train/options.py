"""The options of `zeroxla train`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zeroxla.cli.data.images import MIN_SIZE
from zeroxla.cli.offload_options import OffloadOptions
from zeroxla.cli.option_groups import JobOptions


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The data, and how it is cut into batches."""

    data: tuple[str, ...] = ()
    """Data to train on. gpt: files or folders of text; default: the Python files of the running
    interpreter's standard library. alexnet: a folder or a .tar.gz with CIFAR-10, in its binary or
    its Python form; default: the digits of scikit-learn."""
    holdout: float = 0.05
    """Share of the files that is held out for validation; with fewer than 20 files, share of each
    file's bytes. alexnet: 0.2 of the digits. CIFAR-10 has validation images of its own."""
    batch: int = 16
    """Sequences or images per step, over all devices and micro-batches. alexnet: 32."""
    length: int = 128
    """Bytes (with --init, tokens) per sequence."""


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
    """Folder of a GPT-2 or Llama in Hugging Face's format, whose weights are trained further. Its
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
class TrainingOptions:
    """The optimizer: AdamW (beta2 0.95) with clipping and a learning-rate schedule."""

    steps: int = 300
    """Steps in all. The learning-rate schedule spans them. alexnet: 60."""
    learning_rate: float = 2e-3
    """Peak learning rate. It is reached after the warm-up; then a cosine leads down to a twentieth
    of it. alexnet: 3e-4."""
    warmup: float = 0.1
    """Share of the steps over which the learning rate rises."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only."""
    clip: float = 1.0
    """Largest global gradient norm; larger gradients are clipped to it. 0 clips nothing."""
    seed: int = 0
    """Seed of the parameters, of the pieces of text or images that are drawn, and of dropout."""


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """The mesh, and how the state is split over it."""

    nodes: int | None = None
    """Length of the mesh axis `node`. Default: the number of hosts of a stage; 2 on simulated
    devices. More than 1 starts as many processes."""
    devices_per_node: int | None = None
    """Length of the mesh axis `device`. Default: all devices of a node; simulated devices are 8 in
    all."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the computation, and of parameters on the wire. The master copy is float32."""
    accumulate: int | None = None
    """Micro-batches per step. They pass through the stages of --pipe one after the other; without
    stages their gradients are added up. Default: 1; with --pipe, as many as divide the batch, up
    to twice the number of stages."""
    zero: Literal["zero3", "zeropp", "zeropp_hq", "zeropp_min"] = "zero3"
    """Wire formats. zero3: full precision. zeropp: ZeRO++ as in its paper. zeropp_hq: the best
    quality at zeropp's bytes. zeropp_min: the fewest bytes between hosts."""
    persistence_threshold: int = 10_000
    """Largest number of elements of a leaf that stays gathered for the whole step."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """A pipeline of stages, each with ZeRO-3 over its own devices."""

    pipe: int = 1
    """Number of stages: the length of the mesh axis `pipe`. --nodes and --devices-per-node then
    count one stage."""
    schedule: Literal["1f1b", "gpipe", "zb-h1"] = "1f1b"
    """Order in which a stage works on its micro-batches."""
    partition: str = "parameters"
    """Rule that cuts the layers into stages: `parameters` and `uniform` balance the parameters or
    the number of layers, `type:REGEX` balances the layers of that type, `profile` balances the time
    that follows from the compiled layers' FLOPs and bytes. Or boundaries, such as 0,19,22."""

    def __post_init__(self) -> None:
        _ = self.boundaries  # raises an error if they are wrong

    @property
    def boundaries(self) -> str | list[int]:
        """The value of `Pipeline`'s `partition`."""
        text = self.partition
        if text.startswith("type:") or not any(c.isdigit() or c == "," for c in text):
            return text
        try:
            return [int(number) for number in text.split(",")]
        except ValueError:
            raise ValueError(
                f"--partition {text}: boundaries are whole numbers with commas between them, such "
                "as 0,19,22"
            ) from None


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
    """Text that the trained model continues at the end."""
    sample_bytes: int = 300
    """Length of that continuation, in bytes (with --init, tokens). 0 prints none."""
    temperature: float = 0.7
    """Sampling temperature. 0 takes the likeliest byte each time."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(JobOptions):
    """Train a byte-level GPT on text, or AlexNet on images. ZeRO-3 splits the state over all
    devices; --pipe splits the layers over stages too.

    Without an accelerator the devices are simulated: 8 on this machine's CPU, as 2 nodes of 4.
    """

    text: TextOptions = field(default_factory=TextOptions)
    images: ImageOptions = field(default_factory=ImageOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    mesh: MeshOptions = field(default_factory=MeshOptions)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    output: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        self.check_at_least(
            {
                "images.image_size": MIN_SIZE,
                "model.layers": 1,
                "model.width": 1,
                "model.heads": 1,
                "training.steps": 1,
                "training.seed": 0,
                "training.warmup": 0,
                "training.clip": 0,
                "mesh.accumulate": 1,
                "pipeline.pipe": 1,
                "output.eval_every": 1,
                "output.eval_batches": 1,
                "output.save_every": 1,
                "output.keep": 1,
                "output.sample_bytes": 0,
                "output.temperature": 0,
            }
        )
        self.offload.check(self.mesh.zero, self.pipeline.pipe)
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
