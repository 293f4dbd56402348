"""A model's leaves: their names, placements, and treatment under the options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.axes import PIPE, axes_size, leaf_axes
from zeroxla.mesh.placement import AxisPart, Placement, place
from zeroxla.offload.disk.tickets import leaf_dtype
from zeroxla.program.paths import leaf_path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One leaf of the model.

    Attributes:
      path: its name, `a/b/c`.
      placement: how it is stored.
      persistent: whether it is gathered once a step and kept whole, not fetched unit by unit.
      frozen: whether it gets no gradient.
      quantized: whether it travels in the wire formats of the options, if there are any.
      is_wire: whether it is stored as a wire, uint8, and travels in this form. It is then frozen.
    """

    path: str
    placement: Placement
    persistent: bool
    frozen: bool
    quantized: bool
    is_wire: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.placement.shape)

    @property
    def is_split(self) -> bool:
        """Whether each device stores a part of it."""
        return self.placement.dim is not None

    @property
    def fetched(self) -> bool:
        """Whether the fetch plan gathers it."""
        return self.is_split and not self.persistent


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The leaves of a model in the order of its flattened parameters.

    Attributes:
      tree: the tree structure of the parameters.
      leaves: the leaves.
    """

    tree: Any
    leaves: tuple[Leaf, ...]

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self.leaves)

    @property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(leaf.placement for leaf in self.leaves)

    def indices(self, *, fetched: bool) -> list[int]:
        return [i for i, leaf in enumerate(self.leaves) if leaf.fetched == fetched]

    def trainable(self, params: Any, replacement: Any) -> Any:
        """Return `params` with `replacement` for every frozen leaf."""
        kept = [
            replacement if leaf.frozen else x
            for leaf, x in zip(self.leaves, jax.tree.leaves(params), strict=True)
        ]
        return self.tree.unflatten(kept)

    def with_frozen(self, trainable: Any, params: Any) -> Any:
        """Return `trainable`, whose frozen leaves are empty nodes, with the frozen leaves of
        `params` in their place."""
        rest = iter(jax.tree.leaves(trainable))
        pairs = zip(self.leaves, jax.tree.leaves(params), strict=True)
        return self.tree.unflatten([x if leaf.frozen else next(rest) for leaf, x in pairs])


def make_layout(params: Any, placements: Sequence[Placement], config: ZeroConfig) -> Layout:
    """Decide from the options how each leaf is treated.

    Leaves up to the persistence threshold are persistent, in order, as long as they fit the cap.
    """
    with_paths, tree = jax.tree_util.tree_flatten_with_path(params)
    room = math.inf if config.model_persistence_cap is None else config.model_persistence_cap
    largest = config.largest_persistent(sum(math.prod(x.shape) for x in placements))
    leaves = []
    for (path, x), placement in zip(with_paths, placements, strict=True):
        elements = math.prod(placement.shape)
        persistent = elements <= min(largest, room)
        room -= elements if persistent else 0
        name = leaf_path(path)
        layers = math.prod(placement.shape[d] for d in placement.layer_dims)
        large = elements >= config.quantize_threshold * layers
        fetched = placement.dim is not None and not persistent
        is_wire = _is_wire(leaf_dtype(x), name, config)
        leaves.append(
            Leaf(
                path=name,
                placement=placement,
                persistent=persistent,
                frozen=config.is_frozen(name),
                quantized=fetched and large and not is_wire and not config.is_unquantized(name),
                is_wire=is_wire,
            )
        )
    return Layout(tree=tree, leaves=tuple(leaves))


def place_params(
    params: Any,
    mesh: Mesh,
    layer_dims: Sequence[Sequence[int]],
    stage_dims: Mapping[int, int],
    parts: Sequence[tuple[AxisPart, ...]] | None = None,
) -> tuple[Placement, ...]:
    """Place every leaf.

    Args:
      params: the leaves' shapes.
      mesh: the mesh of all devices.
      layer_dims: the dims along which loops slice each leaf. They are not split, except over
        `pipe`.
      stage_dims: the layer dims that are split over `pipe`, by the number of the leaf.
      parts: the parts of each leaf, along axes that split work. Its shards are cut along another
        dim, and lie along these axes innermost; see `step/axes/deals.py`.
    """
    found = []
    for i, (leaf, skip) in enumerate(zip(jax.tree.leaves(params), layer_dims, strict=True)):
        stage_dim = stage_dims.get(i)
        axes = leaf_axes(mesh)
        if stage_dim is not None:
            axes = tuple(axis for axis in axes if axis != PIPE)
        own = parts[i] if parts else ()
        last = [part.axis for part in reversed(own)]
        axes = (*(axis for axis in axes if axis not in last), *last)
        skipped = {*skip, *(part.dim for part in own)}
        placement = place(leaf.shape, axes_size(mesh, axes), skip=sorted(skipped), axes=axes)
        placement = dataclasses.replace(placement, layer_dims=tuple(sorted(skip)), parts=own)
        if stage_dim is not None and placement.dim is not None:
            placement = dataclasses.replace(placement, stage_dim=stage_dim)
        found.append(placement)
    return tuple(found)


def _is_wire(dtype: Any, path: str, config: ZeroConfig) -> bool:
    return dtype == jnp.uint8 and config.is_frozen(path)


def check_floating(params: Any, config: ZeroConfig) -> None:
    """Check that every leaf can have a gradient, or is a frozen leaf's wire.

    Raises:
      ValueError: a leaf is not floating.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        is_wire = _is_wire(leaf.dtype, leaf_path(path), config)
        if not is_wire and not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"the leaf {leaf_path(path)!r} has dtype {leaf.dtype}; parameters must be "
                "floating, as each gets a gradient and a float32 master. Keep integers and flags "
                "in another collection (linen) or in a Variable that is no Param (nnx)"
            )


def place_opt_state(
    opt_state: Any, params: Any, placements: Sequence[Placement], mesh: Mesh
) -> tuple[Placement, ...]:
    """Place the optimizer's arrays. An array whose path ends with a leaf's path, and which has the
    leaf's shape (a moment), is placed like the leaf. Others (Adafactor's factors, counters) are
    placed by their own shape."""
    with_paths = jax.tree_util.tree_flatten_with_path(params)[0]
    by_path = {tuple(path): p for (path, _), p in zip(with_paths, placements, strict=True)}
    lengths = sorted({len(path) for path in by_path}, reverse=True)
    found, axes = [], leaf_axes(mesh)
    for path, leaf in jax.tree_util.tree_flatten_with_path(opt_state)[0]:
        ends = (by_path.get(tuple(path[len(path) - n :])) for n in lengths if n <= len(path))
        like = next((p for p in ends if p is not None and p.shape == tuple(leaf.shape)), None)
        own = place(leaf.shape, axes_size(mesh, axes), axes=axes)
        found.append(own if like is None else like)
    return tuple(found)
