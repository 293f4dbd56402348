"""A model given as a list of layers: run as a whole, or cut into stages."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zeroxla.frontend import Adapted
from zeroxla.frontend.base import Tree, checked
from zeroxla.pipeline.layer_cost import LayerCost
from zeroxla.pipeline.layers import Layer, make_layer
from zeroxla.pipeline.leaf_piece import LeafPiece
from zeroxla.pipeline.model_shapes import ModelShapes
from zeroxla.pipeline.partition import Partition
from zeroxla.pipeline.stage import Stage, StateShare
from zeroxla.program.paths import leaf_path


class LayerList:
    """Layers that run one after another; see `Pipeline`."""

    def __init__(
        self,
        layers: Sequence[Any],
        loss: Callable[[Any, Any], Any],
        inputs: Callable[[Any], Any] | None,
        remat: int | None,
    ) -> None:
        if not layers:
            raise ValueError("a pipeline needs a layer")
        self.layers = [make_layer(layer, i) for i, layer in enumerate(layers)]
        self._loss, self._inputs, self._remat = loss, inputs or (lambda batch: batch), remat
        _check_names(self.layers)

    @property
    def adapted(self) -> Adapted:
        """The whole model as pure functions."""
        return Adapted(init=self._init, loss=self._whole_loss)

    def cut(
        self,
        divide: Callable[[Sequence[LayerCost]], Partition],
        shapes: ModelShapes,
        *,
        train: bool,
    ) -> tuple[list[Stage], Partition]:
        """Cut the layers into stages.

        Args:
          divide: chooses the boundaries, given the costs of the layers.
          shapes: the shapes to cut them for.
          train: whether layers are told that they are trained.

        Returns:
          The stages, and the partition that `divide` chose.

        Raises:
          NotImplementedError: axes split the work on one row, or the loss is rewritten.
        """
        if shapes.losses is not None:
            raise NotImplementedError(
                "a pipeline of a list of layers on a mesh with axes that split the work on one "
                "row, or with ZeroConfig(rewrite=...): layers of a list are called one by one, and "
                "plans of axes and rewrites are of the whole loss; make it with "
                "Pipeline.from_model, or leave out these axes and this option"
            )
        # Each stage is traced later, on the output of the stage before.
        tree, partition = shapes.params, divide(self._costs(shapes.params))
        by_name, state_by_name = _leaves_by_name(tree), _leaves_by_name(shapes.model_state)
        state_tree = jax.tree.structure(shapes.model_state)
        stages, last = [], len(partition.boundaries) - 2
        for i, (first, end) in enumerate(itertools.pairwise(partition.boundaries)):
            # Sorted, because a dict flattens in this order.
            names = sorted({layer.name for layer in self.layers[first:end]} & by_name.keys())
            pieces = tuple(LeafPiece(leaves=(i,)) for name in names for i in by_name[name])
            stateful = {layer.name for layer in self.layers[first:end]}
            keeps = [StateShare(i) for name in stateful for i in state_by_name.get(name, ())]
            structure = jax.tree.structure({name: tree[name] for name in names})
            ends = {"is_first": i == 0, "is_last": i == last}
            run = self._stage(first, end, structure, state_tree, train=train, **ends)
            keeps = tuple(sorted(keeps, key=lambda share: share.leaf))
            stages.append(Stage(pieces=pieces, run=run, keeps=keeps, **ends))
        return stages, partition

    def _costs(self, tree: Any) -> list[LayerCost]:
        """Return the cost of each layer; shared parameters count where they are used first."""
        seen: set[str] = set()
        costs = []
        for layer in self.layers:
            mine = jax.tree.leaves(tree.get(layer.name, {})) if layer.name not in seen else []
            seen.add(layer.name)
            count = sum(math.prod(x.shape) for x in mine)
            costs.append(LayerCost(name=layer.name, kind=layer.kind, parameters=count))
        return costs

    def _stage(
        self,
        first: int,
        end: int,
        structure: Any,
        state_tree: Any,
        *,
        train: bool,
        is_first: bool,
        is_last: bool,
    ) -> Callable[..., Any]:
        """Return the function that computes the layers from `first` to `end`; see `Stage.run`."""

        def run(
            leaves: Sequence[jax.Array],
            x: Any,
            batch: Any,
            key: jax.Array,
            state: Sequence[jax.Array],
        ) -> tuple[Any, list[jax.Array]]:
            params, model_state = structure.unflatten(leaves), state_tree.unflatten(state)
            x = self._inputs(batch) if is_first else x
            x, model_state = self._run(first, end, params, model_state, x, key, train=train)
            y = checked(self._loss(x, batch)) if is_last else x
            return y, jax.tree.leaves(model_state)

        return run

    def _run(
        self,
        first: int,
        end: int,
        params: Tree,
        model_state: Tree,
        x: Any,
        key: jax.Array,
        *,
        train: bool,
    ) -> tuple[Any, Tree]:
        """Run the layers from `first` to `end`, and recompute groups of them if `remat` is set."""
        group_size = self._remat or max(end - first, 1)
        state = dict(model_state)
        for start in range(first, end, group_size):
            stop = min(start + group_size, end)

            def group(params: Tree, state: Tree, x: Any, key: jax.Array, start=start, stop=stop):
                state = dict(state)
                for i in range(start, stop):
                    layer = self.layers[i]
                    mine = params.get(layer.name, {}), state.get(layer.name, {})
                    mine_key = jax.random.fold_in(key, i)
                    x, new = layer.call(*mine, x, mine_key, train=train)
                    if new:
                        state[layer.name] = new
                return x, state

            run = jax.checkpoint(group) if self._remat and train else group
            x, state = run(params, state, x, key)
        return x, state

    def _init(self, key: jax.Array, batch: Any) -> tuple[Tree, Tree]:
        """Make the parameters and the model state, calling each layer on the one before."""
        params: Tree = {}
        model_state: Tree = {}
        x = self._inputs(batch)
        for i, layer in enumerate(self.layers):
            mine_key = jax.random.fold_in(key, i)
            made, state = layer.init(mine_key, x)
            if layer.name not in params:
                if made:
                    params[layer.name] = made
                if state:
                    model_state[layer.name] = state
            else:
                _check_tie(made, params[layer.name], i, layer)
            known = params.get(layer.name, {}), model_state.get(layer.name, {})
            x, _ = layer.call(*known, x, mine_key, train=True)
            _check_boundary(x, i, layer)
        return params, model_state

    def _whole_loss(
        self, params: Tree, model_state: Tree, batch: Any, key: jax.Array, *, train: bool
    ) -> tuple[jax.Array, dict[str, jax.Array], Tree]:
        x = self._inputs(batch)
        x, state = self._run(0, len(self.layers), params, model_state, x, key, train=train)
        return *checked(self._loss(x, batch)), state


def _leaves_by_name(tree: Any) -> dict[str, list[int]]:
    """Return the numbers of a tree's leaves by the layer that they belong to."""
    found: dict[str, list[int]] = collections.defaultdict(list)
    for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        found[path[0].key].append(i)
    return found


