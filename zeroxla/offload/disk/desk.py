"""`Desk`: takes tickets from compiled programs, and gives the shards on disk they stand for."""

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
    """Reads parameters on disk for the programs of one step, one program at a time.

    Attributes:
      orders: the order in which each program's last run asked for its parts, by the program's name.
    """

    def __init__(self) -> None:
        self.orders: dict[str, Order] = {}
        self._run: _ProgramRun | None = None
        self._parts: tuple[Any, dict[int, list[Part]]] = (None, {})

    def redeem(self, ticket: jax.Array, shape: Sequence[int], shard: jax.Array) -> jax.Array:
        """Return, inside a compiled program, this device's shard of a leaf or of some of its
        layers.

        Args:
          ticket: the ticket of the leaf, or the slice of it that stands for these layers.
          shape: the shard's shape, which along layer dims is the ticket's.
          shard: the number of the shard among the leaf's, int32.

        Cost: waits until the shard is read. There is no wait if the device asked for it at the same
        place of the last run and the disk keeps up.
        """
        give = functools.partial(self._give, shape=tuple(shape), dtype=leaf_dtype(ticket))
        result = jax.ShapeDtypeStruct(shape, leaf_dtype(ticket))
        # Within a run the file does not change, so the callback is pure: XLA may drop or repeat it.
        return jax.pure_callback(give, result, ticket, shard)

    def call(
        self,
        name: str,
        leaves: Sequence[Any],
        placements: Sequence[Placement],
        fun: Callable[[list[Any]], _T],
    ) -> _T:
        """Call a function that runs a program, with tickets in place of the leaves on disk.

        Args:
          name: the program's name.
          leaves: the leaves of the parameters.
          placements: the placements of the leaves.
          fun: the function. It takes the leaves, with tickets for those on disk.

        Returns:
          The function's results, computed. If no leaf is on disk they may still be under way.

        Raises:
          DamagedStateError: the file does not hold what was written.
          OSError: the disk fails.
          ValueError: a later step has written over the leaves' state, or another process fails.
        """
        on_disk = [x for x in leaves if isinstance(x, DiskArray)]
        if not on_disk:
            return fun(list(leaves))
        on_disk[0].check()
        ahead = ReadAhead(on_disk[0].file, on_disk[0].version, self.orders.get(name, {}))
        assert self._run is None, "a program with tickets is running"
        known = [(x.name, x.shape, x.sharding) for x in on_disk]
        if self._parts[0] != known:
            self._parts = known, _parts_of(on_disk)
        self._run = run = _ProgramRun(self._parts[1], ahead)
        try:
            found = jax.block_until_ready(fun(with_tickets(leaves, placements)))
        finally:
            self._run = None
            ahead.close()
        self.orders[name] = ahead.asked
        together("state on disk", run.check)
        return found

    def _give(
        self, ticket: Any, shard: Any, *, shape: tuple[int, ...], dtype: np.dtype
    ) -> np.ndarray:
        run = self._run
        assert run is not None
        return run.give(np.asarray(ticket), int(shard), shape, dtype)


class _ProgramRun:
    """The parts and reads of a program that runs.

    Args:
      parts: by the number of the shard, the parts that tickets stand for.
      ahead: reads the parts.

    Attributes:
      failure: the first failure; None if there was none.
    """

    def __init__(self, parts: dict[int, list[Part]], ahead: ReadAhead) -> None:
        self._parts, self._ahead = parts, ahead
        self.failure: Exception | None = None

    def check(self) -> None:
        """Raise the failure, if there was one.

        A callback must not raise: only its device's program would end, and the others would wait.
        """
        if self.failure is not None:
            raise self.failure

    def give(
        self, ticket: np.ndarray, shard: int, shape: tuple[int, ...], dtype: np.dtype
    ) -> np.ndarray:
        """Return the shard, or some layers of it; return zeros after a failure."""
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
    """Return leaves of parameters, or their shapes, with tickets in place of those on disk."""
    rows = enumerate(zip(leaves, placements, strict=True))
    on_disk = {i: row for i, row in rows if isinstance(row[0], (DiskArray, DiskShape))}
    shapes = ticket_shapes(list(on_disk.values()))
    are_arrays = any(isinstance(x, DiskArray) for x, _ in on_disk.values())
    tickets = dict(zip(on_disk, make_tickets(shapes) if are_arrays else shapes, strict=True))
    return [tickets.get(i, x) for i, x in enumerate(leaves)]


def _parts_of(on_disk: Sequence[DiskArray]) -> dict[int, list[Part]]:
    """Return the parts that tickets stand for, by the number of the shard. The ticket's element is
    the position in the list."""
    found: dict[int, list[Part]] = {}
    for array in on_disk:
        for shard in array.shards():
            found.setdefault(_number(shard, array.shape), []).extend(shard.parts)
    return found


def _number(shard: Shard, shape: tuple[int, ...]) -> int:
    """Return the number of a shard among its array's shards."""
    for index, length, whole in zip(shard.index, shard.shape, shape, strict=True):
        if length < whole:
            return index.indices(whole)[0] // length
    return 0
