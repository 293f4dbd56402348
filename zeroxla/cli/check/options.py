"""The options of `zeroxla check`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from zeroxla.cli.mesh_options import AxesOptions, MeshOptions
from zeroxla.cli.option_groups import OptionGroups


@dataclass(frozen=True, kw_only=True)
class SubjectOptions:
    """The model. An object of your own code is MODULE:NAME or FILE.py:NAME; modules of the folder
    where the command runs are found, too."""

    object: Annotated[str, tyro.conf.Positional]
    """The model: a Flax module; a class of one, of which `tiny()` is taken if it has that, and
    otherwise one with the values of --set; a pair of functions (init, loss); or a function without
    arguments that returns a model, or a model and a batch."""
    set: tuple[str, ...] = ()
    """Values for what makes the model, such as width=32 layers=2. Give few and narrow layers, but
    at least two."""
    batch: str | None = None
    """The batch: an object that is a pytree of arrays, or a function without arguments that returns
    one. Default: the one that the model's function returns; otherwise random tokens, for models
    whose loss reads batch["tokens"] alone."""
    loss: str | None = None
    """The loss: a function loss(apply, batch, *, train). Default: the model's own method."""
    axis_name: tuple[str, ...] = ()
    """Names by which the model means all devices, as in BatchNorm(axis_name="batch")."""


@dataclass(frozen=True, kw_only=True)
class CheckMesh(MeshOptions):
    """The mesh, in one process. Without accelerators devices are simulated."""

    nodes: int | None = None
    """Length of the mesh axis `node`. Default: 1; 2 on simulated devices."""
    devices_per_node: int | None = None
    """Number of devices of a node, over which the mesh axis `device` lies. Default: all of them;
    simulated devices are 8 in all."""


@dataclass(frozen=True, kw_only=True)
class CheckedTraining:
    """What the checks read of the options that a training has. The wires are left out: quantized
    ones change the numbers."""

    deepspeed: Path | None = None
    """DeepSpeed configuration (JSON). These options are read from it, and flags override it."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the computation, whose overflow is looked for. Default: float32."""
    accumulate: int | None = None
    """Micro-batches per step. Default: 1."""
    frozen: tuple[str, ...] = ()
    """Regular expressions that are searched in leaf paths such as h/attn/c_attn/kernel; matching
    leaves are not trained."""
    rewrite: bool = False
    """Rewrite attention, losses of logits and norms in the step, as `zeroxla train` does."""
    unit_elements: int | None = None
    """Largest number of elements that are gathered together."""
    init_loss_scale: float | None = None
    """Loss scale of the first step in float16. Default: 32768."""


@dataclass(frozen=True, kw_only=True)
class CheckOutput:
    """Output."""

    json: bool = False
    """Print the report as JSON."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions(OptionGroups):
    """Look on a small instance of a model for what would go wrong in a large training: gradients
    that differ from the unsharded ones, devices that wait for each other, leaves that are gathered
    all at once or never split, values too large for their dtype, and models that are another one in
    each run. The exit status is 0 if there is no fault, and 1 if there is one."""

    subject: SubjectOptions
    mesh: CheckMesh = field(default_factory=CheckMesh)
    axes: AxesOptions = field(default_factory=AxesOptions)
    training: CheckedTraining = field(default_factory=CheckedTraining)
    output: CheckOutput = field(default_factory=CheckOutput)

    def __post_init__(self) -> None:
        self.check_at_least(
            {
                "mesh.nodes": 1,
                "mesh.devices_per_node": 1,
                "axes.tensor": 1,
                "axes.context": 1,
                "axes.expert": 1,
                "training.accumulate": 1,
                "training.unit_elements": 1,
            }
        )
