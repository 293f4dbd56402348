"""The work of a pipeline's stages in a tick.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zeroxla.pipeline.micro_batches import MicroBatch, MicroBatches
from zeroxla.pipeline.rings import make_ring, read, write
from zeroxla.pipeline.stage import StageProgram
from zeroxla.pipeline.stage_buffers import Packing, make_packing
from zeroxla.pipeline.stage_calls import AtOnce, StageCalls
from zeroxla.pipeline.stage_ends import HeldLeaves, StageEnds
from zeroxla.pipeline.stage_moves import Buffers
from zeroxla.pipeline.stage_state import StageState
from zeroxla.pipeline.stash import Stash
from zeroxla.pipeline.ticks import StageJob, TickWork
from zeroxla.program.trace import is_float
from zeroxla.step.metrics import weighted


class TrainCarry(NamedTuple):
    """What a rank carries through the ticks of a step.

    Attributes:
      gradients: the sums of its leaves' gradients, packed.
      sums: the weighted sums of the loss and its metrics.
      states: the model state, once for each of its stages.
      kept: the ring of what backwards have left to weight gradients.
      tapes, last_tapes: the rings of what forwards have left to backwards: of the stages before
        the last one, and of the last one.
    """

    gradients: Buffers
    sums: Any
    states: tuple[StageState, ...]
    kept: Buffers
    tapes: Buffers
    last_tapes: Buffers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageWork:
    """Runs the stages on micro-batches.

    Attributes:
      programs: the program of each stage.
      calls: the calls in which stages run.
      ends: unpacks leaves, and packs gradients.
      held: the leaves that this device holds.
      micro_batches: this device's micro-batches.
      scale: the loss scale.
      activations, cotangents: pack the activations that go down, and the gradients that go up.
        Number s packs the arrays between the stages s and s + 1.
    """

    programs: Sequence[StageProgram]
    calls: StageCalls
    ends: StageEnds
    held: HeldLeaves
    micro_batches: MicroBatches
    scale: jax.Array
    activations: Packing
    cotangents: Packing

    @staticmethod
    def make(
        programs: Sequence[StageProgram],
        calls: StageCalls,
        ends: StageEnds,
        held: HeldLeaves,
        micro_batches: MicroBatches,
        scale: jax.Array,
    ) -> StageWork:
        """Plan the buffers that travel between the stages; the arguments are the attributes."""
        inner = [program.outputs for program in programs[:-1]] or [()]
        return StageWork(
            programs=programs,
            calls=calls,
            ends=ends,
            held=held,
            micro_batches=micro_batches,
            scale=scale,
            activations=make_packing(inner),
            cotangents=make_packing([[x for x in arrays if is_float(x.dtype)] for arrays in inner]),
        )

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.programs) - 1

    @property
    def chunks(self) -> list[int]:
        """For each stage, its number among the stages of its rank."""
        ranks = self.ends.rank_leaves.ranks
        return [ranks[:stage].count(rank) for stage, rank in enumerate(ranks)]

    def training(self) -> TickWork:
        """Return the work of a step. Its carry is a `TrainCarry`."""
        if self.calls.splits:
            return TickWork(
                forward=self._forward, backward=self._input_gradients, weight=self._leaf_gradients
            )
        return TickWork(forward=self._forward, backward=self._gradients)

    def evaluation(self, model_state: Sequence[jax.Array]) -> TickWork:
        """Return the work of an evaluation. Its carry is the metrics' sums."""

        def forward(stage: int, job: StageJob, sums: Any) -> tuple[Buffers, Any]:
            found, _ = self.programs[stage].forward(*self._arguments(stage, job, model_state))
            if stage < self.last:
                return self.activations.pack(stage, found), sums
            loss, metrics = self.programs[stage].tree.unflatten(found)
            return self.activations.zeros(), jax.tree.map(jnp.add, sums, weighted(loss, metrics))

        return TickWork(forward=forward)

    def start(
        self, model_state: Sequence[jax.Array], stash: Stash, *, num_states: int
    ) -> TrainCarry:
        """Return the carry with which a step begins.

        Args:
          model_state: the leaves of the model state.
          stash: the slots of the rings.
          num_states: the slots that keep the model state as micro-batches saw it.
        """
        num_states = num_states if any(p.reads_state for p in self.programs) else 0
        state = StageState.start(model_state, num_states)
        return TrainCarry(
            gradients=self.ends.gradients.zeros(),
            sums=self.no_sums(),
            states=(state,) * (max(self.chunks) + 1),
            kept=make_ring(self.calls.kept, stash.num_kept_slots),
            tapes=make_ring(self.calls.tapes, stash.num_tape_slots),
            last_tapes=make_ring(self.calls.last_tape, stash.num_last_tape_slots),
        )

    def no_sums(self) -> Any:
        """Return zeros like the sums of loss and metrics."""
        tree = self.programs[-1].tree
        names = tree.unflatten(range(tree.num_leaves))[1]
        zeros = dict.fromkeys(names, jnp.zeros((), jnp.float32))
        return jax.tree.map(jnp.zeros_like, weighted(jnp.zeros(()), zeros))

    def _forward(self, stage: int, job: StageJob, carry: TrainCarry) -> tuple[Buffers, TrainCarry]:
        """Return the activations for the next stage, and the carry with the stage's new state. If
        backwards run forwards again, the last stage runs in its backward alone."""
        state = carry.states[self.chunks[stage]]
        if not self.calls.forwards:
            if stage == self.last:
                return self.activations.zeros(), carry
            found, new = self.programs[stage].forward(*self._arguments(stage, job, state.leaves))
            carry = self._with_state(stage, carry, state.changed(new, job.microbatch))
            return self.activations.pack(stage, found), carry
        args = self._backward_arguments(stage, job, state.leaves)
        (found, sums, new), tape = self.calls.forwards[stage].first(args)
        carry = self._with_state(stage, carry, state.changed(new, job.microbatch))
        if stage < self.last:
            tapes = write(carry.tapes, job.tape, self.calls.tapes.pack(stage, tape))
            return self.activations.pack(stage, found), carry._replace(tapes=tapes)
        tapes = write(carry.last_tapes, job.tape, self.calls.last_tape.pack(0, tape))
        sums = jax.tree.map(jnp.add, carry.sums, sums)
        return self.activations.zeros(), carry._replace(sums=sums, last_tapes=tapes)

    def _gradients(
        self, stage: int, job: StageJob, carry: TrainCarry
    ) -> tuple[Buffers, TrainCarry]:
        """Run a whole backward: return the gradient for the stage before, and the carry with the
        sums of the loss, of metrics and of the leaves' gradients."""
        backward = self.calls.backwards[stage]
        at_once, of_leaves = backward(*self._with_tape(stage, job, carry, is_new=True))
        carry = carry._replace(gradients=self.ends.add(stage, carry.gradients, of_leaves))
        return self._up(stage, at_once.of_inputs), self._after_loss(stage, job, carry, at_once)

    def _input_gradients(
        self, stage: int, job: StageJob, carry: TrainCarry
    ) -> tuple[Buffers, TrainCarry]:
        """Run the first call of a backward: return the gradient for the stage before, and the carry
        with the sums of the loss and of metrics, and with what the second call needs."""
        args = self._with_tape(stage, job, carry, is_new=True)
        at_once, kept = self.calls.splits[stage].first(args)
        ring = write(carry.kept, job.kept, self.calls.kept.pack(stage, kept))
        carry = carry._replace(kept=ring)
        return self._up(stage, at_once.of_inputs), self._after_loss(stage, job, carry, at_once)

    def _leaf_gradients(self, stage: int, job: StageJob, carry: TrainCarry) -> TrainCarry:
        """Run the second call of a backward: return the carry with the leaves' gradients added."""
        kept = self.calls.kept.unpack(stage, read(carry.kept, job.kept))
        args = self._with_tape(stage, job, carry, is_new=False)
        of_leaves = self.calls.splits[stage].second(args, kept)
        return carry._replace(gradients=self.ends.add(stage, carry.gradients, of_leaves))

    def _with_tape(
        self, stage: int, job: StageJob, carry: TrainCarry, *, is_new: bool
    ) -> tuple[Any, ...]:
        """Return the arguments of a stage's backward, and what its forward has left, if that is
        kept.

        Args:
          stage, job, carry: as of `TickWork.backward`.
          is_new: whether the last stage has not seen the micro-batch before, unless in a forward.
        """
        state = carry.states[self.chunks[stage]]
        if is_new and stage == self.last and not self.calls.forwards:
            return self._backward_arguments(stage, job, state.leaves)
        args = self._backward_arguments(stage, job, state.seen_by(job.microbatch))
        if not self.calls.forwards:
            return args
        if stage < self.last:
            return *args, self.calls.tapes.unpack(stage, read(carry.tapes, job.tape))
        return *args, self.calls.last_tape.unpack(0, read(carry.last_tapes, job.tape))

    def _up(self, stage: int, of_inputs: Sequence[jax.Array]) -> Buffers:
        return self.cotangents.pack(stage - 1, of_inputs) if stage else self.cotangents.zeros()

    def _after_loss(
        self, stage: int, job: StageJob, carry: TrainCarry, at_once: AtOnce
    ) -> TrainCarry:
        """Return the carry with what the last stage has computed, if it runs forward in its
        backward alone; else it stays the same."""
        if at_once.sums is None:
            return carry
        new = carry.states[self.chunks[stage]].changed(at_once.state, job.microbatch)
        carry = carry._replace(sums=jax.tree.map(jnp.add, carry.sums, at_once.sums))
        return self._with_state(stage, carry, new)

    def _with_state(self, stage: int, carry: TrainCarry, state: StageState) -> TrainCarry:
        states = list(carry.states)
        states[self.chunks[stage]] = state
        return carry._replace(states=tuple(states))

    def _backward_arguments(
        self, stage: int, job: StageJob, state: Sequence[jax.Array]
    ) -> tuple[Any, ...]:
        """Return the arguments of `StageProgram.backward`; in a forward the gradients are zeros."""
        given = []
        if stage < self.last:
            given = self.cotangents.unpack(stage, job.g or self.cotangents.zeros())
        return *self._arguments(stage, job, state), given, self.scale

    def _arguments(self, stage: int, job: StageJob, state: Sequence[jax.Array]) -> tuple[Any, ...]:
        """Return the arguments of `StageProgram.forward`."""
        sources, resident = self.ends.unpack(stage, self.held)
        x = self.activations.unpack(stage - 1, job.x) if stage else []
        micro: MicroBatch = self.micro_batches.at(job.microbatch)
        return sources, resident, x, micro.rows, micro.key, list(state)
