"""Runs a schedule: a loop over ticks, in each of which a stage works and sends to its neighbours.

Arrivals are kept in rings of slots, which the schedule's tables name. So memory depends on the
schedule, not on the number of micro-batches. An idle stage computes nothing and sends zeros.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zeroxla.fetch.ties import tie
from zeroxla.mesh.axes import PIPE
from zeroxla.pipeline.schedule import NONE, Schedule
from zeroxla.pipeline.schedule_check import check
from zeroxla.pipeline.stage_buffers import Packing
from zeroxla.pipeline.stash import Stash, make_stash

TICKS = "ticks"
"""The named scope of the loop."""

Buffers = list[jax.Array]
Forward = Callable[[Buffers, jax.Array, Any], tuple[Buffers, Any]]
Backward = Callable[[Buffers, Buffers, jax.Array, Any], tuple[Buffers, Any]]
Weight = Callable[[Buffers, Buffers, jax.Array, Any], Any]
Row = dict[str, jax.Array]
"""This stage's entries of all tables for one tick, int32 scalars."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TickWork:
    """The functions that a stage calls on a micro-batch, each given by its number.

    Attributes:
      forward: (x, micro-batch, carry) -> (y, carry). `x` came from the stage before, `y` is for the
        stage after; both are packed.
      backward: (x, gradient of y, micro-batch, carry) -> (gradient of x, carry); None in
        evaluation.
      weight: (x, gradient of y, micro-batch, carry) -> carry, for a schedule that splits backwards;
        None if `backward` computes the gradients of leaves too.
    """

    forward: Forward
    backward: Backward | None = None
    weight: Weight | None = None


