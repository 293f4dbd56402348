"""Plans of one model in one setting after another, which share what they can."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import optax
from jax.sharding import Mesh

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.axes import SPLIT_AXES
from zeroxla.mesh.machines import Device, Link, Machines
from zeroxla.planning.budget import for_target
from zeroxla.planning.choices import Choice, Variants, with_preset
from zeroxla.planning.generation import Generating
from zeroxla.planning.make import plan_step
from zeroxla.planning.plan import Plan
from zeroxla.planning.target import Target
from zeroxla.step.axes.expert_banks import has_expert_banks
from zeroxla.step.make import make_step
from zeroxla.step.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrialCluster:
    """The devices and links of trials; the fields are arguments of `zeroxla.plan`."""

    device: str | Device = "h100"
    link: str | Link = "100gbit"
    machines: str | Path | Machines | None = None
    memory_fraction: float | None = None
    devices_per_node: int | None = None

    def target(self, mesh_shape: Mapping[str, int]) -> Target:
        """Return the target of a mesh."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Target.find(mesh_shape, **fields)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trials:
    """Plans a model in settings, one after another.

    Steps of one mesh are made from each other by `Step.with_config`. So the model is traced, and
    the axes that split the work on one row are searched, once for all presets.

    Attributes:
      variants: the model.
      batch: the shapes of a global batch.
      config: the options that presets do not decide.
      cluster: the devices and links.
      optimizer, loss, axis_names: as `make_step` takes them.
      generating, ahead: as `zeroxla.plan` takes them.
    """

    variants: Variants
    batch: Any
    config: ZeroConfig
    cluster: TrialCluster
    optimizer: optax.GradientTransformation | None = None
    loss: Any = None
    axis_names: Any = None
    generating: Generating | None = None
    ahead: bool | None = None
    _last: dict[Any, Step] = dataclasses.field(default_factory=dict, init=False)

    @property
    def rows(self) -> int:
        """The number of examples of a global batch."""
        return jax.tree.leaves(self.batch)[0].shape[0]

    def plan(self, choice: Choice) -> Plan:
        """Return the plan of a choice.

        Raises:
          ValueError, NotImplementedError: as `zeroxla.plan`.

        Cost: a trace of the step. The first one of a mesh and a number of micro-batches also takes
        a search for each axis that splits the work on one row.
        """
        target = self.cluster.target(choice.mesh_shape)
        with warnings.catch_warnings():
            # A search tries presets on meshes and stages for which a part of them does nothing.
            ignored = ".*without effect|.* has no effect in a pipeline"
            warnings.filterwarnings("ignore", message=ignored)
            config = for_target(with_preset(self.config, choice.zero), target)
            step = self._step(choice, target)
            step = step.with_config(config, microbatches=choice.microbatches)
            return plan_step(step, self.batch, target, generating=self.generating, ahead=self.ahead)

    def has_experts(self, mesh_shape: Mapping[str, int]) -> bool:
        """Return whether the model has banks of experts, which the axis `expert` splits."""
        shape = {axis: n for axis, n in mesh_shape.items() if axis not in SPLIT_AXES}
        remat = next(iter(self.variants.models))
        choice = Choice(zero="zero3", mesh_shape=shape, microbatches=1, weights=None, remat=remat)
        step = self._step(choice, self.cluster.target(shape))
        return has_expert_banks(step.programs, self.batch)

    def _step(self, choice: Choice, target: Target) -> Step:
        """Return a step of a model on a mesh, with the options of some preset."""
        key = choice.remat, choice.weights, tuple(choice.mesh_shape.items())
        if key not in self._last:
            self._last.clear()  # traces take memory
            has_stages = choice.weights is not None  # a pipeline has its own loss
            self._last[key] = make_step(
                self.variants.model(choice.remat, choice.mesh_shape),
                cast(Mesh, target.abstract_mesh()),
                self.optimizer,
                loss=None if has_stages else self.loss,
                config=for_target(with_preset(self.config, choice.zero), target),
                weights=choice.weights or "step",
                axis_names=self.axis_names,
            )
        return self._last[key]
