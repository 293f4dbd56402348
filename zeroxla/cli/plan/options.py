"""The options of `zeroxla plan`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from zeroxla.cli.adapter_options import LoraOptions
from zeroxla.cli.mesh_options import AxesOptions, PipelineOptions
from zeroxla.cli.offload_options import PlannedOffload
from zeroxla.cli.optimizer_options import OptimizerOptions
from zeroxla.cli.option_groups import OptionGroups, flag
from zeroxla.cli.outer_options import OUTER_LEAST, PlannedIslands
from zeroxla.cli.zero_options import (
    LEAST,
    FetchOptions,
    HopOptions,
    WireOptions,
    ZeroOptions,
    check_offload,
)


@dataclass(frozen=True, kw_only=True)
class PlanModelOptions:
    """The model: a language model."""

    model: str = "gpt2"
    """Name of a model, such as llama-7b. An unknown name lists all names."""
    length: int | None = None
    """Tokens per sequence. Default: the model's context."""
    batch: int | None = None
    """Sequences per step, over all devices and micro-batches. Default: one for each device (of a
    stage), or group of devices that shares a sequence, and micro-batch; with --search, 8 for each
    device."""
    remat: bool = True
    """Compute each block's activations again in backward, instead of keeping them. With
    --device-memory the budget decides instead."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The cluster."""

    nodes: int = 1
    """Number of nodes, the length of the mesh axis `node` if no axis takes several nodes."""
    devices_per_node: int = 8
    """Number of devices of a node, over which the mesh axis `device` lies and the axes after it."""
    device: str = "h100"
    """Kind of device. An unknown kind lists all kinds."""
    link: str = "100gbit"
    """Link between nodes: a rate that the devices of a node share, or the name of a link. An
    unknown name lists all names."""
    machines: Path | None = None
    """TOML file with more devices and links, in the form of zeroxla/mesh/machines.toml."""
    memory_fraction: float | None = None
    """Share of a GPU's memory that JAX takes for a process (XLA_PYTHON_CLIENT_MEM_FRACTION).
    Default: the share in the table, 0.75."""
    measured_s: float | None = None
    """Seconds that exactly this step took when it was measured. The plan derives the device's
    efficiency from them, and prints it as an entry for a file of --machines."""


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """The compiler's own figures."""

    compile: bool = False
    """Compile the step ahead of time, and print the memory and the collectives that the compiler
    reports. It compiles for the device if that has a description (target) and the extra plan-gpu is
    installed, and otherwise for the CPU."""


@dataclass(frozen=True, kw_only=True)
class PlanGenerationOptions:
    """Generation by a hybrid engine between steps, beside the training state."""

    prompts: int | None = None
    """Prompts per call, over all devices. Default: no generation is planned."""
    prompt_length: int = 512
    """Tokens of the longest prompt."""
    new_tokens: int = 512
    """Tokens drawn for each prompt."""
    generation_tensor: int = 1
    """Number of devices that share a copy of the model while they generate."""


@dataclass(frozen=True, kw_only=True)
class PlanOutput:
    """Search and output."""

    search: bool = False
    """Try all combinations of wires, stages, axes that split the work on one row, micro-batches and
    recomputation, and rank those that fit. Takes minutes. It chooses --zero, --pipe, --tensor,
    --context, --expert, --accumulate and --remat itself."""
    rows: int = 20
    """Number of rows that --search prints."""
    picture: Path | None = None
    """File for a picture of memory, the bytes on each link and the time line of a step; with
    --search, of speed over memory."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(OptionGroups):
    """Predict what a model needs and costs on a cluster that need not exist: the memory of a
    device, the bytes on each link, and the time of a step. Nothing is allocated, and without
    --compile nothing is compiled."""

    model: PlanModelOptions = field(default_factory=PlanModelOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    axes: AxesOptions = field(default_factory=AxesOptions)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    training: OptimizerOptions = field(default_factory=OptimizerOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    zero: ZeroOptions = field(default_factory=ZeroOptions)
    wires: WireOptions = field(default_factory=WireOptions)
    hops: HopOptions = field(default_factory=HopOptions)
    fetch: FetchOptions = field(default_factory=FetchOptions)
    offload: PlannedOffload = field(default_factory=PlannedOffload)
    outer: PlannedIslands = field(default_factory=PlannedIslands)
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
                "pipeline.pipe": 1,
                "generation.prompts": 1,
                "generation.prompt_length": 1,
                "generation.new_tokens": 1,
                "generation.generation_tensor": 1,
                "axes.tensor": 1,
                "axes.context": 1,
                "axes.expert": 1,
                "output.rows": 1,
                **LEAST,
                **OUTER_LEAST,
            }
        )
        self.lora.check()
        check_offload(self, self.pipeline.pipe)
        if self.output.search and (useless := self._unsearched()):
            raise ValueError(
                f"--search with {', '.join(useless)}: a search compiles and calibrates nothing, it "
                "chooses wires, stages and axes itself, and not all that it tries goes with every "
                "offload or with islands; plan the settings that it finds with that"
            )

    def _unsearched(self) -> list[str]:
        """The flags of options that are given, and that a search does not take."""
        usual = type(self)()
        names = {
            "compilation": ("compile",),
            "cluster": ("measured_s",),
            "offload": ("offload_params", "offload_secondary"),
            "axes": tuple(vars(self.axes)),
            "pipeline": ("schedule", "chunks", "stash", "partition", "weights", "memory"),
            "lora": ("lora_rank", "lora_init"),
            "wires": tuple(vars(self.wires)),
            "hops": tuple(vars(self.hops)),
            "zero": ("deepspeed",),
            "outer": tuple(vars(self.outer)),
        }
        return [
            flag(name)
            for group, own in names.items()
            for name in own
            if getattr(getattr(self, group), name) != getattr(getattr(usual, group), name)
            and (group, getattr(getattr(self, group), name)) != ("offload", "none")
        ]
