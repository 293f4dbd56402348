"""`ModelOnMesh`: a model, a mesh and options, and what a loss on one device takes of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax
import optax
from jax.sharding import Mesh, PartitionSpec

from zeroxla.config.undecided import decided
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.fetch.keeping.budget import ActivationBudget
from zeroxla.frontend import Adapted
from zeroxla.frontend.staged import StagedModel
from zeroxla.mesh.axes import world_size
from zeroxla.mesh.placement import Placement
from zeroxla.offload.disk.desk import Desk
from zeroxla.offload.disk.tickets import leaf_dtype
from zeroxla.program.compat import AxisNames, mesh_context
from zeroxla.program.shapes import shapes_of
from zeroxla.step.axes.axes_split import AxesSplit, axes_split_of
from zeroxla.step.axes.split_batch import SplitBatch
from zeroxla.step.loss_plan import Losses, make_losses
from zeroxla.step.micro_batches import num_evaluated
from zeroxla.step.state import TrainState
from zeroxla.wire.bundles import ALONE_ELEMENTS
from zeroxla.wire.leaves import Layout, make_layout
from zeroxla.wire.resolve import Wiring, make_wiring

REPLICATED = PartitionSpec()
KnownLosses = dict[Any, tuple[Losses, AxesSplit | None]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelOnMesh:
    """A model, a mesh, an optimizer and options.

    Attributes:
      adapted: the model.
      mesh: the mesh, with Auto axes.
      optimizer: the optax transformation.
      config: the options.
      pipeline: the model as layers; None without stages.
      weights: how often a stage of a pipeline gathers its leaves.
      alone_elements: a shard of at least this many elements shares no buffer with others.
      axis_names: other names of the mesh's axes, which the model uses.
      activations: the bytes that activations may take; None keeps all that backward reads.
      known: the losses and their splits by compute dtype, pins, rewrites and remat. Setups of one
        model and mesh share it, so that the model is traced, and axes are searched, once for all.
      desk: where programs get parameters that are on disk.
      wiring: how leaves travel on this mesh.
      losses: the model's loss for training and for evaluation. JAX remembers their traces, so that
        placements, plans and programs share them.
      asked: the options as they were given, in which some may be left to the budget. In `config`
        these have their least value.
      axes: how the work on one row is split over the mesh; None if it is not.
    """

    adapted: Adapted
    mesh: Mesh
    optimizer: optax.GradientTransformation
    config: ZeroConfig
    pipeline: StagedModel | None = None
    weights: Literal["step", "tick"] = "step"
    alone_elements: int = ALONE_ELEMENTS
    axis_names: AxisNames = ()
    activations: ActivationBudget | None = None
    known: KnownLosses = dataclasses.field(default_factory=dict)
    desk: Desk = dataclasses.field(default_factory=Desk, init=False)
    wiring: Wiring = dataclasses.field(init=False)
    losses: Losses = dataclasses.field(init=False)
    asked: ZeroConfig = dataclasses.field(init=False)
    axes: AxesSplit | None = dataclasses.field(init=False)
    _layouts: dict[Any, Layout] = dataclasses.field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "asked", self.config)
        object.__setattr__(self, "config", decided(self.config))
        wiring = make_wiring(self.config, self.mesh, self.desk, self.alone_elements)
        object.__setattr__(self, "wiring", wiring)
        dtype = wiring.collectives.compute_dtype
        keep_remat = self.config.remat == "respect"
        key = dtype, repr(self.config.splits), self.config.rewrite, keep_remat
        if key not in self.known:
            losses = make_losses(
                self.adapted, dtype, self.config.rewrite, self.mesh, keep_remat=keep_remat
            )
            self.known[key] = losses, axes_split_of(self.mesh, losses, dtype, self.config.splits)
        losses, axes = self.known[key]
        object.__setattr__(self, "losses", losses)
        object.__setattr__(self, "axes", axes)

    def first_rows(self, batch: Any, *, count: int | None = None) -> Any:
        """Return rank 0's first micro-batch, of `count`; of the training step's if None."""
        parts = world_size(self.mesh) * (count or self.config.num_micro_batches)
        return jax.tree.map(lambda x: x[: x.shape[0] // parts], batch)

    def rows(
        self, layout: Layout, model_state: Any, batch: Any, key: jax.Array, *, train: bool = True
    ) -> Any:
        """Return the shapes of one device's micro-batch, as its loss takes them: a `SplitBatch` if
        axes split the work on one row.

        Args:
          layout: the leaves.
          model_state, batch, key: the other arguments, or their shapes. The batch is the global
            one.
          train: whether it is a batch to train on.
        """
        count = None
        if not train:
            num_rows = jax.tree.leaves(batch)[0].shape[0] // world_size(self.mesh)
            count = (
                1
                if self.pipeline is None
                else num_evaluated(num_rows, self.config.num_micro_batches)
            )
        model_state, batch, key = shapes_of((model_state, batch, key))
        rows = jax.eval_shape(functools.partial(self.first_rows, count=count), batch)
        if self.axes is None:
            return rows
        apart = self.rows_apart(train=train)
        find = functools.partial(self.axes.batch_parts, layout, train=train, rows_apart=apart)
        return SplitBatch.of_device(rows, self.in_mesh(find, model_state, rows, key))

    def split(
        self, layout: Layout, model_state: Any, batch: Any, key: jax.Array, *, train: bool
    ) -> Any:
        """Return a global batch as a program's loss takes it: a `SplitBatch` if axes split the work
        on one row. The arguments are those of `rows`."""
        if self.axes is None:
            return batch
        rows = self.rows(layout, model_state, batch, key, train=train)
        return SplitBatch(arrays=batch, parts=rows.parts)

    def rows_apart(self, *, train: bool) -> bool:
        """Return whether a device may be given a part of its rows. The rows of several
        micro-batches are cut first."""
        return self.pipeline is None and (not train or self.config.num_micro_batches == 1)

    def layout(self, state: TrainState) -> Layout:
        """Return the layout of a state's leaves under these options."""
        return self.layout_of(state.params, state.placements[0])

    def layout_of(self, params: Any, placements: tuple[Placement, ...]) -> Layout:
        """Return the layout of parameters. It is made once for equal trees and placements.

        Args:
          params: arrays, shapes or tickets; only their paths and dtypes matter.
          placements: how they are stored.
        """
        leaves, tree = jax.tree.flatten(params)
        key = tree, tuple(map(leaf_dtype, leaves)), placements
        if key not in self._layouts:
            self._layouts[key] = make_layout(params, placements, self.config)
        return self._layouts[key]

    def tracing(self) -> AbstractContextManager[set[str]]:
        """Return the context in which programs of this model are traced; see `mesh_context`."""
        return mesh_context(self.mesh, self.axis_names)

    def in_mesh(self, fun: Callable[..., Any], *args: Any) -> Any:
        """Call `fun` on shapes, inside `shard_map` over the mesh; return its result."""
        found: list[Any] = []
        mapped = jax.shard_map(
            lambda *args: found.append(fun(*args)),
            mesh=self.mesh,
            in_specs=REPLICATED,
            out_specs=REPLICATED,
            check_vma=False,
        )
        with self.tracing():
            jax.eval_shape(mapped, *args)
        return found[0]
