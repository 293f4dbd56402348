"""A model and the options that say how it is cut into stages and scheduled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.mesh.axes import SPLIT_AXES
from zeroxla.pipeline.layer_cost import LayerCost
from zeroxla.pipeline.layer_list import LayerList
from zeroxla.pipeline.make_schedule import forward_only, make_schedule
from zeroxla.pipeline.minimax import check_stages
from zeroxla.pipeline.model_shapes import ModelShapes
from zeroxla.pipeline.partition import Partition, make_partition
from zeroxla.pipeline.profile import Profile, profile
from zeroxla.pipeline.schedule import Schedule
from zeroxla.pipeline.stage import Stage
from zeroxla.pipeline.traced_model import TracedModel


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CutModel:
    """Cuts a model into stages, and chooses their schedule.

    Attributes:
      model: the model's layers.
      partition, schedule, memory, chunks, stash, allow_empty: the options of `Pipeline`.

    Raises:
      ValueError: there is no schedule of this name, or `memory` or `chunks` does not fit it.
    """

    model: LayerList | TracedModel
    partition: str | Sequence[int] | Profile
    schedule: str | Schedule
    memory: str | None
    chunks: int | None
    stash: str
    allow_empty: bool
    _partitions: dict[int, tuple[Any, Partition]] = dataclasses.field(
        default_factory=dict, init=False
    )
    """By number of ranks: the shapes of the leaves and the losses, and the partition for them."""

    def __post_init__(self) -> None:
        if self.stash not in ("inputs", "activations"):
            raise ValueError(f'stash={self.stash!r}; take "inputs" or "activations"')
        if isinstance(self.schedule, str):
            self.ranks(1)  # raises for unknown options
        elif self.chunks is not None or self.memory is not None:
            name = "chunks" if self.memory is None else "memory"
            raise ValueError(
                f"{name}={getattr(self, name)!r} has no effect on the schedule "
                f"{self.schedule.name!r}, whose tables are given; leave it out"
            )

    def ranks(self, num_ranks: int) -> tuple[int, ...]:
        """Return the rank of each stage, on an axis `pipe` of this length."""
        return self._schedule(num_ranks, 2 * num_ranks).ranks

    def _schedule(self, num_ranks: int, microbatches: int) -> Schedule:
        if isinstance(self.schedule, Schedule):
            if self.schedule.num_ranks != num_ranks:
                raise ValueError(
                    f"the schedule {self.schedule.name!r} is for pipe={self.schedule.num_ranks}, "
                    f"and the mesh has pipe={num_ranks}; make one for that, or another mesh"
                )
            return self.schedule
        return make_schedule(self.schedule, num_ranks, microbatches, self.memory, self.chunks)

    def schedule_for(self, num_ranks: int, microbatches: int, *, train: bool) -> Schedule:
        """Return the schedule of a step, or of an evaluation.

        Raises:
          ValueError: the user's schedule is for other numbers of ranks or micro-batches, or there
            are too few micro-batches for it.
        """
        if not train:
            return forward_only(num_ranks, microbatches, self.ranks(num_ranks))
        found = self._schedule(num_ranks, microbatches)
        if found.microbatches != microbatches:
            raise ValueError(
                f"the schedule {found.name!r} is for {found.microbatches} micro-batches, and there "
                f"are {microbatches}; make one for these, or set microbatches= of make_step"
            )
        return found

    def cut(
        self, num_ranks: int, shapes: ModelShapes, *, train: bool
    ) -> tuple[list[Stage], Partition]:
        """Cut the model into stages.

        Args:
          num_ranks: the length of the axis `pipe`.
          shapes: the shapes to cut it for.
          train: whether layers are told that they are trained.

        Raises:
          ValueError: there are fewer layers than stages, or the model cannot be cut.
          NotImplementedError: axes split the work on one row, and the model is a list of layers, or
            its layers are to be measured.
        """
        chosen_for = jax.tree.map(jnp.shape, shapes.params), shapes.losses
        found = self._partitions.get(num_ranks)
        if found is None or found[0] != chosen_for:
            found = chosen_for, self._divide(len(self.ranks(num_ranks)), shapes)
            self._partitions[num_ranks] = found
        partition = found[1]
        stages, _ = self.model.cut(lambda layers: partition, shapes, train=train)
        return stages, partition

    def _divide(self, num_stages: int, shapes: ModelShapes) -> Partition:
        """Choose the boundaries, of the model as it is trained.

        This is done once: all programs must be cut alike, and measured costs differ every time.
        """
        layers = self.model.cut(_each_layer, shapes, train=True)[1].layers
        method, machine = self.partition, None
        if method == "profile" or isinstance(method, Profile):
            mesh = jax.sharding.get_abstract_mesh()
            if any(mesh.shape.get(axis, 1) > 1 for axis in SPLIT_AXES):
                raise NotImplementedError(
                    f"partition={method!r} on a mesh with axes that split the work on one row: "
                    "layers are measured on one device, and exchange arrays along these axes; give "
                    'boundaries, or partition="parameters"'
                )
            how = method if isinstance(method, Profile) else Profile()
            check_stages(len(layers), num_stages, self.allow_empty)

            def cut(shapes: ModelShapes) -> list[Stage]:
                return self.model.cut(_each_layer, shapes, train=True)[0]

            layers = profile(layers, cut, shapes, how)
            machine = None if how.measure else how.machine_here()
            method = "profile"
        found = make_partition(
            method, layers, num_stages, machine=machine, allow_empty=self.allow_empty
        )
        return _with_last_layer(found) if isinstance(method, str) else found


def _each_layer(layers: Sequence[LayerCost]) -> Partition:
    """Return the partition that makes a stage of every layer."""
    return make_partition(range(len(layers) + 1), layers, len(layers))


def _with_last_layer(partition: Partition) -> Partition:
    """Give the last layer to the last stage, which has the loss; stages before it may be empty."""
    last = partition.boundaries[-1]
    inner = [min(b, max(last - 1, 1)) for b in partition.boundaries[1:-1]]
    return dataclasses.replace(partition, boundaries=(0, *inner, last))
