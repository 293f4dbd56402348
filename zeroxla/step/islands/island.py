"""`Island`: trains by itself, and exchanges fragments of its parameters with other islands."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import struct
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.program.paths import leaf_path
from zeroxla.step.islands.agreement import check_agreement
from zeroxla.step.islands.fragments import cut_fragments
from zeroxla.step.islands.link import IslandLink
from zeroxla.step.islands.outer_programs import Leaves, OuterPrograms
from zeroxla.step.islands.outer_state import FragmentState, IslandState
from zeroxla.step.state import TrainState, state_shardings
from zeroxla.step.step import Step


class ExchangeError(RuntimeError):
    """An exchange that failed.

    Attributes:
      state: the island's state, without the exchange: save it, or go on from `state.inner`.
    """

    def __init__(self, text: str, state: IslandState) -> None:
        super().__init__(text)
        self.state = state


class Island:
    """Takes training steps, and exchanges with other islands what they have changed.

    All islands have the same model, the same options and meshes of the same shape, and begin from
    the same parameters. Call it like a step, with an `IslandState`; `init` makes it.

    Args:
      step: the training step; `outer` of its config says how islands exchange.
      link: joins this process to its likes in the other islands.

    Raises:
      ValueError: the config has no `outer`, or a part of the state lives on disk.
    """

    def __init__(self, step: Step, link: IslandLink) -> None:
        if step.config.outer is None:
            raise ValueError(
                "the step's config does not say how islands exchange; pass to make_step "
                "config=ZeroConfig.diloco(), ZeroConfig.streaming() or ZeroConfig(outer=Outer())"
            )
        if step.config.offload.params == "disk":
            raise ValueError(
                "an island exchanges parameters from memory; take Offload(params=None or "
                '"host") instead of "disk"'
            )
        self.step, self.link, self.outer = step, link, step.config.outer
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "zeroxla-island")
        self._pending: dict[int, tuple[int, concurrent.futures.Future[_Exchanged]]] = {}
        self._rows = 0  # trained on so far
        self._rows_at: dict[int, int] = {}  # by fragment, when it was last exchanged

    def init(self, key: jax.Array, batch: Any) -> IslandState:
        """Make the state, as `step.init` does; all islands pass the same key."""
        return self.begin(self.step.init(key, batch))

    def begin(self, state: TrainState) -> IslandState:
        """Return an island's state that begins from a training state, which is kept in it.

        Raises:
          ValueError: another island has another model, other options, another mesh or other
            parameters.
        """
        outer = tuple(programs.begin(_leaves_of(state, programs)) for programs in self.programs)
        check_agreement(self.link, self._facts(state, outer))
        return IslandState(inner=state, outer=outer, num_steps=int(state.step))

    def _facts(self, state: TrainState, outer: Sequence[FragmentState]) -> dict[str, str]:
        """Return what all islands must have in common."""
        params = hashlib.sha256()
        for fragment in outer:
            params.update(_local_rows(fragment.copy))
        paths = jax.tree_util.tree_leaves_with_path(state.params)
        names = [f.name for f in dataclasses.fields(self.outer) if f.name != "optimizer"]
        vector = jnp.zeros(8)
        update = jax.make_jaxpr(self.outer.optimizer.update)(
            vector, self.outer.optimizer.init(vector), vector
        )
        return {
            "model": ", ".join(f"{leaf_path(path)} {x.shape}" for path, x in paths),
            "mesh": str(dict(self.step.mesh.shape)),
            "outer options": str({name: getattr(self.outer, name) for name in names}),
            "outer optimizer": str(update),
            "number of steps": str(int(state.step)),
            "parameters": params.hexdigest(),
        }

    def __call__(self, state: IslandState, batch: Any) -> tuple[IslandState, dict[str, Any]]:
        """Take a step; start the exchange and merge the results that are due after it.

        Args:
          state: the state, which is donated.
          batch: this island's rows.

        Returns:
          The next state, and the step's metrics; with `outer_bytes`, what this process has sent in
          an exchange that was merged, and `outer_s`, the seconds that it took.

        Raises:
          ExchangeError: an island has left, is late, or sends what cannot be right. The error has
            the state after the step.
        """
        inner, metrics = self.step(state.inner, batch)
        state = dataclasses.replace(state, inner=inner, num_steps=state.num_steps + 1)
        self._rows += jax.tree.leaves(batch)[0].shape[0]
        if (fragment := self.outer.starts_at(state.num_steps)) is not None:
            state = self._start(state, fragment)
        due = [p for p, (at, _) in self._pending.items() if state.num_steps >= at]
        for fragment in due:
            state, moved = self._merge(state, fragment)
            metrics = {**metrics, **moved}
        return state, metrics

    def settle(self, state: IslandState) -> IslandState:
        """Wait for the exchanges under way, and merge them.

        Raises:
          ExchangeError: one failed.
        """
        for fragment in list(self._pending):
            state, _ = self._merge(state, fragment)
        return state

    def _start(self, state: IslandState, fragment: int) -> IslandState:
        """Start the exchange of a fragment."""
        programs, mine = self.programs[fragment], state.outer[fragment]
        data, error = programs.pack(_leaves_of(state.inner, programs), mine.copy, mine.error)
        name = f"{state.num_steps}/{fragment}"
        num_rows = self._rows - self._rows_at.get(fragment, 0)
        self._rows_at[fragment] = self._rows
        future = self._pool.submit(self._exchange, programs, name, data, mine.mean_error, num_rows)
        self._pending[fragment] = state.num_steps + self.outer.delay, future
        return _with_fragment(state, fragment, error=error)

    def _merge(self, state: IslandState, fragment: int) -> tuple[IslandState, dict[str, Any]]:
        """Merge the result of an exchange, when it is there."""
        try:
            found = self._pending.pop(fragment)[1].result()
        except (OSError, ValueError) as error:
            raise ExchangeError(
                f"the exchange of fragment {fragment} before step {state.num_steps + 1} failed: "
                f"{error}; the error has the state",
                state,
            ) from error
        programs, mine = self.programs[fragment], state.outer[fragment]
        leaves, tree = jax.tree.flatten(state.inner.params)
        own = _leaves_of(state.inner, programs)
        changed, copy, opt_state = programs.merge(own, found.means, mine.copy, mine.opt_state)
        leaves = [changed.get(i, x) for i, x in enumerate(leaves)]
        inner = dataclasses.replace(state.inner, params=tree.unflatten(leaves))
        state = dataclasses.replace(state, inner=inner)
        state = _with_fragment(
            state, fragment, copy=copy, opt_state=opt_state, mean_error=found.mean_error
        )
        return state, {"outer_bytes": found.num_bytes, "outer_s": found.seconds}

    def _exchange(
        self, programs: OuterPrograms, name: str, data: jax.Array, error: Any, num_rows: int
    ) -> _Exchanged:
        """Exchange a fragment: parts of differences first, then their means. Runs in a thread."""
        begin, num, index = time.perf_counter(), self.link.num, self.link.index
        mine, weight = _local_rows(data), struct.pack("<d", num_rows)
        parts = [weight + np.ascontiguousarray(mine[:, to]).tobytes() for to in range(num)]
        arrived = self.link.swap(f"{name}/parts", parts)
        weights = [struct.unpack("<d", part[:8])[0] for part in arrived]
        rows = (len(mine), -1)
        of_all = [np.frombuffer(part[8:], np.uint8).reshape(rows) for part in arrived]
        received = _as_rows(np.stack(of_all, axis=1), data)
        mean, error = programs.average(received, np.asarray(weights, np.float32), error)
        own = _local_rows(mean).tobytes()
        means = self.link.swap(f"{name}/means", [own] * num)
        of_all = [np.frombuffer(part, np.uint8).reshape(rows) for part in means]
        sent = sum(map(len, parts)) - len(parts[index]) + (num - 1) * len(own)
        return _Exchanged(
            means=_as_rows(np.stack(of_all, axis=1), data),
            mean_error=error,
            num_bytes=sent,
            seconds=time.perf_counter() - begin,
        )

    @functools.cached_property
    def programs(self) -> tuple[OuterPrograms, ...]:
        """The programs of each fragment; the step must have seen a batch.

        Raises:
          ValueError: it has seen none, or there are more fragments than elements.
        """
        shapes, mesh = self.step.shapes(), self.step.mesh
        shardings = jax.tree.leaves(state_shardings(shapes, mesh).params)
        layout = self.step.programs.layout_of(shapes.params, shapes.placements[0])
        leaves = zip(layout.leaves, shardings, jax.tree.leaves(shapes.params), strict=True)
        own = [None if leaf.frozen else s.shard_shape(x.shape) for leaf, s, x in leaves]
        block = 1 if self.outer.wire is None else self.outer.wire.block
        multiple = self.link.num * block
        return tuple(
            OuterPrograms(
                outer=self.outer,
                mesh=mesh,
                shardings={i: shardings[i] for i in fragment.leaves},
                fragment=fragment,
                num_islands=self.link.num,
            )
            for fragment in cut_fragments(own, self.outer.fragments, multiple)
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Exchanged:
    """The result of an exchange.

    Attributes:
      means: the bytes of the islands' means, uint8 [devices, islands, bytes].
      mean_error: the next error of this island's mean.
      num_bytes: what this process has sent to others.
      seconds: how long it took.
    """

    means: jax.Array
    mean_error: jax.Array | None
    num_bytes: int
    seconds: float


def _leaves_of(state: TrainState, programs: OuterPrograms) -> Leaves:
    """Return the leaves of a fragment."""
    leaves = jax.tree.leaves(state.params)
    return {i: leaves[i] for i in programs.fragment.leaves}


def _with_fragment(state: IslandState, fragment: int, **changed: Any) -> IslandState:
    """Return a state with another state of one fragment."""
    outer: list[FragmentState] = list(state.outer)
    outer[fragment] = dataclasses.replace(outer[fragment], **changed)
    return dataclasses.replace(state, outer=tuple(outer))


def _local_rows(x: jax.Array) -> np.ndarray:
    """Return the rows of an array [devices, ...] that are on this process' devices."""
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def _as_rows(rows: np.ndarray, like: jax.Array) -> jax.Array:
    """Put rows on this process' devices, split like another array [devices, ...]."""
    shape = (like.shape[0], *rows.shape[1:])
    return jax.make_array_from_process_local_data(like.sharding, rows, shape)