class _State(NamedTuple):
    """The carry of the loop over ticks.

    Attributes:
      inputs: the ring of inputs that arrived.
      gradients: the ring of gradients that arrived.
      x: the input that arrives now, from the stage before.
      dx: the gradient of this stage's input, which the stage before has not got yet.
      carry: the carry of `TickWork`.
    """

    inputs: Buffers
    gradients: Buffers
    x: Buffers
    dx: Buffers
    carry: Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ticks:
    """Runs a schedule as a loop.

    Attributes:
      schedule: which stage does what in which tick.
      stash: the slots for arrivals.
      activations, gradients: the buffers that travel down, and those that travel up.
      by_data: whether ties must be by data; see `tie`.
    """

    schedule: Schedule
    stash: Stash
    activations: Packing
    gradients: Packing
    by_data: bool

    @staticmethod
    def make(
        schedule: Schedule, activations: Packing, gradients: Packing, *, by_data: bool
    ) -> Ticks:
        """Prove that a schedule can run, and give arrivals their slots.

        Raises:
          ValueError: the schedule cannot run.
        """
        check(schedule)
        return Ticks(
            schedule=schedule,
            stash=make_stash(schedule),
            activations=activations,
            gradients=gradients,
            by_data=by_data,
        )

    def run(self, work: TickWork, carry: Any) -> Any:
        """Run all ticks.

        Args:
          work: the functions that a stage calls.
          carry: the pytree that they pass on.

        Returns:
          The carry after the last tick.
        """
        stage = lax.axis_index(PIPE)
        rows = {name: jnp.asarray(table)[:, stage] for name, table in self._tables().items()}
        stash = self.stash
        start = _State(
            inputs=_ring(self.activations, stash.num_input_slots),
            gradients=_ring(self.gradients, stash.num_gradient_slots if work.backward else 0),
            x=self.activations.zeros(),
            dx=self.gradients.zeros(),
            carry=carry,
        )
        with jax.named_scope(TICKS):
            end, _ = lax.scan(lambda state, row: (self._tick(work, state, row), None), start, rows)
        return end.carry

    def _tick(self, work: TickWork, state: _State, row: Row) -> _State:
        """Do one tick: forward, backward and weight gradient, each if the schedule has it."""
        inputs = _write(state.inputs, row["input_arrival"], state.x)
        # The last tick's gradient goes up during this forward; y goes down during this backward.
        g = self._up(state.dx) if work.backward else []
        y, carry = self._forward(work.forward, row, inputs, state.carry, after=g)
        x = self._down(y)
        if work.backward is None:
            return state._replace(inputs=inputs, x=x, carry=carry)
        g, y = tie(g, y, by_data=False)
        gradients = _write(state.gradients, row["gradient_arrival"], g)
        dx, carry = self._backward(work.backward, row, inputs, gradients, carry, after=x)
        if work.weight is not None:
            carry = self._weight(work.weight, row, inputs, gradients, carry, after=dx)
            if self.by_data:
                dx, _ = tie(dx, jax.tree.leaves(carry), by_data=True)
        # XLA would move a permute from the end of a turn into the next turn, which reads x at once.
        x, dx = tie(x, dx, by_data=False)
        return _State(inputs, gradients, x, dx, carry)

    def _forward(
        self, forward: Forward, row: Row, inputs: Buffers, carry: Any, *, after: Buffers
    ) -> tuple[Buffers, Any]:
        """Return this tick's activations and the carry; zeros if there is no forward."""
        return lax.cond(
            self._has(row["forward"], after=after),
            lambda carry: forward(_read(inputs, row["forward_input"]), row["forward"], carry),
            lambda carry: (self.activations.zeros(), carry),
            carry,
        )

    def _backward(
        self,
        backward: Backward,
        row: Row,
        inputs: Buffers,
        gradients: Buffers,
        carry: Any,
        *,
        after: Buffers,
    ) -> tuple[Buffers, Any]:
        """Return the gradient of this tick's input and the carry; zeros if there is no backward."""
        return lax.cond(
            self._has(row["backward"], after=after),
            lambda carry: backward(
                _read(inputs, row["backward_input"]),
                _read(gradients, row["backward_gradient"]),
                row["backward"],
                carry,
            ),
            lambda carry: (self.gradients.zeros(), carry),
            carry,
        )

    def _weight(
        self,
        weight: Weight,
        row: Row,
        inputs: Buffers,
        gradients: Buffers,
        carry: Any,
        *,
        after: Buffers,
    ) -> Any:
        """Return the carry, with this tick's weight gradient if there is one."""
        return lax.cond(
            self._has(row["weight"], after=after),
            lambda carry: weight(
                _read(inputs, row["weight_input"]),
                _read(gradients, row["weight_gradient"]),
                row["weight"],
                carry,
            ),
            lambda carry: carry,
            carry,
        )

    def _has(self, microbatch: jax.Array, *, after: Buffers) -> jax.Array:
        """Whether a table names a micro-batch.

        If ties must be by data, the answer is known only once `after` exist. So every device first
        finishes the collectives that they come from.
        """
        if self.by_data:
            (microbatch,), _ = tie([microbatch], after, by_data=True)
        return microbatch != NONE

    def _down(self, buffers: Buffers) -> Buffers:
        """Send buffers to the stage after."""
        return _send(buffers, [(s, s + 1) for s in range(self.schedule.stages - 1)])

    def _up(self, buffers: Buffers) -> Buffers:
        """Send buffers to the stage before."""
        return _send(buffers, [(s + 1, s) for s in range(self.schedule.stages - 1)])

    def _tables(self) -> dict[str, np.ndarray]:
        """Return the tables [ticks, stages] that a tick reads: micro-batches, and their slots."""
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
    """Return the slot of each entry of a table of micro-batches; 0 where no slot is needed."""
    found = slots[np.arange(table.shape[1])[None, :], np.maximum(table, 0)]
    return np.where(table == NONE, 0, np.maximum(found, 0)).astype(np.int32)


def _ring(packing: Packing, num_slots: int) -> Buffers:
    """Return empty slots, and one more for arrivals that nobody reads."""
    return [jnp.zeros((num_slots + 1, size), dtype) for size, dtype in packing.buffers]


def _write(ring: Buffers, slot: jax.Array, buffers: Buffers) -> Buffers:
    """Write buffers to a slot of a ring; to the last slot if the table names none."""
    return [
        lax.dynamic_update_index_in_dim(r, x, jnp.where(slot == NONE, r.shape[0] - 1, slot), 0)
        for r, x in zip(ring, buffers, strict=True)
    ]


def _read(ring: Buffers, slot: jax.Array) -> Buffers:
    """Return the buffers in a slot of a ring."""
    return [lax.dynamic_index_in_dim(r, slot, keepdims=False) for r in ring]
