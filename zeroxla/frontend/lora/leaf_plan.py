"""`LoraPlan`: which leaves of a model have adapters, and how each leaf is stored."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.config.wire_format import WireFormat
from zeroxla.frontend.base import Adapted, Tree, stream_key, to_nested
from zeroxla.frontend.lora.at_rest import Frozen, as_wires, format_of, from_wires, layer_size
from zeroxla.frontend.lora.dense_view import DenseView
from zeroxla.frontend.lora.magnitudes import SMALLEST, column_norms
from zeroxla.frontend.lora.uses import DenseLeaf, find_uses
from zeroxla.program.paths import Path, paths_of
from zeroxla.program.trace import trace

BASE, LORA = "base", "lora"


class Adapter(NamedTuple):
    """The adapter of a leaf; see `LoraPlan.adapter_shapes`."""

    a: Any
    b: Any
    m: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoraPlan:
    """The leaves of a model with adapters.

    Attributes:
      shapes: the shapes of all leaves, as a tree.
      dense: the dense leaves, by path.
      targets: the paths of the leaves with adapters.
      rank: the rank of the adapters.
      scaling: the factor of A . B: alpha / rank, or alpha / sqrt(rank) if rank-stabilized.
      dora: whether adapters have magnitudes.
      frozen: how dense leaves are stored.
    """

    shapes: Tree
    dense: Mapping[Path, DenseLeaf]
    targets: tuple[Path, ...]
    rank: int
    scaling: float
    dora: bool
    frozen: Frozen | None

    def fresh_adapters(self, key: jax.Array, stored: Callable[[Path], jax.Array]) -> Tree:
        """Return new adapters, float32; see `adapter_shapes`.

        A is uniform within 1 / sqrt(inputs), as in PEFT; its key is derived from the leaf's path. B
        is zero. Magnitudes are the norms of the base's columns.

        Args:
          key: a PRNG key.
          stored: returns a leaf of the base in the form in which it is stored; called with DoRA.
        """
        made: dict[Path, jax.Array] = {}
        for path in self.targets:
            shapes, leaf = self.adapter_shapes(path), self.dense[path]
            bound = 1 / math.sqrt(math.prod(leaf.sizes(leaf.contracted)))
            mine = stream_key(key, "/".join((LORA, *path)))
            made[*path, "a"] = jax.random.uniform(mine, shapes["a"], jnp.float32, -bound, bound)
            made[*path, "b"] = jnp.zeros(shapes["b"], jnp.float32)
            if self.dora:
                made[*path, "m"] = self.base_magnitudes(path, stored(path))
        return to_nested(made)

    def adapter_shapes(self, path: Path) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a leaf's A [*layers, *inputs, rank], B [*layers, rank, *outputs]
        and, with DoRA, magnitudes m [*layers, *outputs]."""
        leaf = self.dense[path]
        layers, outputs = leaf.sizes(leaf.layer_dims), leaf.sizes(leaf.others)
        a, b = (*layers, *leaf.sizes(leaf.contracted), self.rank), (*layers, self.rank, *outputs)
        return {"a": a, "b": b, **({"m": (*layers, *outputs)} if self.dora else {})}

    def base_magnitudes(self, path: Path, stored: jax.Array) -> jax.Array:
        """Return the norms of the columns of a leaf of the base, float32 [*layers, *outputs]: with
        these magnitudes, and B zero, the leaf is the base's own.

        Args:
          path: the path of a leaf with an adapter.
          stored: the leaf in the form in which it is stored.
        """
        leaf = self.dense[path]
        norms = column_norms(self.floats(path, stored), leaf.contracted)
        order = [d for d in range(len(leaf.shape)) if d not in leaf.contracted]
        return jnp.transpose(norms, [order.index(d) for d in (*leaf.layer_dims, *leaf.others)])

    def stored_shapes(self) -> dict[Path, tuple[int, ...]]:
        """Return the natural shapes of the base, as it is stored, and of the adapters."""
        found: dict[Path, tuple[int, ...]] = {}
        for path, x in paths_of(self.shapes):
            leaf, format = self.dense.get(path), self.format(path)
            if leaf is None or format is None:
                found[BASE, *path] = tuple(x.shape)
            else:
                num_bytes = format.num_bytes(layer_size(leaf))
                found[BASE, *path] = (*leaf.sizes(leaf.layer_dims), num_bytes)
        for path in self.targets:
            found |= {(LORA, *path, name): x for name, x in self.adapter_shapes(path).items()}
        return found

    @property
    def has_wires(self) -> bool:
        """Whether leaves of the base are stored in 8 or 4 bits."""
        return any(self.format(path) is not None for path in self.dense)

    def format(self, path: Path) -> WireFormat | None:
        """Return the format in which a leaf is stored; None for floats."""
        leaf = self.dense.get(path)
        return None if leaf is None else format_of(leaf, self.frozen)

    def stored(self, path: Path, values: jax.Array) -> jax.Array:
        """Return a leaf of the base in its stored form: as wires, or unchanged."""
        leaf, format = self.dense.get(path), self.format(path)
        return values if leaf is None or format is None else as_wires(values, leaf, format)

    def evaluated_leaves(self, params: Tree) -> list[Any]:
        """Return the leaves of the base, in order, as `rewrite.evaluate` takes them: a `DenseView`
        for each dense leaf that has an adapter or is a wire, and arrays for the others."""
        adapters = adapters_of(params)
        dtype = next(iter(adapters.values())).a.dtype  # in which the model computes
        return [
            self._evaluated_leaf(path, x, adapters, dtype) for path, x in paths_of(params[BASE])
        ]

    def _evaluated_leaf(
        self, path: Path, x: Any, adapters: Mapping[Path, Adapter], dtype: Any
    ) -> Any:
        leaf = self.dense.get(path)
        if leaf is None or (x.dtype != jnp.uint8 and path not in adapters):
            return x
        a, b, m = adapters.get(path, Adapter(None, None))
        is_wire = x.dtype == jnp.uint8
        return DenseView(
            weight=x,
            a=a,
            b=b,
            m=m,
            leaf=leaf,
            scaling=self.scaling,
            format=self.format(path) if is_wire else None,
            dtypes=(jnp.dtype(dtype),) if is_wire else (),
            dims=tuple(range(len(leaf.shape))),
        )

    def traced_shapes(self, dtype: Any) -> Tree:
        """Return the shapes of the base as the model sees it, floats in `dtype`."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), self.shapes)

    def merged(self, path: Path, values: Any, adapter: Adapter | None) -> jax.Array:
        """Return a leaf of the base as a plain array, with its adapter added, in float32."""
        return self.with_adapter(path, self.floats(path, values), adapter)

    def with_adapter(self, path: Path, x: jax.Array, adapter: Adapter | None) -> jax.Array:
        """Return a leaf of the base, given as floats, with its adapter added, in float32."""
        leaf = self.dense.get(path)
        if leaf is None or adapter is None:
            return x
        lead = len(leaf.layer_dims)
        a, b = (jnp.asarray(part, jnp.float32) for part in (adapter.a, adapter.b))
        layers = tuple(range(lead))
        contracting = ((a.ndim - 1,), (lead,))
        more = lax.dot_general(
            a, b, (contracting, (layers, layers)), precision=lax.Precision.HIGHEST
        )  # [*layers, *contracted, *others]
        order = (*leaf.layer_dims, *leaf.contracted, *leaf.others)
        more = jnp.transpose(more, [order.index(d) for d in range(len(order))])
        x = x.astype(jnp.float32) + self.scaling * more
        if adapter.m is None:
            return x
        order = (*leaf.layer_dims, *leaf.others)
        m = jnp.asarray(adapter.m, jnp.float32)
        m = jnp.transpose(m, [order.index(d) for d in sorted(order)])
        norms = jnp.maximum(column_norms(x, leaf.contracted), math.sqrt(SMALLEST))
        return x * jnp.expand_dims(m / norms, leaf.contracted)

    def floats(self, path: Path, stored: Any) -> jax.Array:
        """Return a leaf of the base, given in its stored form, as floats."""
        leaf, format = self.dense.get(path), self.format(path)
        x = jnp.asarray(stored)
        return x if leaf is None or format is None else from_wires(x, leaf, format)


def adapters_of(params: Tree) -> dict[Path, Adapter]:
    """Return the adapters of a tree of parameters, by the path of their leaf."""
    flat = dict(paths_of(params[LORA]))
    return {
        path[:-1]: Adapter(x, flat[*path[:-1], "b"], flat.get((*path[:-1], "m")))
        for path, x in flat.items()
        if path[-1] == "a"
    }


class NoTargetError(ValueError):
    """The pattern for adapters matches no leaf of the model."""


def make_lora_plan(
    base: Adapted,
    key: jax.Array,
    batch: Any,
    *,
    targets: str,
    rank: int,
    scaling: float,
    dora: bool,
    frozen: Frozen | None,
) -> LoraPlan:
    """Read from the trace of a model's loss which leaves are dense.

    Args:
      base: the model without adapters.
      key, batch: arguments of its first call; shapes suffice.
      targets, rank, dora, frozen: the arguments of `lora`.
      scaling: the factor of A . B.

    Raises:
      NoTargetError: `targets` matches no leaf.
      ValueError: it matches one that is not dense.
    """
    params, model_state = jax.eval_shape(base.init, key, batch)
    leaves, tree = jax.tree.flatten(params)
    paths = [path for path, _ in paths_of(params)]

    def loss(leaves: list[jax.Array], *args: Any) -> Any:
        return base.loss(tree.unflatten(leaves), *args, train=True)

    program, _ = trace(loss, leaves, model_state, batch, key)
    found = find_uses(program, program.inputs[: len(leaves)])
    dense = {path: leaf for path, uses in zip(paths, found) if (leaf := uses.dense()) is not None}
    matched = [(p, uses) for p, uses in zip(paths, found) if re.search(targets, "/".join(p))]
    if not matched:
        raise NoTargetError(
            f"targets={targets!r} matches no leaf; the dense leaves of the model are {_list(dense)}"
        )
    for path, uses in matched:
        if (obstacle := uses.obstacle()) is not None:
            raise ValueError(
                f"targets={targets!r} matches {'/'.join(path)}, which is not dense: "
                f"{obstacle}; the dense leaves of the model are {_list(dense)}"
            )
    return LoraPlan(
        shapes=params,
        dense=dense,
        targets=tuple(path for path, _ in matched),
        rank=rank,
        scaling=scaling,
        dora=dora,
        frozen=frozen,
    )


def _list(paths: Mapping[Path, DenseLeaf], most: int = 12) -> str:
    names = ["/".join(path) for path in paths]
    shown = ", ".join(names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
