"""The work of a pipeline's stages in a tick.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.pipeline.micro_batches import MicroBatch, MicroBatches
from zeroxla.pipeline.split_backward import SplitBackward
from zeroxla.pipeline.stage import StageProgram
from zeroxla.pipeline.stage_buffers import Packing, make_packing
from zeroxla.pipeline.stage_ends import HeldLeaves, StageEnds
from zeroxla.pipeline.stage_moves import Buffers
from zeroxla.pipeline.stage_state import StageState
from zeroxla.pipeline.ticks import StageJob, TickWork
from zeroxla.program.shapes import shapes_of
from zeroxla.program.trace import is_float
from zeroxla.step.metrics import weighted


class TrainCarry(NamedTuple):
    """What a rank carries through the ticks of a step.

    Attributes:
      gradients: the sums of its leaves' gradients, packed.
      sums: the weighted sums of the loss and its metrics.
      states: the model state, once for each of its stages.
      kept: the ring of what backwards have left to weight gradients.
    """

    gradients: Buffers
    sums: Any
    states: tuple[StageState, ...]
    kept: Buffers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageWork:
    """Runs the stages on micro-batches.

    Attributes:
      programs: the program of each stage.
      splits: the backward of each stage in two parts, if the schedule splits backwards.
      ends: unpacks leaves, and packs gradients.
      held: the leaves that this device holds.
      micro_batches: this device's micro-batches.
      scale: the loss scale.
      activations, cotangents: pack the activations that go down, and the gradients that go up.
        Number s packs the arrays between the stages s and s + 1.
      kept: packs what the backward of each stage leaves to its weight gradient.
    """

    programs: Sequence[StageProgram]
    splits: Sequence[SplitBackward]
    ends: StageEnds
    held: HeldLeaves
    micro_batches: MicroBatches
    scale: jax.Array
    activations: Packing
    cotangents: Packing
    kept: Packing

    @staticmethod
    def make(
        programs: Sequence[StageProgram],
        ends: StageEnds,
        held: HeldLeaves,
        micro_batches: MicroBatches,
        scale: jax.Array,
    ) -> StageWork:
        """Plan the buffers that travel between the stages; the arguments are the attributes."""
        inner = [program.outputs for program in programs[:-1]] or [()]
        return StageWork(
            programs=programs,
            splits=(),
            ends=ends,
            held=held,
            micro_batches=micro_batches,
            scale=scale,
            activations=make_packing(inner),
            cotangents=make_packing([[x for x in arrays if is_float(x.dtype)] for arrays in inner]),
            kept=make_packing([()]),
        )

    def split(
        self,
        programs: Sequence[StageProgram],
        model_state: Sequence[jax.ShapeDtypeStruct],
        by_data: str | None,
    ) -> StageWork:
        """Return the same work with every backward in two parts.

        Args:
          programs: the program of each stage, whose own ties are none by data.
          model_state: the shapes of the model state's leaves.
          by_data: as in `SplitBackward`.
        """
        rows, key = self.micro_batches.shapes()
        splits = []
        for stage, program in enumerate(programs):
            sources, resident = shapes_of(self.ends.unpack(stage, self.held))
            given = [x for x in program.outputs if is_float(x.dtype)]
            args = (sources, resident, list(program.inputs), rows, key, list(model_state), given)
            splits.append(SplitBackward.make(program, (*args, self.scale), by_data))
        kept = make_packing([both.kept for both in splits])
        return dataclasses.replace(self, splits=splits, kept=kept)

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
        if self.splits:
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
        self, model_state: Sequence[jax.Array], *, num_states: int, num_kept: int
    ) -> TrainCarry:
        """Return the carry with which a step begins.

        Args:
          model_state: the leaves of the model state.
          num_states: the slots that keep the model state as micro-batches saw it.
          num_kept: the slots of the ring of `TrainCarry.kept`.
        """
        num_states = num_states if any(p.reads_state for p in self.programs) else 0
        state = StageState.start(model_state, num_states)
        return TrainCarry(
            gradients=self.ends.gradients.zeros(),
            sums=self.no_sums(),
            states=(state,) * (max(self.chunks) + 1),
            kept=[jnp.zeros((num_kept, size), dtype) for size, dtype in self.kept.buffers],
        )

    def no_sums(self) -> Any:
        """Return zeros like the sums of loss and metrics."""
        tree = self.programs[-1].tree
        names = tree.unflatten(range(tree.num_leaves))[1]
        zeros = dict.fromkeys(names, jnp.zeros((), jnp.float32))
        return jax.tree.map(jnp.zeros_like, weighted(jnp.zeros(()), zeros))

    def _forward(self, stage: int, job: StageJob, carry: TrainCarry) -> tuple[Buffers, TrainCarry]:
        """Return the activations for the next stage, and the carry with the stage's new state. The
        last stage runs in its backward alone."""
        if stage == self.last:
            return self.activations.zeros(), carry
        state = carry.states[self.chunks[stage]]
        found, new = self.programs[stage].forward(*self._arguments(stage, job, state.leaves))
        carry = self._with_state(stage, carry, state.changed(new, job.microbatch))
        return self.activations.pack(stage, found), carry

    def _gradients(
        self, stage: int, job: StageJob, carry: TrainCarry
    ) -> tuple[Buffers, TrainCarry]:
        """Run a whole backward: return the gradient for the stage before, and the carry with the
        sums of the loss, of metrics and of the leaves' gradients."""
        args = self._backward_arguments(stage, job, carry)
        of_leaves, of_inputs, sums, state = self.programs[stage].backward(*args)
        carry = carry._replace(gradients=self.ends.add(stage, carry.gradients, of_leaves))
        return self._up(stage, of_inputs), self._after_loss(stage, job, carry, sums, state)

    def _input_gradients(
        self, stage: int, job: StageJob, carry: TrainCarry
    ) -> tuple[Buffers, TrainCarry]:
        """Run the first part of a backward: return the gradient for the stage before, and the carry
        with the sums of the loss and of metrics, and with what the second part needs."""
        args = self._backward_arguments(stage, job, carry)
        (of_inputs, sums, state), kept = self.splits[stage].at_once(args)
        packed = self.kept.pack(stage, kept)
        ring = [
            lax.dynamic_update_index_in_dim(slots, x, job.kept, 0)
            for slots, x in zip(carry.kept, packed, strict=True)
        ]
        carry = carry._replace(kept=ring)
        return self._up(stage, of_inputs), self._after_loss(stage, job, carry, sums, state)

    def _leaf_gradients(self, stage: int, job: StageJob, carry: TrainCarry) -> TrainCarry:
        """Run the second part of a backward: return the carry with the leaves' gradients added."""
        packed = [lax.dynamic_index_in_dim(x, job.kept, keepdims=False) for x in carry.kept]
        args = self._backward_arguments(stage, job, carry)
        of_leaves = self.splits[stage].later(args, self.kept.unpack(stage, packed))
        return carry._replace(gradients=self.ends.add(stage, carry.gradients, of_leaves))

    def _up(self, stage: int, of_inputs: Sequence[jax.Array]) -> Buffers:
        return self.cotangents.pack(stage - 1, of_inputs) if stage else self.cotangents.zeros()

    def _after_loss(
        self, stage: int, job: StageJob, carry: TrainCarry, sums: Any, state: Sequence[jax.Array]
    ) -> TrainCarry:
        """Return the carry with what the last stage has computed; of others it stays the same."""
        if stage < self.last:
            return carry
        new = carry.states[self.chunks[stage]].changed(state, job.microbatch)
        carry = carry._replace(sums=jax.tree.map(jnp.add, carry.sums, sums))
        return self._with_state(stage, carry, new)

    def _with_state(self, stage: int, carry: TrainCarry, state: StageState) -> TrainCarry:
        states = list(carry.states)
        states[self.chunks[stage]] = state
        return carry._replace(states=tuple(states))

    def _backward_arguments(self, stage: int, job: StageJob, carry: TrainCarry) -> tuple[Any, ...]:
        state = carry.states[self.chunks[stage]]
        is_last = stage == self.last
        seen = state.leaves if is_last else state.seen_by(job.microbatch)
        given = [] if is_last else self.cotangents.unpack(stage, job.g)
        return *self._arguments(stage, job, seen), given, self.scale

    def _arguments(self, stage: int, job: StageJob, state: Sequence[jax.Array]) -> tuple[Any, ...]:
        """Return the arguments of `StageProgram.forward`."""
        sources, resident = self.ends.unpack(stage, self.held)
        x = self.activations.unpack(stage - 1, job.x) if stage else []
        micro: MicroBatch = self.micro_batches.at(job.microbatch)
        return sources, resident, x, micro.rows, micro.key, list(state)
