"""`Pipeline`: a model that a mesh with an axis `pipe` cuts into stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.frontend import Adapted, adapt
from zeroxla.frontend.lora.model import LoraModel
from zeroxla.frontend.staged import StagedModel
from zeroxla.pipeline.layer_cost import LayerCost
from zeroxla.pipeline.layer_list import LayerList
from zeroxla.pipeline.minimax import check_stages
from zeroxla.pipeline.partition import Partition, resolve
from zeroxla.pipeline.profile import Profile, profile
from zeroxla.pipeline.scanned_model import ScannedModel
from zeroxla.pipeline.schedule import Schedule, forward_only, make_schedule
from zeroxla.pipeline.stage import Stage
from zeroxla.pipeline.stage_gradients import PipelineDifferentiator
from zeroxla.program.shapes import shapes_of
from zeroxla.wire.leaves import Layout
from zeroxla.wire.resolve import Wiring


class Pipeline(StagedModel):
    """A model of layers that run one after another.

    Without an axis `pipe` in the mesh, or with one of length 1, it is trained as any other model.

    Args:
      layers: flax.linen modules, functions of rngs that return nnx modules, functions of the
        array(s) that the layer before returned, and `TiedLayer`s. A layer is called with what the
        one before it returned, an array or a tuple of arrays; with `train=` or `deterministic=` if
        it has such a parameter. The first one is called with `inputs(batch)`.
      loss: `loss(outputs, batch) -> scalar | (scalar, metrics)`; `outputs` of the last layer.
      inputs: what the first layer gets of a batch; the batch itself if None.
      partition: "parameters", "uniform", "type:REGEX"; "profile", by the FLOPs and bytes of the
        compiled layers, or a `Profile`; or boundaries, such as [0, 19, 22].
      schedule: "1f1b", "gpipe", "zb-h1", or a `Schedule`.
      memory: of 1F1B: "fast", or "low" for fewer stashed inputs and longer ticks.
      allow_empty: accept stages without layers, where there are fewer layers than stages.
      remat: recompute the activations of every so many layers in backward (DeepSpeed's
        activation_checkpoint_interval); None: those of a stage are kept for one micro-batch.

    Raises:
      ValueError: a layer is of no known kind, or an option has no such value.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        loss: Callable[[Any, Any], Any],
        *,
        inputs: Callable[[Any], Any] | None = None,
        partition: str | Sequence[int] | Profile = "parameters",
        schedule: str | Schedule = "1f1b",
        memory: str | None = None,
        allow_empty: bool = False,
        remat: int | None = None,
    ) -> None:
        self._set(LayerList(layers, loss, inputs, remat), partition, schedule, memory, allow_empty)
        if remat is not None and remat < 1:
            raise ValueError(f"remat={remat}; give a number of layers, or None")

    @classmethod
    def from_model(
        cls,
        model: Any,
        loss: Callable[..., Any] | None = None,
        *,
        partition: str | Sequence[int] | Profile = "parameters",
        schedule: str | Schedule = "1f1b",
        memory: str | None = None,
        allow_empty: bool = False,
    ) -> Pipeline:
        """Make one of a model that scans over stacked blocks, unmodified.

        The layers are what comes before the blocks, each block, and what follows them; parameters
        keep their names. Recomputation is the model's own (`nn.remat`).

        Args:
          model, loss: as for `make_step`.
          partition, schedule, memory, allow_empty: as for `Pipeline`.

        >>> from zeroxla.models import GPT
        >>> pipeline = Pipeline.from_model(GPT.tiny())
        """
        if isinstance(model, LoraModel):
            raise NotImplementedError(
                "stages hold no adapters yet; give make_step what zeroxla.lora made, and a mesh "
                "without the axis `pipe`"
            )
        made = cls.__new__(cls)
        made._set(ScannedModel(adapt(model, loss)), partition, schedule, memory, allow_empty)
        return made

    def _set(
        self,
        model: LayerList | ScannedModel,
        partition: str | Sequence[int] | Profile,
        schedule: str | Schedule,
        memory: str | None,
        allow_empty: bool,
    ) -> None:
        if isinstance(schedule, str):
            make_schedule(schedule, 1, 1, memory)  # refuses what it does not know
        self._model, self._partition = model, partition
        self._schedule, self._memory, self._allow_empty = schedule, memory, allow_empty
        self._partitions: dict[int, tuple[Any, Partition]] = {}

    @property
    def adapted(self) -> Adapted:
        """The whole model as pure functions."""
        return self._model.adapted

    def gradients(
        self,
        *,
        num_stages: int,
        layout: Layout,
        wiring: Wiring,
        unit_elements: int | None,
        limits: FetchLimits,
        microbatches: int,
        weights: str,
    ) -> PipelineDifferentiator:
        """Return the program that computes losses and gradients in stages; see `StagedModel`."""
        return PipelineDifferentiator(
            pipeline=self,
            num_stages=num_stages,
            layout=layout,
            wiring=wiring,
            unit_elements=unit_elements,
            limits=limits,
            microbatches=microbatches,
            weights=weights,
        )

    def schedule(self, num_stages: int, microbatches: int, *, train: bool) -> Schedule:
        """Return which stage does what when.

        Raises:
          ValueError: a schedule that was given is of other numbers.
        """
        if not train:
            return forward_only(num_stages, microbatches)
        found = self._schedule
        if isinstance(found, str):
            return make_schedule(found, num_stages, microbatches, self._memory)
        if (found.stages, found.microbatches) != (num_stages, microbatches):
            raise ValueError(
                f"the schedule {found.name!r} is of {found.stages} stages and "
                f"{found.microbatches} micro-batches, and there are {num_stages} and {microbatches}"
            )
        return found

    def cut(
        self, num_stages: int, tree: Any, batch: Any, key: jax.Array, *, train: bool
    ) -> tuple[list[Stage], Partition]:
        """Cut the model into stages.

        Args:
          num_stages: how many.
          tree: of the parameters: shapes and dtypes in the compute dtype.
          batch, key: shapes of a micro-batch on one device, and of its key.
          train: whether layers are told that they are trained.

        Raises:
          ValueError: there are fewer layers than stages, or the model cannot be cut.
        """

        found = self._partitions.get(num_stages)
        if found is None or found[0] != jax.tree.map(jnp.shape, tree):
            partition = self._divide(num_stages, tree, batch, key, train=train)
            found = (jax.tree.map(jnp.shape, tree), partition)
            self._partitions[num_stages] = found
        partition = found[1]
        stages = self._model.cut(lambda layers: partition, tree, batch, key, train=train)[0]
        return stages, partition

    def _divide(
        self, num_stages: int, tree: Any, batch: Any, key: jax.Array, *, train: bool
    ) -> Partition:
        """Choose the boundaries. It is done once: all programs must cut alike, and a measured cost
        is another every time."""
        model, method, profiled = self._model, self._partition, None
        if isinstance(method, Profile):
            method, profiled = "profile", method
        elif method == "profile":
            profiled = Profile()

        def each(layers: Sequence[LayerCost]) -> Partition:
            return resolve(range(len(layers) + 1), layers, len(layers))

        layers = model.cut(each, tree, batch, key, train=train)[1].layers
        machine = None
        if profiled is not None:
            check_stages(len(layers), num_stages, self._allow_empty)

            def cut() -> list[Stage]:
                shapes = shapes_of((tree, batch, key))
                return model.cut(each, *shapes, train=train)[0]

            layers = profile(layers, cut, tree, batch, key, profiled)
            machine = None if profiled.measure else profiled.machine_here()
        found = resolve(method, layers, num_stages, machine=machine, allow_empty=self._allow_empty)
        return _with_ends(found) if isinstance(method, str) else found


def _with_ends(partition: Partition) -> Partition:
    """Leave the last layer to the last stage, which has the loss, and empty ones before it."""
    last = partition.boundaries[-1]
    inner = [min(b, max(last - 1, 1)) for b in partition.boundaries[1:-1]]
    return dataclasses.replace(partition, boundaries=(0, *inner, last))
