"""The rows of two_hosts_islands.py: islands, and steps of the same model that send nothing."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
import two_hosts_rows
from jax.sharding import Mesh
from peers import task
from two_hosts_rows import ALL_SHARDED, ALONE, OPTIMIZER

import zeroxla
from zeroxla import ZeroConfig

TOKEN = "between two hosts"
PORTS = {"diloco": 29600, "streaming": 29601}
"""The ports of the coordinators on the first host. Each row with islands is a run of its own."""
DEADLINE_S = 900.0
"""So long a round waits for an island: nobody is left out, at 1 Mbit/s neither."""

INSIDE = "zero3 inside each host"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A way of training.

    Attributes:
      name: in orders and tables.
      description: in a line.
      config: makes the options from the number of steps between two exchanges; None if the row is
        not zeroxla's.
      bytes: an element of the parameters sends so many in an exchange, without blocks' steps.
    """

    name: str
    description: str
    config: Callable[[int], ZeroConfig] | None = None
    bytes: float = 0.0

    @property
    def exchanges(self) -> bool:
        """Whether the hosts are islands."""
        return self.name in PORTS

    def ideal_bytes(self, every: int) -> float:
        """Return the bytes that a host sends in a step, without framing."""
        return self.bytes * task.num_parameters() / every

    def exchanges_in(self, steps: int) -> int:
        """Return how many exchanges end in a turn of so many steps, which is also `every`."""
        outer = self.config(steps).outer if self.config else None
        return outer.fragments if outer else 0

    def warm_steps(self, every: int) -> int:
        """Return the steps after which everything has run once, and no exchange is under way."""
        outer = self.config(every).outer if self.config else None
        return every + outer.delay if outer else 2


# Each element crosses the link twice: to the host that averages it, and its mean back. A host
# averages half of them, so it sends half of the differences and half of the means.
_CROSSINGS = 2 * (1 - 1 / task.HOSTS)

ROWS = {
    row.name: row
    for row in (
        Row(
            name=ALONE,
            description="each device trains its own copy, without communication",
        ),
        Row(
            name=INSIDE,
            description="ZeroConfig.zero3() on each host by itself: the islands' step, which sends "
            "nothing",
            config=lambda every: ZeroConfig.zero3(**ALL_SHARDED),
        ),
        Row(
            name="diloco",
            description="ZeroConfig.diloco(): float32, one fragment, waits for its exchange",
            config=lambda every: ZeroConfig.diloco(every=every, **ALL_SHARDED),
            bytes=_CROSSINGS * 4,
        ),
        Row(
            name="streaming",
            description="ZeroConfig.streaming(): 4 bits, ten fragments, trains on during exchanges",
            config=lambda every: ZeroConfig.streaming(every=every, **ALL_SHARDED),
            bytes=_CROSSINGS / 2,
        ),
    )
}
"""By name, in the order of tables."""


class Training(Protocol):
    """A row in training. Call it with a batch to take a step; the loss is returned."""

    def __call__(self, batch: Any) -> float: ...

    def report(self) -> dict[str, Any]:
        """Return what has happened since the last report, beside the steps."""
        ...


def start(name: str, mesh: Mesh, batch: Any, *, host: str, slot: int, every: int) -> Training:
    """Start training.

    Args:
      name: the row.
      mesh: the devices of this host.
      batch: the first batch.
      host: the name of the host with the coordinators.
      slot: the number of this host.
      every: steps between two exchanges.
    """
    row = ROWS[name]
    if row.config is None:
        return _Alone(two_hosts_rows.make_step(name, mesh, batch))
    config = row.config(every)
    step = zeroxla.make_step(two_hosts_rows.MODEL, mesh, OPTIMIZER, config=config)
    if row.exchanges:
        return _Island(step, f"{host}:{PORTS[name]}", slot, batch)
    state = step.init(jax.random.key(0), batch)
    return _Alone(two_hosts_rows.Ours(step, state))


class _Alone:
    def __init__(self, step: two_hosts_rows.StepFunction) -> None:
        self._step = step

    def __call__(self, batch: Any) -> float:
        return self._step(batch)

    def report(self) -> dict[str, Any]:
        return {}


class _Island:
    def __init__(self, step: zeroxla.Step, address: str, slot: int, batch: Any) -> None:
        self._island = zeroxla.Island(step, address, TOKEN, slot=slot)
        self._state = self._island.init(jax.random.key(0), batch)
        self._exchanges: list[dict[str, Any]] = []

    def __call__(self, batch: Any) -> float:
        self._state, metrics = self._island(self._state, batch)
        jax.block_until_ready(self._state.inner)
        if "outer_s" in metrics:
            names = {"outer_s": "seconds", "outer_bytes": "bytes", "outer_islands": "islands"}
            self._exchanges.append({new: metrics[old] for old, new in names.items()})
        return float(metrics["loss"])

    def report(self) -> dict[str, Any]:
        """Return the exchanges that were merged, and a checksum of the outer parameters."""
        digest = hashlib.sha256()
        for fragment in self._state.outer:
            digest.update(np.asarray(fragment.copy).tobytes())
        exchanges, self._exchanges = self._exchanges, []
        return {"exchanges": exchanges, "checksum": digest.hexdigest()}
