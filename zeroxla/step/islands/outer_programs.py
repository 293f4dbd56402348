"""The programs of an exchange: they make bytes of differences, and parameters of bytes.

No program communicates: each device works on its own rows, and the host moves the bytes between
islands. So a program may run beside a training step, from another thread.

An exchange has two moves, and its bytes do not grow with the number of islands. First each island
sends every other one that one's part of its differences (a reduce-scatter); each averages its part.
Then each sends its mean to the others (an all-gather). All islands decode the same bytes of the
same mean, so their outer parameters stay equal bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zeroxla.config.outer import Outer
from zeroxla.config.wire_format import WireFormat
from zeroxla.offload.memory_kinds import put, to_device
from zeroxla.step.islands.fragments import ShardFragment
from zeroxla.step.islands.outer_state import FragmentState
from zeroxla.wire.quantize import Wire, dequantize, quantize

Leaves = dict[int, jax.Array]
"""The leaves of a fragment, by number."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OuterPrograms:
    """The programs of one fragment.

    Attributes:
      outer: the options.
      mesh: the island's mesh.
      shardings: how each leaf of the fragment is stored.
      fragment: the fragment.
      num_islands: the number of islands.
    """

    outer: Outer
    mesh: Mesh
    shardings: Mapping[int, NamedSharding]
    fragment: ShardFragment
    num_islands: int

    @property
    def rows(self) -> PartitionSpec:
        """How arrays [devices, ...] are split: a row for each device."""
        return PartitionSpec(self.mesh.axis_names)

    @property
    def specs(self) -> dict[int, PartitionSpec]:
        """How each leaf of the fragment is split."""
        return {i: sharding.spec for i, sharding in self.shardings.items()}

    @functools.cached_property
    def begin(self) -> Callable[[Leaves], FragmentState]:
        """(leaves) -> the state before the first exchange."""

        def local(leaves: Leaves) -> FragmentState:
            copy = self.fragment.take(leaves)[None]
            with_errors = self.outer.error_feedback and self.outer.wire is not None
            part = self.fragment.size // self.num_islands
            return FragmentState(
                copy=copy,
                opt_state=self.outer.optimizer.init(copy),
                error=jnp.zeros_like(copy) if with_errors else None,
                mean_error=jnp.zeros((1, part), jnp.float32) if with_errors else None,
            )

        run = self._map(local, (self.specs,), self.state_specs)
        return jax.jit(lambda leaves: run(_here(leaves)))

    @functools.cached_property
    def pack(self) -> Callable[..., tuple[jax.Array, jax.Array | None]]:
        """(leaves, copy, error) -> the bytes for each island, uint8 [devices, islands, bytes], and
        the next error."""

        def local(leaves: Leaves, copy: jax.Array, error: Any) -> tuple[jax.Array, Any]:
            difference = copy[0] - self.fragment.take(leaves)
            if error is not None:
                difference = difference + error[0]
            parts = difference.reshape(self.num_islands, -1)
            data = encoded(parts, self.outer.wire)
            if error is None:
                return data[None], None
            lost = parts - decoded(data, self.outer.wire, parts.shape[1])
            return data[None], _finite(lost).reshape(1, -1)

        error = self.state_specs.error
        run = self._map(local, (self.specs, self.rows, error), (self.rows, error))
        return jax.jit(lambda leaves, *others: run(_here(leaves), *others))

    @functools.cached_property
    def average(self) -> Callable[..., tuple[jax.Array, jax.Array | None]]:
        """(bytes of the islands' parts, uint8 [devices, islands, bytes]; their weights, float32
        [islands]; the error of the last mean) -> the bytes of the mean, uint8 [devices, bytes], and
        the next error.

        A part that is not finite has no weight: an island that diverges takes no other with it.
        """

        def local(data: jax.Array, weights: jax.Array, error: Any) -> tuple[jax.Array, Any]:
            size = self.fragment.size // self.num_islands
            parts = decoded(data[0], self.outer.wire, size)
            weights = jnp.where(jnp.isfinite(parts).all(1), weights, 0)
            shares = weights / jnp.maximum(weights.sum(), 1)
            mean = jnp.einsum("i,in->n", shares, _finite(parts), precision="highest")
            mean = mean if error is None else mean + error[0]
            sent = encoded(mean[None], self.outer.wire)
            if error is None:
                return sent, None
            return sent, mean[None] - decoded(sent, self.outer.wire, size)

        error = self.state_specs.mean_error
        return jax.jit(self._map(local, (self.rows, PartitionSpec(), error), (self.rows, error)))

    @functools.cached_property
    def merge(self) -> Callable[..., tuple[Leaves, jax.Array, Any]]:
        """(leaves, bytes of the means, uint8 [devices, islands, bytes]; copy, state of the outer
        optimizer) -> the leaves that the island goes on from, and the next copy and state."""

        def local(
            leaves: Leaves, data: jax.Array, copy: jax.Array, opt_state: Any
        ) -> tuple[Leaves, jax.Array, Any]:
            size = self.fragment.size // self.num_islands
            mean = decoded(data[0], self.outer.wire, size).reshape(1, -1)
            updates, opt_state = self.outer.optimizer.update(mean, opt_state, copy)
            copy = jnp.asarray(optax.apply_updates(copy, updates))
            own, share = self.fragment.take(leaves), self.outer.mixing or 0.0
            mixed = copy[0] + share * (own - copy[0]) if share else copy[0]
            return self.fragment.put(leaves, mixed), copy, opt_state

        opt_state = self.state_specs.opt_state
        ins = (self.specs, self.rows, self.rows, opt_state)
        run = self._map(local, ins, (self.specs, self.rows, opt_state))

        def merge(leaves: Leaves, *others: Any) -> tuple[Leaves, jax.Array, Any]:
            found, copy, opt_state = run(_here(leaves), *others)
            return {i: put(x, self.shardings[i]) for i, x in found.items()}, copy, opt_state

        return jax.jit(merge, donate_argnums=(0, 2, 3))

    @functools.cached_property
    def state_specs(self) -> FragmentState:
        """How the arrays of a state are split.

        Raises:
          ValueError: the outer optimizer does not work element by element.
        """
        shape = jax.ShapeDtypeStruct((1, self.fragment.size), jnp.float32)
        opt_state = jax.eval_shape(self.outer.optimizer.init, shape)
        others = [x.shape for x in jax.tree.leaves(opt_state) if x.shape not in ((), shape.shape)]
        if others:
            raise ValueError(
                f"Outer(optimizer=...) keeps arrays of the shapes {others} for a vector of "
                f"{self.fragment.size} elements; take one that works element by element, such as "
                "optax.sgd or optax.adam"
            )
        with_errors = self.outer.error_feedback and self.outer.wire is not None
        return FragmentState(
            copy=self.rows,  # type: ignore[arg-type]
            opt_state=jax.tree.map(lambda x: self.rows if x.shape else PartitionSpec(), opt_state),
            error=self.rows if with_errors else None,  # type: ignore[arg-type]
            mean_error=self.rows if with_errors else None,  # type: ignore[arg-type]
        )

    def _map(self, local: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
        return jax.shard_map(local, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False)


def _finite(x: jax.Array) -> jax.Array:
    """Return an array with zeros in the place of what is not finite."""
    return jnp.where(jnp.isfinite(x), x, 0)


def _here(leaves: Leaves) -> Leaves:
    """Return leaves in device memory."""
    return {i: to_device(x) for i, x in leaves.items()}


def encoded(x: jax.Array, format: WireFormat | None) -> jax.Array:
    """Return the bytes of float32 arrays [N, n], uint8 [N, bytes]."""
    if format is None:
        return lax.bitcast_convert_type(x, jnp.uint8).reshape(len(x), -1)
    return quantize(x, format, lead=1).buffer


def decoded(data: jax.Array, format: WireFormat | None, size: int) -> jax.Array:
    """Return the float32 arrays [N, size] of bytes uint8 [N, bytes]."""
    if format is None:
        return lax.bitcast_convert_type(data.reshape(len(data), size, 4), jnp.float32)
    return dequantize(Wire(data, size, format), (size,))
