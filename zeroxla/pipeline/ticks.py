"""Runs a schedule: a loop over ticks, in each of which a stage does its part and both neighbours
hear of it.

What arrives is kept in rings of slots that the schedule's tables name, so memory is that of the
schedule and not of the number of micro-batches. An idle stage only passes on zeros.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zeroxla.fetch.order import tie
from zeroxla.mesh.axes import PIPE
from zeroxla.pipeline.schedule import NONE, Schedule
from zeroxla.pipeline.schedule_check import check
from zeroxla.pipeline.stage_buffers import Packing
from zeroxla.pipeline.stash import Stash, make_stash

TICKS = "ticks"
"""The scope of the loop."""

Buffers = list[jax.Array]
Forward = Callable[[Buffers, jax.Array, Any], tuple[Buffers, Any]]
Backward = Callable[[Buffers, Buffers, jax.Array, Any], tuple[Buffers, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ticks:
    """A schedule as a loop.

    Attributes:
      schedule: what is done when.
      stash: where what arrives is kept.
      activations, gradients: the buffers that travel down and up.
      firmly: whether ties must be of data; see `tie`.
    """

    schedule: Schedule
    stash: Stash
    activations: Packing
    gradients: Packing
    firmly: bool

    @staticmethod
    def make(
        schedule: Schedule, activations: Packing, gradients: Packing, *, firmly: bool
    ) -> Ticks:
        """Prove a schedule, and give what arrives its slots.

        Raises:
          ValueError: it cannot run.
        """
        check(schedule)
        return Ticks(
            schedule=schedule,
            stash=make_stash(schedule),
            activations=activations,
            gradients=gradients,
            firmly=firmly,
        )

    def run(
        self,
        forward: Forward,
        backward: Backward | None,
        carry: Any,
        weight: Callable[[Buffers, Buffers, jax.Array, Any], Any] | None = None,
    ) -> Any:
        """Run all ticks.

        Args:
          forward: (x, micro-batch, carry) -> (y, carry): the buffers for the next stage.
          backward: (x, gradient of y, micro-batch, carry) -> (gradient of x, carry).
          carry: what a stage adds to.
          weight: (x, gradient of y, micro-batch, carry) -> carry, of a schedule that has it.

        Returns:
          The carry after the last tick.
        """
        stage = lax.axis_index(PIPE)
        rows = {name: jnp.asarray(table)[:, stage] for name, table in self._tables().items()}
        stash = self.stash
        start = (
            _ring(self.activations, stash.num_input_slots),
            _ring(self.gradients, stash.num_gradient_slots if backward else 0),
            self.activations.zeros(),
            self.gradients.zeros(),
            carry,
        )

        def tick(state: Any, row: dict[str, jax.Array]) -> tuple[Any, None]:
            inputs, given, x, dx, carry = state
            inputs = _write(inputs, row["input_arrival"], x)
            # The gradient of the tick before goes up beside this forward, y beside a backward.
            g = self._up(dx) if backward else []
            y, carry = lax.cond(
                self._has(row["forward"], after=g),
                lambda carry: forward(_read(inputs, row["forward_input"]), row["forward"], carry),
                lambda carry: (self.activations.zeros(), carry),
                carry,
            )
            x = self._down(y)
            if backward is None:
                return (inputs, given, x, dx, carry), None
            g, y = tie(g, y, firmly=False)
            given = _write(given, row["gradient_arrival"], g)
            back = backward
            dx, carry = lax.cond(
                self._has(row["backward"], after=x),
                lambda carry: back(
                    _read(inputs, row["backward_input"]),
                    _read(given, row["backward_gradient"]),
                    row["backward"],
                    carry,
                ),
                lambda carry: (self.gradients.zeros(), carry),
                carry,
            )
            if weight is not None:
                of_leaves = weight
                carry = lax.cond(
                    self._has(row["weight"], after=dx),
                    lambda carry: of_leaves(
                        _read(inputs, row["weight_input"]),
                        _read(given, row["weight_gradient"]),
                        row["weight"],
                        carry,
                    ),
                    lambda carry: carry,
                    carry,
                )
                if self.firmly:
                    dx, _ = tie(dx, jax.tree.leaves(carry), firmly=True)
            # XLA would move a permute that ends a turn to the next one, where x is read at once.
            x, dx = tie(x, dx, firmly=False)
            return (inputs, given, x, dx, carry), None

        with jax.named_scope(TICKS):
            return lax.scan(tick, start, rows)[0][-1]

    def _has(self, microbatch: jax.Array, *, after: Buffers) -> jax.Array:
        """Return whether there is one. Where only data keeps collectives in order, that is known
        once `after` are there: every device does first what they come from."""
        if self.firmly:
            (microbatch,), _ = tie([microbatch], after, firmly=True)
        return microbatch != NONE

    def _down(self, buffers: Buffers) -> Buffers:
        return _send(buffers, [(s, s + 1) for s in range(self.schedule.stages - 1)])

    def _up(self, buffers: Buffers) -> Buffers:
        return _send(buffers, [(s + 1, s) for s in range(self.schedule.stages - 1)])

    def _tables(self) -> dict[str, np.ndarray]:
        schedule, stash = self.schedule, self.stash
        return {
            "forward": schedule.forward,
            "backward": schedule.backward,
            "input_arrival": stash.input_arrivals,
            "gradient_arrival": stash.gradient_arrivals,
            "forward_input": _slots(schedule.forward, stash.input_slots),
            "backward_input": _slots(schedule.backward, stash.input_slots),
            "backward_gradient": _slots(schedule.backward, stash.gradient_slots),
            "weight": schedule.weight,
            "weight_input": _slots(schedule.weight, stash.input_slots),
            "weight_gradient": _slots(schedule.weight, stash.gradient_slots),
        }


def _send(buffers: Buffers, pairs: list[tuple[int, int]]) -> Buffers:
    with jax.named_scope("send"):
        return [lax.ppermute(x, PIPE, pairs) for x in buffers]


def _slots(table: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Return the slot of what each stage works on in each tick; 0 where it needs none."""
    found = slots[np.arange(table.shape[1])[None, :], np.maximum(table, 0)]
    return np.where(table == NONE, 0, np.maximum(found, 0)).astype(np.int32)


def _ring(packing: Packing, num_slots: int) -> Buffers:
    """Return empty slots, and one more for what nobody reads."""
    return [jnp.zeros((num_slots + 1, size), dtype) for size, dtype in packing.buffers]


def _write(ring: Buffers, slot: jax.Array, buffers: Buffers) -> Buffers:
    """Write buffers to a slot; to the last one if it is none."""
    return [
        lax.dynamic_update_index_in_dim(r, x, jnp.where(slot == NONE, r.shape[0] - 1, slot), 0)
        for r, x in zip(ring, buffers, strict=True)
    ]


def _read(ring: Buffers, slot: jax.Array) -> Buffers:
    return [lax.dynamic_index_in_dim(r, slot, keepdims=False) for r in ring]
