"""`AxesSplit`: how a training setup splits its loss over the axes of its mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

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
from zeroxla.step.axes.split_loss import SplitLoss
from zeroxla.step.loss_plan import Losses, leaf_shapes
from zeroxla.wire.leaves import Layout

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

    def parts(self, layout: Layout, model_state: Any, rows: Any, key: Any) -> Parts:
        """Decide the parts of each leaf, from shapes alone. Call it inside `shard_map`.

        Args:
          layout: the model's leaves; only their shapes matter.
          model_state: the model's state.
          rows: the rows of one micro-batch.
          key: the key of the loss.
        """
        params = layout.tree.unflatten(leaf_shapes(layout, self.dtype))
        rest = model_state, rows, key
        decided = _shapes((params, *rest))
        if decided not in self._decided:
            found = SplitLoss.of(
                self.losses[True],
                self.axes,
                params,
                *rest,
                costs=self.costs,
                proof=self._proof,
                pins=self._pins(layout),
            )
            self._made[True, found.parts, _shapes(rest)] = found
            self._decided[decided] = found
        found = self._decided[decided]
        self._newest[:] = [found]
        return found.parts

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
        batch: Any,
        key: jax.Array,
    ) -> Any:
        rest = model_state, batch, key
        made = train, parts, _shapes(rest)
        if made not in self._made:
            self._made[made] = SplitLoss.of(
                self.losses[train],
                self.axes,
                shapes,
                *rest,
                parts,
                costs=self.costs,
                proof=self._proof,
                pins=pins,
            )
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
