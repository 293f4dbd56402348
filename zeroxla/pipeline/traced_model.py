"""A model cut into stages from its trace, without a list of layers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zeroxla.frontend import Adapted
from zeroxla.pipeline.layer_cost import LayerCost
from zeroxla.pipeline.line import LossLine, make_line
from zeroxla.pipeline.line_layers import layers_of
from zeroxla.pipeline.line_stage import make_stage
from zeroxla.pipeline.model_shapes import ModelShapes
from zeroxla.pipeline.partition import Partition
from zeroxla.pipeline.stage import Stage
from zeroxla.program.paths import paths_of
from zeroxla.program.shapes import structure_of

MOST_LINES = 8
"""So many lines are remembered, for different shapes of batches."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TracedModel:
    """Any model whose loss can be traced.

    Attributes:
      adapted: the whole model as pure functions.
    """

    adapted: Adapted
    _lines: dict[Any, LossLine] = dataclasses.field(default_factory=dict, init=False)

    def cut(
        self,
        divide: Callable[[Sequence[LayerCost]], Partition],
        shapes: ModelShapes,
        *,
        train: bool,
    ) -> tuple[list[Stage], Partition]:
        """Cut the model into stages; see `LayerList.cut`."""
        line = self._line(shapes, train=train)
        starts, layers = layers_of(line, [path for path, _ in paths_of(shapes.params)])
        partition = divide(layers)
        state_paths = [path for path, _ in paths_of(shapes.model_state)]
        places = [*starts, line.length]
        ends = itertools.pairwise(places[b] for b in _boundaries(partition, layers))
        stages = [make_stage(line, start, end, state_paths) for start, end in ends]
        return stages, partition

    def _line(self, shapes: ModelShapes, *, train: bool) -> LossLine:
        mesh = jax.sharding.get_abstract_mesh()
        dtypes = tuple(str(x.dtype) for x in jax.tree.leaves(shapes.arguments))
        own = shapes.losses and shapes.losses[train]
        known = structure_of(shapes.arguments), dtypes, mesh, train, shapes.kinds, own
        if known not in self._lines:
            while len(self._lines) >= MOST_LINES:
                del self._lines[next(iter(self._lines))]
            self._lines[known] = make_line(self.adapted, shapes, train=train)
        return self._lines[known]


def _boundaries(partition: Partition, layers: Sequence[LayerCost]) -> Sequence[int]:
    """Return the boundaries of a partition in the layers of another trace of the model.

    In evaluation a model may have other layers than in training, as where only one of the two
    traces repeats a block exactly. Every boundary is then the one with the nearest number of
    parameters before it.

    Raises:
      ValueError: the first or the last stage would have no layer.
    """
    sizes, others = ([layer.parameters for layer in x] for x in (partition.layers, layers))
    found = list(partition.boundaries)
    if sizes != others:
        before, before_other = ([0, *itertools.accumulate(x)] for x in (sizes, others))
        inner = range(1, len(others))
        found = [min(inner, key=lambda i: abs(before_other[i] - before[b])) for b in found[1:-1]]
        found = [0, *found, len(others)]
    for stage in (0, len(found) - 2):
        if found[stage] == found[stage + 1]:
            raise ValueError(
                f"the boundaries {found} leave stage {stage} without a layer; the first stage of a "
                "model that is cut from its trace has what reads the batch, the last one the loss"
            )
    return found