def _check_names(layers: Sequence[Layer]) -> None:
    """Check that no key of a tied layer is also the name of another layer."""
    counts = collections.Counter(layer.name for layer in layers)
    for layer in layers:
        if counts[layer.name] > 1 and not layer.tied:
            raise ValueError(
                f"the key {layer.name!r} of a TiedLayer is also the name of layer "
                f"{layers.index(layer)}; use another key"
            )


def _check_tie(made: Tree, first: Tree, index: int, layer: Layer) -> None:
    """Check that a tied layer has no leaves that the first layer with its key lacks."""
    mine, known = (
        {leaf_path(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (made, first)
    )
    if mine.items() - known.items():
        raise ValueError(
            f"the tied layer {layer.name!r}, layer {index}, has leaves of the shapes {mine}, and "
            f"the first with this key {known}; tie modules with the same"
        )


def _check_boundary(x: Any, index: int, layer: Layer) -> None:
    """Check that a layer returned an array or a tuple of arrays."""
    arrays = x if isinstance(x, tuple) else (x,)
    if not arrays or not all(isinstance(a, jax.Array) or hasattr(a, "aval") for a in arrays):
        kinds = ", ".join(type(a).__name__ for a in arrays)
        raise ValueError(
            f"layer {index} ({layer.kind}) returns {type(x).__name__} ({kinds}); what goes from "
            "layer to layer is one array or a tuple of arrays"
        )
