"""The options of `zeroxla plan`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zeroxla.cli.offload_options import PlannedOffload
from zeroxla.cli.option_groups import OptionGroups, flag


@dataclass(frozen=True, kw_only=True)
class PlanModelOptions:
    """What is trained: a language model, with AdamW."""

    model: str = "gpt2"
    """A model by its name, such as llama-7b; an unknown one lists those that there are."""
    length: int | None = None
    """Tokens of a sequence. Default: the model's context."""
    batch: int | None = None
    """Sequences of a step, over all devices, micro-batches included. Default: one for each device
    (of a stage) and micro-batch; 8 for each device with --search."""
    remat: bool = True
    """Compute each block's activations again in backward."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """What it is trained on."""

    nodes: int = 1
    """Length of the mesh axis `node`; with --search, of the cluster."""
    devices_per_node: int = 8
    """Length of the mesh axis `device`; with --search, of the cluster."""
    pipe: int = 1
    """Stages of a pipeline: the length of the mesh axis `pipe`; --nodes and --devices-per-node are
    those of a stage."""
    device: str = "h100"
    """The kind of device; an unknown one lists those that there are."""
    link: str = "100gbit"
    """Between nodes: a rate that the devices of a node share, or a link of the tables."""
    machines: Path | None = None
    """A TOML file with more devices and links, in the form of zeroxla/planning/machines.toml."""
    measured_s: float | None = None
    """Seconds that this very step took, measured: the plan takes the device's efficiency from them,
    and prints it as an entry for a file of --machines."""


@dataclass(frozen=True, kw_only=True)
class PlanStepOptions:
    """How it is trained."""

    zero: Literal["zero3", "zeropp", "zeropp_hq", "zeropp_min"] = "zero3"
    """Which wires: full precision, ZeRO++ as its paper has it, the best quality at its bytes, or
    the fewest bytes between hosts."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of the computation, and of the parameters on the wire. The master copy is float32."""
    accumulate: int = 1
    """Micro-batches of a step."""


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """Whether the compiler is asked, too."""

    compile: bool = False
    """Compile the step ahead of time and print the compiler's own memory and collectives: for the
    device, if it has a description (target) and the extra plan-gpu is installed, else by the CPU
    backend."""


@dataclass(frozen=True, kw_only=True)
class PlanGenerationOptions:
    """What a hybrid engine generates between steps, beside the training state."""

    prompts: int | None = None
    """Prompts of a call, over all devices. Default: nothing is generated."""
    prompt_length: int = 512
    """Tokens of the longest prompt."""
    new_tokens: int = 512
    """Tokens drawn for each prompt."""
    tensor: int = 1
    """Devices that share a copy of the model."""


@dataclass(frozen=True, kw_only=True)
class PlanOutput:
    """What is found and written."""

    search: bool = False
    """Try all wires x stages x micro-batches x --remat, and rank what fits; takes minutes. --zero,
    --pipe, --accumulate and --remat are then found, not given."""
    rows: int = 20
    """Rows that --search prints."""
    picture: Path | None = None
    """A file for the picture: memory, bytes of each link, the time line of a step; with --search,
    speed over memory."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(OptionGroups):
    """Say what a model needs and costs on a cluster, before having it: memory of a device, bytes of
    each link, time of a step. Nothing is allocated, and without --compile nothing is compiled."""

    model: PlanModelOptions = field(default_factory=PlanModelOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    step: PlanStepOptions = field(default_factory=PlanStepOptions)
    offload: PlannedOffload = field(default_factory=PlannedOffload)
    generation: PlanGenerationOptions = field(default_factory=PlanGenerationOptions)
    compilation: Compilation = field(default_factory=Compilation)
    output: PlanOutput = field(default_factory=PlanOutput)

    def __post_init__(self) -> None:
        self.check_at_least(
            {
                "model.length": 1,
                "model.batch": 1,
                "cluster.nodes": 1,
                "cluster.devices_per_node": 1,
                "cluster.pipe": 1,
                "generation.prompts": 1,
                "generation.prompt_length": 1,
                "generation.new_tokens": 1,
                "generation.tensor": 1,
                "output.rows": 1,
                "step.accumulate": 1,
            }
        )
        self.offload.check(self.step.zero, self.cluster.pipe)
        given = {"--compile": self.compilation.compile, "--measured-s": self.cluster.measured_s}
        alone = ("offload_params", "offload_secondary")
        given |= {flag(name): getattr(self.offload, name) != "none" for name in alone}
        if self.output.search and (useless := [name for name, value in given.items() if value]):
            raise ValueError(
                f"--search with {', '.join(useless)}: a search compiles and calibrates nothing, "
                "and not all that it tries goes with every offload; plan the settings that it "
                "finds with that"
            )
        if self.generation.prompts is not None and self.cluster.pipe > 1:
            raise ValueError(
                f"--prompts {self.generation.prompts} with --pipe {self.cluster.pipe}: generation "
                "needs all layers on a device; plan it with --pipe 1"
            )
