"""The work of a pipeline's stages in a tick: one program, in which each device takes its branch.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zeroxla.pipeline.micro_batches import MicroBatch, MicroBatches
from zeroxla.pipeline.stage import StageProgram
from zeroxla.pipeline.stage_buffers import Packing, make_packing
from zeroxla.pipeline.stage_ends import HeldLeaves, StageEnds
from zeroxla.pipeline.stage_moves import Buffers, each_stage
from zeroxla.pipeline.stage_state import StageState
from zeroxla.pipeline.ticks import TickWork
from zeroxla.program.trace import is_float
from zeroxla.step.metrics import weighted


class TrainCarry(NamedTuple):
    """What a stage carries through the ticks of a step.

    Attributes:
      gradients: the sums of its leaves' gradients, packed.
      sums: the weighted sums of the loss and its metrics.
      state: the model state.
    """

    gradients: Buffers
    sums: Any
    state: StageState


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageWork:
    """Runs the stages on micro-batches.

    Attributes:
      programs: the program of each stage.
      halves: if the schedule splits backwards, for each stage one program that computes the
        gradients of its inputs alone, and one that computes the gradients of its leaves alone.
      ends: unpacks leaves, and packs gradients.
      held: the leaves that this device holds.
      scale: the loss scale.
      num_states: the slots that keep the model state as micro-batches saw it; 0 if nothing depends
        on it.
      activations, cotangents: pack the activations that go down, and the gradients that go up.
        Number s packs the arrays between the stages s and s + 1.
    """

    programs: Sequence[StageProgram]
    halves: Sequence[tuple[StageProgram, StageProgram]]
    ends: StageEnds
    held: HeldLeaves
    scale: jax.Array
    num_states: int
    activations: Packing
    cotangents: Packing

    @staticmethod
    def make(
        ends: StageEnds,
        held: HeldLeaves,
        scale: jax.Array,
        halves: Sequence[tuple[StageProgram, StageProgram]] = (),
        num_states: int = 0,
    ) -> StageWork:
        """Plan the buffers that travel between the stages; the arguments are the attributes."""
        inner = [program.outputs for program in ends.programs[:-1]] or [()]
        return StageWork(
            programs=ends.programs,
            halves=halves,
            ends=ends,
            held=held,
            scale=scale,
            num_states=num_states if any(p.reads_state for p in ends.programs) else 0,
            activations=make_packing(inner),
            cotangents=make_packing([[x for x in arrays if is_float(x.dtype)] for arrays in inner]),
        )

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.programs) - 1

    def training(self, micro_batches: MicroBatches) -> TickWork:
        """Return the work of a step. Its carry is a `TrainCarry`."""
        at = micro_batches.at

        def forward(x: Buffers, i: jax.Array, carry: TrainCarry) -> tuple[Buffers, TrainCarry]:
            return self._activations(at(i, x), carry)

        def backward(
            x: Buffers, g: Buffers, i: jax.Array, carry: TrainCarry
        ) -> tuple[Buffers, TrainCarry]:
            return self._gradients(at(i, x, g), carry)

        def weight(x: Buffers, g: Buffers, i: jax.Array, carry: TrainCarry) -> TrainCarry:
            return self._leaf_gradients(at(i, x, g), carry)

        return TickWork(forward=forward, backward=backward, weight=weight if self.halves else None)

    def evaluation(self, micro_batches: MicroBatches, model_state: Sequence[jax.Array]) -> TickWork:
        """Return the work of an evaluation. Its carry is the metrics' sums."""

        def forward(x: Buffers, i: jax.Array, sums: Any) -> tuple[Buffers, Any]:
            return self._evaluate(micro_batches.at(i, x), model_state, sums)

        return TickWork(forward=forward)

    def start(self, model_state: Sequence[jax.Array]) -> TrainCarry:
        """Return the carry with which a step begins."""
        state = StageState.start(model_state, self.num_states)
        return TrainCarry(self.ends.gradients.zeros(), self.no_sums(), state)

    def no_sums(self) -> Any:
        """Return zeros like the sums of loss and metrics."""
        tree = self.programs[-1].tree
        names = tree.unflatten(range(tree.num_leaves))[1]
        zeros = dict.fromkeys(names, jnp.zeros((), jnp.float32))
        return jax.tree.map(jnp.zeros_like, weighted(jnp.zeros(()), zeros))

    def _activations(self, micro: MicroBatch, carry: TrainCarry) -> tuple[Buffers, TrainCarry]:
        """Return the activations for the next stage, and the carry with this stage's new state. The
        last stage runs in its backward alone."""

        def run(stage: int) -> tuple[Buffers, StageState]:
            if stage == self.last:
                return self.activations.zeros(), carry.state
            found, state = self._forward(stage, micro, carry.state.leaves)
            return self.activations.pack(stage, found), carry.state.changed(state, micro.number)

        y, state = self._each(run)
        return y, carry._replace(state=state)

    def _evaluate(
        self, micro: MicroBatch, model_state: Sequence[jax.Array], sums: Any
    ) -> tuple[Buffers, Any]:
        """Return the activations for the next stage, and the sums; the last stage adds to them."""

        def run(stage: int) -> tuple[Buffers, Any]:
            found, _ = self._forward(stage, micro, model_state)
            if stage < self.last:
                return self.activations.pack(stage, found), sums
            loss, metrics = self.programs[stage].tree.unflatten(found)
            return self.activations.zeros(), jax.tree.map(jnp.add, sums, weighted(loss, metrics))

        return self._each(run)

    def _gradients(self, micro: MicroBatch, carry: TrainCarry) -> tuple[Buffers, TrainCarry]:
        """Run backward; return the gradient for the stage before, and the carry.

        This stage's sums are added to the carry, and its leaves' gradients too, unless the schedule
        splits backwards.
        """
        grads, sums, state = carry

        def run(stage: int) -> tuple[Buffers, TrainCarry]:
            if self.halves and stage == 0 < self.last:  # no stage before it needs a gradient
                return self.cotangents.zeros(), carry
            program = self.halves[stage][0] if self.halves else self.programs[stage]
            seen = state.leaves if stage == self.last else state.seen_by(micro.number)
            of_leaves, of_x, mine, new_state = self._backward(program, stage, micro, seen)
            new = grads if self.halves else self._add(stage, grads, of_leaves)
            dx = self.cotangents.pack(stage - 1, of_x) if stage else self.cotangents.zeros()
            if mine is None:
                return dx, TrainCarry(new, sums, state)
            added = jax.tree.map(jnp.add, sums, mine)
            return dx, TrainCarry(new, added, state.changed(new_state, micro.number))

        return self._each(run)

    def _leaf_gradients(self, micro: MicroBatch, carry: TrainCarry) -> TrainCarry:
        """Return the carry with the leaves' gradients added, if the schedule splits backwards."""
        seen = carry.state.seen_by(micro.number)

        def run(stage: int) -> Buffers:
            of_leaves, *_ = self._backward(self.halves[stage][1], stage, micro, seen)
            return self._add(stage, carry.gradients, of_leaves)

        return carry._replace(gradients=self._each(run))

    def _forward(
        self, stage: int, micro: MicroBatch, state: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        program = self.programs[stage]
        sources, resident = self.ends.unpack(stage, self.held)
        inputs = self._inputs(stage, micro)
        return program.forward(sources, resident, inputs, micro.rows, micro.key, state)

    def _backward(
        self, program: StageProgram, stage: int, micro: MicroBatch, state: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array], Any, list[jax.Array]]:
        assert micro.g is not None
        sources, resident = self.ends.unpack(stage, self.held)
        given = self.cotangents.unpack(stage, micro.g) if stage < self.last else []
        inputs, rows, key = self._inputs(stage, micro), micro.rows, micro.key
        return program.backward(sources, resident, inputs, rows, key, state, given, self.scale)

    def _inputs(self, stage: int, micro: MicroBatch) -> list[jax.Array]:
        return self.activations.unpack(stage - 1, micro.x) if stage else []

    def _add(self, stage: int, grads: Buffers, found: Sequence[jax.Array]) -> Buffers:
        return jax.tree.map(jnp.add, grads, self.ends.gradients.pack(stage, found))

    def _each(self, run: Callable[[int], Any]) -> Any:
        return each_stage(len(self.programs), run)
