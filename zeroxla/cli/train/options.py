"""The options of `zeroxla train`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zeroxla.cli.data.images import MIN_SIZE
from zeroxla.cli.offload_options import OffloadOptions
from zeroxla.cli.option_groups import OptionGroups


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """What is read, and how it is cut into batches."""

    data: tuple[str, ...] = ()
    """For gpt files or folders of text; default: the Python files of the running interpreter's
    standard library. For alexnet CIFAR-10, binary or Python form, in a folder or a .tar.gz;
    default: scikit-learn's digits."""
    holdout: float = 0.05
    """Share of the files (of the bytes, when there are fewer than 20 files; of the digits) held out
    for validation. alexnet: 0.2. CIFAR-10 has validation images of its own."""
    batch: int = 16
    """Sequences or images per step, over all devices, micro-batches included. alexnet: 32."""
    length: int = 128
    """Bytes per sequence."""


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """What alexnet is shown."""

    image_size: int = 224
    """Height and width to which images are enlarged; at least 63, which takes a fraction of the
    time: what a laptop should use for more than a look."""
    width_multiplier: float = 1.0
    """Of AlexNet's channels and hidden units; 1 has 57 million parameters, 0.25 3.6 million."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A byte-level GPT, of 3.3 million parameters by default; a model that is trained on; or
    AlexNet, for images."""

    model: Literal["gpt", "alexnet"] = "gpt"
    """gpt learns text, alexnet images of ten classes."""
    init: Path | None = None
    """Start from the weights in this folder, a GPT-2 or Llama as Hugging Face saves it: its
    config.json says what the model is, its tokenizer.json what the text is cut into (without one,
    bytes)."""

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
    """The optimization: AdamW (beta2 0.95) with clipping and a schedule."""

    steps: int = 300
    """Steps in all. The learning-rate schedule spans them. alexnet: 60."""
    learning_rate: float = 2e-3
    """Peak learning rate: reached after the warm-up, then a cosine down to a twentieth of it.
    alexnet: 3e-4."""
    warmup: float = 0.1
    """Share of the steps over which the learning rate rises."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only."""
    clip: float = 1.0
    """Global gradient norm to clip at; 0 for no clipping."""
    seed: int = 0
    """Seed of the parameters, the crops or images, and the dropout."""


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """The mesh, and how the state is split over it."""

    nodes: int | None = None
    """Length of the mesh axis `node`. Default: the number of hosts of a stage; 2 on simulated
    devices."""
    devices_per_node: int | None = None
    """Length of the mesh axis `device`. Default: all that there are; simulated, 8 in all."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the computation, and of the parameters on the wire. The master copy is float32."""
    accumulate: int | None = None
    """Micro-batches per step: those that pass through the stages of --pipe, or gradient
    accumulation. Default: 1; with --pipe up to twice the stages, as many as divide the batch."""
    zero: Literal["zero3", "zeropp", "zeropp_hq", "zeropp_min"] = "zero3"
    """Which wires: full precision, ZeRO++ as its paper has it, the best quality at its bytes, or
    the fewest bytes between hosts."""
    persistence_threshold: int = 10_000
    """Leaves of at most this many elements stay gathered for the whole step."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """A pipeline of stages; the state is split over the devices of all."""

    pipe: int = 1
    """Stages: the length of the mesh axis `pipe`; --nodes and --devices-per-node are those of a
    stage."""
    schedule: Literal["1f1b", "gpipe", "zb-h1"] = "1f1b"
    """The order in which stages do their micro-batches."""
    partition: str = "parameters"
    """Where layers are cut: balanced by `parameters`, `uniform`, `type:REGEX`, `profile` (FLOPs and
    bytes of the compiled layers), or boundaries such as 0,19,22."""

    def __post_init__(self) -> None:
        _ = self.boundaries  # refuses what is none

    @property
    def boundaries(self) -> str | list[int]:
        """What `Pipeline` takes as `partition`."""
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
    """The run folder. Default: a new one under runs/; with --resume the newest there."""
    resume: bool = False
    """Continue the run in the folder from its newest checkpoint, with its own options."""
    eval_every: int = 100
    """Steps between evaluations; there is always one at the end."""
    eval_batches: int = 16
    """Validation batches per evaluation, always the same ones."""
    save_every: int = 100
    """Steps between checkpoints; there is always one at the end and on Ctrl-C."""
    keep: int = 2
    """Checkpoints to keep."""
    prompt: str = "def "
    """Text that the trained model continues at the end."""
    sample_bytes: int = 300
    """Length of that continuation; 0 for none."""
    temperature: float = 0.7
    """Sampling temperature; 0 takes the likeliest byte each time."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(OptionGroups):
    """Train a byte-level GPT on text, or AlexNet on images, the state split over all devices
    (ZeRO-3), the layers over stages if you like.

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
