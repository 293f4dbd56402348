"""Runs a schedule: a loop over ticks, in each of which a rank works and sends to its neighbours.

Arrivals are kept in rings of slots, which the schedule's tables name. So memory depends on the
schedule, not on the number of micro-batches. An idle rank computes nothing and sends zeros.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.fetch.ties import tie
from zeroxla.mesh.axes import PIPE
from zeroxla.pipeline.rings import make_ring, read, write_arrivals
from zeroxla.pipeline.schedule import Schedule
from zeroxla.pipeline.schedule_check import check
from zeroxla.pipeline.stage_buffers import Packing
from zeroxla.pipeline.stage_moves import Buffers
from zeroxla.pipeline.stash import Stash
from zeroxla.pipeline.tick_tables import TickPhase, make_phases, pairs_of

TICKS = "ticks"
"""The named scope of the loop."""

Arrivals = Mapping[int, Buffers]
"""By hop: what arrives from the rank that is so many ranks before, modulo their number."""
Row = Mapping[str, jax.Array]
"""This rank's entries of a phase's tables for one tick, int32 scalars."""


class StageJob(NamedTuple):
    """One micro-batch of one stage.

    Attributes:
      x: the activations from the stage before, packed.
      g: the gradient of the stage's result, packed; empty in a forward.
      microbatch: the micro-batch's number.
      kept: the slot for what a backward leaves to the weight gradient.
      tape: the slot for what a forward leaves to the backward.
    """

    x: Buffers
    g: Buffers
    microbatch: jax.Array
    kept: jax.Array
    tape: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TickWork:
    """The functions that a rank calls on a micro-batch of one of its stages.

    Attributes:
      forward: (stage, job, carry) -> (activations for the next stage, carry).
      backward: (stage, job, carry) -> (gradient for the stage before, carry); None in evaluation.
        Without `weight` it computes the gradients of leaves too.
      weight: (stage, job, carry) -> carry, for a schedule that splits backwards.
    """

    forward: Callable[[int, StageJob, Any], tuple[Buffers, Any]]
    backward: Callable[[int, StageJob, Any], tuple[Buffers, Any]] | None = None
    weight: Callable[[int, StageJob, Any], Any] | None = None


class _State(NamedTuple):
    """The carry of the loop over ticks.

    Attributes:
      inputs: the ring of inputs that arrived.
      gradients: the ring of gradients that arrived.
      x: the activations that arrive now.
      dx: the gradient that has not been sent.
      carry: the carry of `TickWork`.
    """

    inputs: Buffers
    gradients: Buffers
    x: Arrivals
    dx: Buffers
    carry: Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ticks:
    """Runs a schedule as a loop.

    Attributes:
      schedule: which stage does what in which tick.
      stash: the slots for arrivals.
      phases: the conditionals of a tick.
      activations, gradients: the buffers that travel to the next stage, and to the one before.
      by_data: whether ties must be by data; see `tie`.
    """

    schedule: Schedule
    stash: Stash
    phases: tuple[TickPhase, ...]
    activations: Packing
    gradients: Packing
    by_data: bool

    @staticmethod
    def make(
        schedule: Schedule,
        stash: Stash,
        activations: Packing,
        gradients: Packing,
        *,
        tapes: bool,
        by_data: bool,
    ) -> Ticks:
        """Prove that a schedule can run with a stash.

        Args:
          schedule, stash, activations, gradients, by_data: the attributes.
          tapes: whether forwards leave tapes.

        Raises:
          ValueError: the schedule cannot run.
        """
        check(schedule, stash)
        return Ticks(
            schedule=schedule,
            stash=stash,
            phases=make_phases(schedule, stash, tapes=tapes),
            activations=activations,
            gradients=gradients,
            by_data=by_data,
        )

    def run(self, work: TickWork, carry: Any) -> Any:
        """Run all ticks.

        Args:
          work: the functions that a rank calls.
          carry: the pytree that they pass on.

        Returns:
          The carry after the last tick.
        """
        stash, rank = self.stash, lax.axis_index(PIPE)
        tables = [phase.tables for phase in self.phases], stash.input_arrivals
        tables = *tables, stash.gradient_arrivals if self.schedule.trains else {}
        rows = jax.tree.map(lambda table: jnp.asarray(table)[:, rank], tables)
        num_gradients = stash.num_gradient_slots if work.backward else 0
        start = _State(  # one more slot is for arrivals that nobody reads
            inputs=make_ring(self.activations, stash.num_input_slots + 1),
            gradients=make_ring(self.gradients, num_gradients + 1),
            x={hop: self.activations.zeros() for hop in stash.input_arrivals},
            dx=self.gradients.zeros(),
            carry=carry,
        )
        with jax.named_scope(TICKS):
            end, _ = lax.scan(lambda state, row: (self._tick(work, state, row), None), start, rows)
        return end.carry

    def _tick(self, work: TickWork, state: _State, row: Any) -> _State:
        """Do one tick."""
        rows, input_slots, gradient_slots = row
        inputs = write_arrivals(state.inputs, input_slots, state.x)
        if len(self.phases) == 1:
            return self._one_phase(work, state, inputs, rows[0], gradient_slots)
        # The last tick's gradient goes up during this forward; y goes down during this backward.
        forward, *others = self.phases
        g = self._up(state.dx)
        arrived = jax.tree.leaves(g)
        y, _, carry = self._run(forward, work, rows[0], inputs, [], state.carry, after=arrived)
        x = self._down(y)
        arrived, y = tie(arrived, y, by_data=False)
        g = jax.tree.unflatten(jax.tree.structure(g), arrived)
        gradients = write_arrivals(state.gradients, gradient_slots, g)
        after, dx = jax.tree.leaves(x), self.gradients.zeros()
        for phase, row in zip(others, rows[1:], strict=True):
            _, made, carry = self._run(phase, work, row, inputs, gradients, carry, after=after)
            dx = made or dx
            after = jax.tree.leaves(dx)
        return self._end(state, inputs, gradients, x, dx, carry)

    def _one_phase(
        self,
        work: TickWork,
        state: _State,
        inputs: Buffers,
        row: Row,
        slots: Mapping[int, jax.Array],
    ) -> _State:
        """Do a tick in which a rank does one op of any kind, or none."""
        g = self._up(state.dx) if self.schedule.trains else {}
        gradients = write_arrivals(state.gradients, slots, g)
        y, dx, carry = self._run(
            self.phases[0], work, row, inputs, gradients, state.carry, after=jax.tree.leaves(g)
        )
        return self._end(state, inputs, gradients, self._down(y), dx or state.dx, carry)

    def _end(
        self,
        state: _State,
        inputs: Buffers,
        gradients: Buffers,
        x: Arrivals,
        dx: Buffers,
        carry: Any,
    ) -> _State:
        """Return the state after a tick: `x` arrives in the next one, and `dx` is sent there."""
        arrived = jax.tree.leaves(x)
        if self.by_data:
            dx, _ = tie(dx, [*arrived, *jax.tree.leaves(carry)], by_data=True)
        # XLA would move a permute from the end of a turn into the next turn, which reads x at once.
        arrived, dx = tie(arrived, dx, by_data=False)
        x = jax.tree.unflatten(jax.tree.structure(x), arrived)
        return state._replace(inputs=inputs, gradients=gradients, x=x, dx=dx, carry=carry)

    def _run(
        self,
        phase: TickPhase,
        work: TickWork,
        row: Row,
        inputs: Buffers,
        gradients: Buffers,
        carry: Any,
        *,
        after: Sequence[jax.Array],
    ) -> tuple[Buffers, Buffers, Any]:
        """Do this tick's op of a phase.

        Returns:
          The activations, zeros if there is no forward; the gradient, zeros if there is no
          backward; and the carry. Of a phase without forwards, or without backwards, these are
          empty.
        """
        no_y = self.activations.zeros() if "forward" in phase.ops else []
        no_dx = self.gradients.zeros() if "backward" in phase.ops else []

        def job(*, with_gradient: bool = True) -> StageJob:
            x = read(inputs, row["input_slot"])
            g = read(gradients, row["gradient_slot"]) if with_gradient else []
            return StageJob(x, g, row["microbatch"], row["kept_slot"], row["tape_slot"])

        def run(op: str, stage: int, carry: Any) -> tuple[Buffers, Buffers, Any]:
            if op == "forward":
                y, carry = work.forward(stage, job(with_gradient=False), carry)
                return y, no_dx, carry
            if op == "backward":
                assert work.backward is not None
                dx, carry = work.backward(stage, job(), carry)
                return no_y, dx, carry
            assert work.weight is not None
            return no_y, no_dx, work.weight(stage, job(), carry)

        branches = [lambda carry: (no_y, no_dx, carry)]
        branches += [lambda carry, o=op, s=stage: run(o, s, carry) for op, stage in phase.branches]
        return lax.switch(self._branch(row, after), branches, carry)

    def _branch(self, row: Row, after: Sequence[jax.Array]) -> jax.Array:
        """Return the number of this tick's branch.

        If ties must be by data, it is known only once `after` exist. So every device first finishes
        the collectives that they come from.
        """
        if not self.by_data:
            return row["branch"]
        (branch,), _ = tie([row["branch"]], after, by_data=True)
        return branch

    def _down(self, buffers: Buffers) -> Arrivals:
        """Send activations to the next stage."""
        return self._send(buffers, self.stash.input_arrivals, down=True)

    def _up(self, buffers: Buffers) -> Arrivals:
        """Send a gradient to the stage before."""
        return self._send(buffers, self.stash.gradient_arrivals, down=False)

    def _send(self, buffers: Buffers, hops: Mapping[int, Any], *, down: bool) -> Arrivals:
        found: dict[int, Buffers] = {}
        for hop in hops:
            pairs = pairs_of(self.schedule, hop, down=down)
            if hop and found and self.by_data:
                latest = jax.tree.leaves(list(found.values()))
                buffers, _ = tie(buffers, latest, by_data=True)
            with jax.named_scope("send"):
                found[hop] = [lax.ppermute(x, PIPE, pairs) for x in buffers] if hop else buffers
        return found
