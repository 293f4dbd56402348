"""`AxesSplit`: how a training setup splits its loss over the axes of its mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from zeroxla.config.splits import Splits
from zeroxla.mesh.axes import split_axes
from zeroxla.mesh.placement import AxisPart
from zeroxla.program.shapes import structure_of
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.axis_links import costs_on
from zeroxla.split.plan_proof import PlanProof, right_in_this_process
from zeroxla.step.axes.pins import Pins
from zeroxla.step.axes.split_batch import BatchParts, SplitBatch
from zeroxla.step.loss_plan import Losses, leaf_shapes
from zeroxla.wire.leaves import Layout

if TYPE_CHECKING:
    from zeroxla.step.axes.split_loss import SplitLoss

Parts = tuple[tuple[AxisPart, ...], ...]
"""The parts of each leaf."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AxesSplit:
    """Splits the losses of a model.

    Attributes:
      axes: (name, length) of each axis, in the order in which the loss is split.
      losses: the losses of whole leaves.
      dtype: the dtype in which the model computes.
      costs: what each axis costs.
      splits: what a user says about leaves and arrays; None if nothing.
    """

    axes: tuple[tuple[str, int], ...]
    losses: Losses
    dtype: Any
    costs: Mapping[str, AxisCosts]
    splits: Splits | None = None
    _split: dict[Parts, Losses] = dataclasses.field(default_factory=dict)
    _made: dict[Any, SplitLoss] = dataclasses.field(default_factory=dict)
    _decided: dict[Any, SplitLoss] = dataclasses.field(default_factory=dict)
    _proof: PlanProof = dataclasses.field(
        default_factory=lambda: PlanProof(right=right_in_this_process())
    )
    _newest: list[SplitLoss] = dataclasses.field(default_factory=list)

    def parts(
        self, layout: Layout, model_state: Any, rows: Any, key: Any, *, rows_apart: bool
    ) -> Parts:
        """Decide the parts of each leaf, from shapes alone. Call it inside `shard_map`.

        Args:
          layout: the model's leaves; only their shapes matter.
          model_state: the model's state.
          rows: the rows of one micro-batch.
          key: the key of the loss.
          rows_apart: whether the parts of the batch may be parts of its rows.
        """
        rest = model_state, rows, key
        return self._decide(True, layout, None, *rest, rows_apart=rows_apart).parts

    def batch_parts(
        self,
        layout: Layout,
        model_state: Any,
        rows: Any,
        key: Any,
        *,
        train: bool,
        rows_apart: bool,
    ) -> BatchParts:
        """Decide the parts of each array of a batch that a device is given, from shapes alone. Call
        it inside `shard_map`.

        Args:
          layout: the model's leaves, with their parts.
          model_state, rows, key, rows_apart: as for `parts`.
          train: whether it is a batch to train on.
        """
        parts = tuple(leaf.placement.parts for leaf in layout)
        rest = model_state, rows, key
        return self._decide(train, layout, parts, *rest, rows_apart=rows_apart).batch

    def _decide(
        self,
        train: bool,
        layout: Layout,
        parts: Parts | None,
        model_state: Any,
        rows: Any,
        key: Any,
        *,
        rows_apart: bool,
    ) -> SplitLoss:
        """Return the split loss for rows of which nothing is decided; for leaves of which nothing
        is decided if `parts` is None."""
        params = layout.tree.unflatten(leaf_shapes(layout, self.dtype))
        of_shapes = _shapes((params, model_state, rows, key))
        if (train, parts, rows_apart, of_shapes) not in self._decided:
            rest = model_state, rows, key
            pins = self._pins(layout)
            found = self._search(train, params, *rest, parts, pins, rows_apart=rows_apart)
            given = SplitBatch.of_device(rows, found.batch)
            self._made[train, found.parts, _shapes((model_state, given, key))] = found
            for known in (parts, found.parts):
                self._decided[train, known, rows_apart, of_shapes] = found
        found = self._decided[train, parts, rows_apart, of_shapes]
        if train:
            self._newest[:] = [found]
        return found

    def _search(
        self,
        train: bool,
        params: Any,
        model_state: Any,
        batch: Any,
        key: Any,
        parts: Parts | None,
        pins: Pins | None,
        **options: Any,
    ) -> SplitLoss:
        from zeroxla.step.axes.split_loss import SplitLoss  # here: few meshes have such axes

        loss, rest = self.losses[train], (model_state, batch, key)
        tools = {"costs": self.costs, "proof": self._proof, "pins": pins}
        return SplitLoss.of(loss, self.axes, params, *rest, parts, **tools, **options)

    @property
    def newest(self) -> SplitLoss:
        """The split loss of training for the newest shapes."""
        return self._newest[0]

    def of_parts(self, layout: Layout) -> tuple[Layout, Losses]:
        """Return the layout of the parts that a device computes with, and the losses of them."""
        parts = tuple(leaf.placement.parts for leaf in layout)
        if parts not in self._split:
            whole = leaf_shapes(layout, self.dtype)
            shapes = layout.tree.unflatten(whole)
            self._split[parts] = {
                train: functools.partial(self._loss, train, shapes, parts, self._pins(layout))
                for train in (True, False)
            }
        leaves = (dataclasses.replace(leaf, placement=leaf.placement.of_part) for leaf in layout)
        return Layout(tree=layout.tree, leaves=tuple(leaves)), self._split[parts]

    def _loss(
        self,
        train: bool,
        shapes: Any,
        parts: Parts,
        pins: Pins | None,
        params: Any,
        model_state: Any,
        batch: SplitBatch,
        key: jax.Array,
    ) -> Any:
        assert isinstance(batch, SplitBatch), "the loss does not know the parts of its batch"
        rest = model_state, batch, key
        made = train, parts, _shapes(rest)
        if made not in self._made:
            self._made[made] = self._search(train, shapes, *rest, parts, pins)
        split = self._made[made]
        if train:
            self._newest[:] = [split]
        return split(params, *rest)

    def _pins(self, layout: Layout) -> Pins | None:
        if self.splits is None:
            return None
        return Pins(splits=self.splits, paths=tuple(leaf.path for leaf in layout))


def axes_split_of(
    mesh: Mesh, losses: Losses, dtype: Any, splits: Splits | None
) -> AxesSplit | None:
    """Return how losses are split over the axes of a mesh; None if it has none that split work."""
    axes = tuple((axis, mesh.shape[axis]) for axis in split_axes(mesh))
    if not axes:
        return None
    costs = {axis: costs_on(mesh, axis) for axis, _ in axes}
    return AxesSplit(axes=axes, losses=losses, dtype=dtype, costs=costs, splits=splits)


def _shapes(tree: Any) -> Any:
    """Return a hashable value that is equal for arrays of the same shapes and dtypes."""
    return structure_of(tree), tuple(x.dtype for x in jax.tree.leaves(tree))
