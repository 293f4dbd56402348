"""The programs of a fragment: they make differences, merge what was exchanged, and begin anew.

No program communicates: each device works on its own rows. So a program may run beside a training
step, from another thread. `exchange_programs` has those that depend on the number of islands.
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

from zeroxla.config.offload import PINNED
from zeroxla.config.outer import Outer
from zeroxla.offload.memory_kinds import put, to_device
from zeroxla.step.islands.exchange_programs import ExchangePrograms
from zeroxla.step.islands.fragments import ShardFragment
from zeroxla.step.islands.outer_state import FragmentState

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
    """

    outer: Outer
    mesh: Mesh
    shardings: Mapping[int, NamedSharding]
    fragment: ShardFragment
    _made: dict[tuple[int, int], ExchangePrograms] = dataclasses.field(default_factory=dict)
    """Programs of exchanges by size and number of islands, which fragments share."""

    def leaves_of(self, params: Any) -> Leaves:
        """Return the leaves of the fragment."""
        leaves = jax.tree.leaves(params)
        return {i: leaves[i] for i in self.fragment.leaves}

    def among(self, num: int) -> ExchangePrograms:
        """Return the programs of an exchange between so many islands."""
        size = self.fragment.size
        if (size, num) not in self._made:
            self._made[size, num] = ExchangePrograms(
                outer=self.outer, mesh=self.mesh, size=size, num=num
            )
        return self._made[size, num]

    @property
    def rows(self) -> PartitionSpec:
        """How arrays [devices, ...] are split: a row for each device."""
        return PartitionSpec(self.mesh.axis_names)

    @property
    def specs(self) -> dict[int, PartitionSpec]:
        """How each leaf of the fragment is split."""
        return {i: sharding.spec for i, sharding in self.shardings.items()}

    def begun(self, shards: Leaves) -> FragmentState:
        """Return a device's part of the state before the first exchange, of its shards."""
        copy = self.fragment.take({i: shards[i] for i in self.fragment.leaves})[None]
        return FragmentState(
            copy=copy,
            opt_state=self.outer.optimizer.init(copy),
            error=jnp.zeros_like(copy) if self._has_errors else None,
            mean_error=jnp.zeros_like(copy) if self._has_errors else None,
        )

    @functools.cached_property
    def difference(self) -> Callable[[Leaves, jax.Array], jax.Array]:
        """(leaves, copy) -> what the island has changed, float32 [devices, size]."""

        def local(leaves: Leaves, copy: jax.Array) -> jax.Array:
            return copy - self.fragment.take(leaves)[None]

        run = self._map(local, (self.specs, self.rows), self.rows)
        return jax.jit(lambda leaves, copy: run(_here(leaves), to_device(copy)))

    @functools.cached_property
    def merge(self) -> Callable[..., tuple[Leaves, jax.Array, Any, jax.Array]]:
        """(leaves, the mean, float32 [devices, size]; copy, state of the outer optimizer) -> the
        leaves that the island goes on from, the next copy and state, and the sum of the copy's
        bits, uint32 [devices]."""

        def local(
            leaves: Leaves, mean: jax.Array, copy: jax.Array, opt_state: Any
        ) -> tuple[Leaves, jax.Array, Any, jax.Array]:
            updates, opt_state = self.outer.optimizer.update(mean, opt_state, copy)
            copy = jnp.asarray(optax.apply_updates(copy, updates))
            own, share = self.fragment.take(leaves), self.outer.mixing or 0.0
            mixed = copy[0] + share * (own - copy[0]) if share else copy[0]
            return self.fragment.put(leaves, mixed), copy, opt_state, _sum_of_bits(copy)

        opt_state = self.state_specs.opt_state
        ins = (self.specs, self.rows, self.rows, opt_state)
        run = self._map(local, ins, (self.specs, self.rows, opt_state, self.rows))

        def merge(
            leaves: Leaves, mean: jax.Array, copy: jax.Array, opt_state: Any
        ) -> tuple[Leaves, jax.Array, Any, jax.Array]:
            there = jax.tree.map(to_device, (copy, opt_state))
            found, copy, opt_state, bits = run(_here(leaves), mean, *there)
            return self._put(found), self._keep(copy), jax.tree.map(self._keep, opt_state), bits

        donated = (0,) if self._on_host else (0, 2, 3)
        return jax.jit(merge, donate_argnums=donated)

    @functools.cached_property
    def adopt(self) -> Callable[[Leaves, jax.Array, jax.Array], tuple[Leaves, jax.Array]]:
        """(leaves, another copy, copy) -> the leaves with the same difference from the other copy,
        and the sum of its bits, uint32 [devices]."""

        def local(leaves: Leaves, other: jax.Array, copy: jax.Array) -> tuple[Leaves, jax.Array]:
            own = self.fragment.take(leaves)
            return self.fragment.put(leaves, other[0] + (own - copy[0])), _sum_of_bits(other)

        run = self._map(local, (self.specs, self.rows, self.rows), (self.specs, self.rows))

        def adopt(leaves: Leaves, *copies: jax.Array) -> tuple[Leaves, jax.Array]:
            found, bits = run(_here(leaves), *map(to_device, copies))
            return self._put(found), bits

        return jax.jit(adopt, donate_argnums=(0,))

    @functools.cached_property
    def replaced(self) -> Callable[[Leaves, jax.Array], Leaves]:
        """(leaves, copy) -> the leaves with the copy in them."""

        def local(leaves: Leaves, copy: jax.Array) -> Leaves:
            return self.fragment.put(leaves, copy[0])

        run = self._map(local, (self.specs, self.rows), self.specs)
        return jax.jit(lambda leaves, copy: self._put(run(_here(leaves), to_device(copy))))

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
        errors: Any = self.rows if self._has_errors else None
        return FragmentState(
            copy=self.rows,  # type: ignore[arg-type]
            opt_state=jax.tree.map(lambda x: self.rows if x.shape else PartitionSpec(), opt_state),
            error=errors,
            mean_error=errors,
        )

    @functools.cached_property
    def state_shardings(self) -> FragmentState:
        """Where the arrays of a state are."""
        kind = PINNED if self._on_host else None

        def sharding(spec: PartitionSpec) -> NamedSharding:
            return NamedSharding(self.mesh, spec, memory_kind=kind if spec else None)

        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        return jax.tree.map(sharding, self.state_specs, is_leaf=is_spec)

    def stored(self, state: FragmentState) -> FragmentState:
        """Return a state in the memory that it is kept in, inside a compiled program."""
        return jax.tree.map(self._keep, state)

    @functools.cached_property
    def restored(self) -> Callable[[jax.Array, Any], FragmentState]:
        """(copy, state of the outer optimizer) -> the state of a fragment that has lost nothing by
        quantizing yet."""

        def restored(copy: jax.Array, opt_state: Any) -> FragmentState:
            return self.stored(
                FragmentState(
                    copy=copy,
                    opt_state=opt_state,
                    error=jnp.zeros_like(copy) if self._has_errors else None,
                    mean_error=jnp.zeros_like(copy) if self._has_errors else None,
                )
            )

        return jax.jit(restored)

    def compiled(self, local: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
        """Compile what each device does with its shards; arrays come from any memory."""
        run = self._map(local, ins, outs)
        return jax.jit(lambda *arrays: run(*jax.tree.map(to_device, arrays)))

    @property
    def _has_errors(self) -> bool:
        return self.outer.error_feedback and self.outer.wire is not None

    @property
    def _on_host(self) -> bool:
        return self.outer.state == "host"

    def _keep(self, x: jax.Array) -> jax.Array:
        """Return an array [devices, ...] in the memory that it is kept in."""
        return put(x, self.state_shardings.copy) if x.ndim else x  # type: ignore[arg-type]

    def _put(self, leaves: Leaves) -> Leaves:
        """Return leaves where they are stored."""
        return {i: put(x, self.shardings[i]) for i, x in leaves.items()}

    def _map(self, local: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
        return jax.shard_map(local, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False)


def _here(leaves: Leaves) -> Leaves:
    """Return leaves in device memory."""
    return {i: to_device(x) for i, x in leaves.items()}


def _sum_of_bits(x: jax.Array) -> jax.Array:
    """Return a sum over the bits of float32 [1, size] that another order or value changes, uint32
    [1]."""
    bits = lax.bitcast_convert_type(x[0], jnp.uint32)
    return jnp.sum(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)[None]
