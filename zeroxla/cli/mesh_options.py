"""Options of the mesh and its stages, which several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """The mesh."""

    nodes: int | None = None
    """Length of the mesh axis `node`. Default: the number of hosts of a stage; 2 on simulated
    devices. More than 1 starts as many processes."""
    devices_per_node: int | None = None
    """Number of devices of a node, over which the mesh axis `device` lies. Default: all of them;
    simulated devices are 8 in all."""


@dataclass(frozen=True, kw_only=True)
class AxesOptions:
    """Axes over which the work on one row is split. They divide the devices of a node, or fill
    several nodes."""

    tensor: int = 1
    """Number of devices that share each product with a parameter: tensor parallelism."""
    context: int = 1
    """Number of devices that share each sequence."""
    expert: int = 1
    """Number of devices that share each bank of experts."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """A pipeline of stages, each with ZeRO-3 over its own devices."""

    pipe: int = 1
    """Number of ranks of a pipeline: the length of the mesh axis `pipe`. --nodes and
    --devices-per-node then count one rank."""
    schedule: Literal["1f1b", "gpipe", "zb-h1", "interleaved", "zb-v", "dualpipev"] = "1f1b"
    """Order in which the stages work on their micro-batches. A rank has one stage, and with the
    last three several."""
    chunks: int | None = None
    """For interleaved: number of stages of each rank. Default: 2."""
    stash: Literal["inputs", "activations"] = "inputs"
    """What a stage keeps of a micro-batch until its backward. inputs: little, and backward runs the
    stage again. activations: all that backward needs."""
    partition: str = "parameters"
    """Rule that cuts the layers into stages: `parameters` and `uniform` balance the parameters or
    the number of layers, `type:REGEX` balances the layers of that type, `profile` balances the time
    that follows from the compiled layers' FLOPs and bytes. Or boundaries, such as 0,19,22."""

    weights: Literal["step", "tick"] = "step"
    """How often a stage gathers its leaves. step: once, and it keeps them whole through the step.
    tick: whenever it uses them."""
    memory: Literal["fast", "low"] | None = None
    """For 1f1b: fast, or low for fewer stashed inputs and longer ticks. Default: fast."""

    def __post_init__(self) -> None:
        if self.memory is not None and self.schedule != "1f1b":
            raise ValueError(
                f"--memory {self.memory} with --schedule {self.schedule}: only 1f1b has "
                "the choice; leave it out"
            )
        if self.chunks is not None and self.schedule != "interleaved":
            raise ValueError(
                f"--chunks {self.chunks} with --schedule {self.schedule}: only interleaved has the "
                "choice; leave it out"
            )
        if self.chunks is not None and self.chunks < 2:
            raise ValueError(
                f"--chunks {self.chunks}: give 2 or more, or --schedule 1f1b for one stage each"
            )
        _ = self.boundaries  # raises an error if they are wrong

    @property
    def as_arguments(self) -> dict[str, Any]:
        """The arguments of `Pipeline.from_model`."""
        return {
            "partition": self.boundaries,
            "schedule": self.schedule,
            "memory": self.memory,
            "chunks": self.chunks,
            "stash": self.stash,
        }

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
