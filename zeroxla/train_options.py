"""The options of `zeroxla train`, and which of them a resumed run may change."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """What is read, and how it is cut into batches."""

    data: tuple[str, ...] = ()
    """Files or folders of text. Default: the Python files of the running interpreter's standard
    library."""
    holdout: float = 0.05
    """Share of the files (of the bytes, when there are fewer than 20 files) held out for
    validation."""
    batch: int = 16
    """Sequences per step, over all devices, accumulation included."""
    length: int = 128
    """Bytes per sequence."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The byte-level GPT, of 3.3 million parameters by default; or a model that is trained on."""

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
    """Dropout rate."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The optimization: AdamW (beta2 0.95) with clipping and a schedule."""

    steps: int = 300
    """Steps in all. The learning-rate schedule spans them."""
    learning_rate: float = 2e-3
    """Peak learning rate: reached after the warm-up, then a cosine down to a twentieth of it."""
    warmup: float = 0.1
    """Share of the steps over which the learning rate rises."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only."""
    clip: float = 1.0
    """Global gradient norm to clip at; 0 for no clipping."""
    seed: int = 0
    """Seed of the parameters, the crops and the dropout."""


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """The mesh, and how the state is split over it."""

    nodes: int | None = None
    """Length of the mesh axis `node`. Default: the number of hosts; 2 on simulated devices."""
    devices_per_node: int | None = None
    """Length of the mesh axis `device`. Default: all that there are."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the computation, and of the parameters on the wire. The master copy is float32."""
    accumulate: int = 1
    """Micro-batches per step."""
    zero: Literal["zero3", "zeropp", "zeropp_hq", "zeropp_min"] = "zero3"
    """Which wires: full precision, ZeRO++ as its paper has it, the best quality at its bytes, or
    the fewest bytes between hosts."""
    persistence_threshold: int = 10_000
    """Leaves of at most this many elements stay gathered for the whole step."""


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
    """Batches of the validation text per evaluation, always the same ones."""
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
class TrainOptions:
    """Train a byte-level GPT on text, its state split over all devices (ZeRO-3).

    Without an accelerator the devices are simulated: 8 on this machine's CPU, as 2 nodes of 4.
    """

    text: TextOptions = field(default_factory=TextOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    mesh: MeshOptions = field(default_factory=MeshOptions)
    output: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        for group, name, least in (
            ("model", "layers", 1),
            ("model", "width", 1),
            ("model", "heads", 1),
            ("training", "steps", 1),
            ("training", "seed", 0),
            ("training", "warmup", 0),
            ("training", "clip", 0),
            ("output", "eval_every", 1),
            ("output", "eval_batches", 1),
            ("output", "save_every", 1),
            ("output", "keep", 1),
            ("output", "sample_bytes", 0),
            ("output", "temperature", 0),
        ):
            value = getattr(getattr(self, group), name)
            if not value >= least:
                raise ValueError(f"{flag(name)} {value} must be at least {least}")
        if self.training.warmup > 1:
            raise ValueError(f"--warmup {self.training.warmup} is a share: at most 1")
        if self.model.width % self.model.heads:
            raise ValueError(
                f"--width {self.model.width} does not divide into --heads {self.model.heads}; "
                "change one of them"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values that JSON can hold."""
        values = dataclasses.asdict(self)
        for group, name in (("output", "run"), ("model", "init")):
            path = values[group][name]
            values[group][name] = None if path is None else str(path)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainOptions:
        """Make options from what `to_dict` returned.

        Raises:
          ValueError: There are other fields than this version has.
        """
        try:
            text = TextOptions(**{**values["text"], "data": tuple(values["text"]["data"])})
            output = RunOptions(**_with_path(values["output"], "run"))
            return cls(
                text=text,
                model=ModelOptions(**_with_path(values["model"], "init")),
                training=TrainingOptions(**values["training"]),
                mesh=MeshOptions(**values["mesh"]),
                output=output,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"the run was made by another version of zeroxla ({error}); resume it with that one"
            ) from error


# A resumed run takes these from the command line; a change of any other is another run.
# Checkpoints open on any mesh, whatever the way it communicates.
# With another number of steps the learning rate follows the new schedule from the checkpoint on.
FREE = frozenset(
    {"run", "resume", "steps", "eval_every", "eval_batches", "save_every", "keep"}
    | {"prompt", "sample_bytes", "temperature"}
    | {"nodes", "devices_per_node", "zero", "accumulate", "persistence_threshold"}
)


def check_resumable(stored: TrainOptions, given: TrainOptions) -> None:
    """Check that `given` differs from the stored options of a run only where it may.

    Raises:
      ValueError: With each option that differs, both values, and the remedy.
    """
    old, new = stored.to_dict(), given.to_dict()
    differing = [
        f"{flag(name)} is {value!r} there and {new[group][name]!r} here"
        for group, values in old.items()
        for name, value in values.items()
        if name not in FREE and _plain(value) != _plain(new[group][name])
    ]
    if differing:
        raise ValueError(
            f"cannot resume with another configuration: {'; '.join(differing)}; leave these "
            "options out, or start a new run without --resume"
        )


def flag(name: str) -> str:
    """Return the command-line spelling of an option."""
    return "--" + name.replace("_", "-")


def _with_path(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {**values, name: None if values[name] is None else Path(values[name])}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
