"""`Desk`: where a compiled program hands in its tickets and gets the shards that they stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from zeroxla.mesh.placement import Placement
from zeroxla.mesh.processes.together import together
from zeroxla.offload.disk.disk_array import DiskArray, DiskShape
from zeroxla.offload.disk.read_ahead import Order, ReadAhead
from zeroxla.offload.disk.shards import Part, Shard
from zeroxla.offload.disk.tickets import leaf_dtype, make_tickets, ticket_shapes

_T = TypeVar("_T")


class Desk:
    """Reads parameters on disk for the programs of one step, one program at a time."""

    def __init__(self) -> None:
        self._orders: dict[str, Order] = {}
        self._window: _Window | None = None
        self._parts: tuple[Any, dict[int, list[Part]]] = (None, {})

    def redeem(self, ticket: jax.Array, shape: Sequence[int], shard: jax.Array) -> jax.Array:
        """Return, inside a compiled program, this device's shard of a leaf, or of some layers.

        Args:
          ticket: of the layers.
          shape: of the shard; along layer dims that of the ticket.
          shard: which of the leaf's shards it is: int32.

        Cost: waits until it is read; nothing if the device asked for it at this place in the run
        before and the disk keeps up.
        """
        give = functools.partial(self._give, shape=tuple(shape), dtype=leaf_dtype(ticket))
        result = jax.ShapeDtypeStruct(shape, leaf_dtype(ticket))
        # Pure: within a run the file does not change. So XLA may drop it, or run it twice.
        return jax.pure_callback(give, result, ticket, shard)

    def call(
        self,
        name: str,
        leaves: Sequence[Any],
        placements: Sequence[Placement],
        fun: Callable[[list[Any]], _T],
    ) -> _T:
        """Call a function that runs a program, with tickets for the leaves that are on disk.

        Args:
          name: of the program.
          leaves: of the parameters.
          placements: of these.
          fun: of the leaves, on disk none of them.

        Returns:
          What it returns, computed; if nothing is on disk it may still be under way.

        Raises:
          DamagedStateError: the file holds something else than what was written.
          OSError: the disk fails.
          ValueError: the leaves are of a state that is no more, or another process fails.
        """
        on_disk = [x for x in leaves if isinstance(x, DiskArray)]
        if not on_disk:
            return fun(list(leaves))
        on_disk[0].check()
        ahead = ReadAhead(on_disk[0].file, on_disk[0].version, self._orders.get(name, {}))
        assert self._window is None, "a program with tickets is running"
        known = [(x.name, x.shape, x.sharding) for x in on_disk]
        if self._parts[0] != known:
            self._parts = known, _parts_of(on_disk)
        self._window = window = _Window(self._parts[1], ahead)
        try:
            found = jax.block_until_ready(fun(with_tickets(leaves, placements)))
        finally:
            self._window = None
            ahead.close()
        self._orders[name] = ahead.asked
        together("state on disk", window.check)
        return found

    def _give(
        self, ticket: Any, shard: Any, *, shape: tuple[int, ...], dtype: np.dtype
    ) -> np.ndarray:
        window = self._window
        assert window is not None
        return window.give(np.asarray(ticket), int(shard), shape, dtype)


class _Window:
    """What a desk needs while a program runs.

    Attributes:
      failure: the first.
    """

    def __init__(self, parts: dict[int, list[Part]], ahead: ReadAhead) -> None:
        self._parts, self._ahead = parts, ahead
        self.failure: Exception | None = None

    def check(self) -> None:
        """Raise the failure, if there was one.

        Where a callback raises, only its device's program ends, and the others wait for it.
        """
        if self.failure is not None:
            raise self.failure

    def give(
        self, ticket: np.ndarray, shard: int, shape: tuple[int, ...], dtype: np.dtype
    ) -> np.ndarray:
        """Return a shard, or zeros after a failure."""
        parts = [self._parts[shard][number] for number in ticket.ravel()]
        try:
            data = self._ahead.take(shard, [part.name for part in parts])
        except Exception as error:
            self.failure = self.failure or error
            return np.zeros(shape, dtype)
        if len(data) == 1:
            return data[0].view(dtype).reshape(shape)
        whole = np.empty(shape, dtype)
        for layer, x in zip(np.ndindex(ticket.shape), data, strict=True):
            index = tuple(
                slice(i, i + 1) if n > 1 else slice(None)
                for i, n in zip(layer, ticket.shape, strict=True)
            )
            part = whole[index]
            part[...] = x.view(dtype).reshape(part.shape)
        return whole


def with_tickets(leaves: Sequence[Any], placements: Sequence[Placement]) -> list[Any]:
    """Return the leaves of parameters, or their shapes, with tickets for those on disk."""
    rows = enumerate(zip(leaves, placements, strict=True))
    on_disk = {i: row for i, row in rows if isinstance(row[0], (DiskArray, DiskShape))}
    shapes = ticket_shapes(list(on_disk.values()))
    are_arrays = any(isinstance(x, DiskArray) for x, _ in on_disk.values())
    tickets = dict(zip(on_disk, make_tickets(shapes) if are_arrays else shapes, strict=True))
    return [tickets.get(i, x) for i, x in enumerate(leaves)]


def _parts_of(on_disk: Sequence[DiskArray]) -> dict[int, list[Part]]:
    """Return what tickets stand for, by the number of the shard and then their own."""
    found: dict[int, list[Part]] = {}
    for array in on_disk:
        for shard in array.shards():
            found.setdefault(_number(shard, array.shape), []).extend(shard.parts)
    return found


def _number(shard: Shard, shape: tuple[int, ...]) -> int:
    """Return the number of a shard among those of its array."""
    for index, length, whole in zip(shard.index, shard.shape, shape, strict=True):
        if length < whole:
            return index.indices(whole)[0] // length
    return 0
