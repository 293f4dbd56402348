"""The options of `zeroxla plan`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zeroxla.option_groups import OptionGroups


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """What is trained: a language model, with AdamW."""

    model: str = "gpt2"
    """A model by its name, such as llama-7b; an unknown one lists those that there are."""
    length: int | None = None
    """Tokens of a sequence. Default: the model's context."""
    batch: int | None = None
    """Sequences of a step, over all devices, micro-batches included. Default: one for each device
    and micro-batch."""
    remat: bool = True
    """Compute each block's activations again in backward."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What it is trained on."""

    nodes: int = 1
    """Length of the mesh axis `node`."""
    devices_per_node: int = 8
    """Length of the mesh axis `device`."""
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
class PlannedStep:
    """How it is trained."""

    zero: Literal["zero3", "zeropp", "zeropp_hq", "zeropp_min"] = "zero3"
    """Which wires: full precision, ZeRO++ as its paper has it, the best quality at its bytes, or
    the fewest bytes between hosts."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of the computation, and of the parameters on the wire. The master copy is float32."""
    accumulate: int = 1
    """Micro-batches of a step."""


@dataclass(frozen=True, kw_only=True)
class PlanOutput:
    """What is written."""

    picture: Path | None = None
    """A file for the picture: memory, bytes of each link, the time line of a step."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(OptionGroups):
    """Say what a model needs and costs on a cluster, before having it: memory of a device, bytes of
    each link, time of a step. Nothing is compiled or allocated."""

    model: PlannedModel = field(default_factory=PlannedModel)
    cluster: Cluster = field(default_factory=Cluster)
    step: PlannedStep = field(default_factory=PlannedStep)
    output: PlanOutput = field(default_factory=PlanOutput)

    def __post_init__(self) -> None:
        self.check_at_least(
            {
                "model.length": 1,
                "model.batch": 1,
                "cluster.nodes": 1,
                "cluster.devices_per_node": 1,
                "step.accumulate": 1,
            }
        )
