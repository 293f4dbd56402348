"""The work of a pipeline's stages in a tick: one program, in which each device takes its branch.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.pipeline.micro_batches import MicroBatch, MicroBatches
from zeroxla.pipeline.stage import StageProgram
from zeroxla.pipeline.stage_buffers import Packing, make_packing
from zeroxla.pipeline.stage_ends import HeldLeaves, StageEnds
from zeroxla.pipeline.stage_moves import Buffers, each_stage
from zeroxla.pipeline.ticks import TickWork
from zeroxla.program.trace import is_float
from zeroxla.step.metrics import weighted


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
      activations, cotangents: pack the activations that go down, and the gradients that go up.
        Number s packs the arrays between the stages s and s + 1.
    """

    programs: Sequence[StageProgram]
    halves: Sequence[tuple[StageProgram, StageProgram]]
    ends: StageEnds
    held: HeldLeaves
    scale: jax.Array
    activations: Packing
    cotangents: Packing

    @staticmethod
    def make(
        ends: StageEnds,
        held: HeldLeaves,
        scale: jax.Array,
        halves: Sequence[tuple[StageProgram, StageProgram]] = (),
    ) -> StageWork:
        """Plan the buffers that travel between the stages; the arguments are the attributes."""
        inner = [program.outputs for program in ends.programs[:-1]] or [()]
        return StageWork(
            programs=ends.programs,
            halves=halves,
            ends=ends,
            held=held,
            scale=scale,
            activations=make_packing(inner),
            cotangents=make_packing([[x for x in arrays if is_float(x.dtype)] for arrays in inner]),
        )

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.programs) - 1

    def training(self, micro_batches: MicroBatches) -> TickWork:
        """Return the work of a step. Its carry is the gradients, packed, and the metrics' sums."""
        at = micro_batches.at

        def forward(x: Buffers, i: jax.Array, carry: Any) -> tuple[Buffers, Any]:
            return self._activations(at(i, x)), carry

        def backward(x: Buffers, g: Buffers, i: jax.Array, carry: Any) -> tuple[Buffers, Any]:
            return self._gradients(at(i, x, g), carry)

        def weight(x: Buffers, g: Buffers, i: jax.Array, carry: Any) -> Any:
            return self._leaf_gradients(at(i, x, g), carry)

        return TickWork(forward=forward, backward=backward, weight=weight if self.halves else None)

    def evaluation(self, micro_batches: MicroBatches) -> TickWork:
        """Return the work of an evaluation. Its carry is the metrics' sums."""

        def forward(x: Buffers, i: jax.Array, sums: Any) -> tuple[Buffers, Any]:
            return self._evaluate(micro_batches.at(i, x), sums)

        return TickWork(forward=forward)

    def zeros(self) -> tuple[Buffers, Any]:
        """Return zeros shaped like the packed gradients, and like the sums of loss and metrics."""
        tree = self.programs[-1].tree
        names = tree.unflatten(range(tree.num_leaves))[1]
        zeros = dict.fromkeys(names, jnp.zeros((), jnp.float32))
        sums = jax.tree.map(jnp.zeros_like, weighted(jnp.zeros(()), zeros))
        return self.ends.gradients.zeros(), sums

    def _activations(self, micro: MicroBatch) -> Buffers:
        """Return the activations for the next stage. The last stage runs in its backward alone."""

        def run(stage: int) -> Buffers:
            if stage == self.last:
                return self.activations.zeros()
            return self.activations.pack(stage, self._forward(stage, micro))

        return self._each(run)

    def _evaluate(self, micro: MicroBatch, sums: Any) -> tuple[Buffers, Any]:
        """Return the activations for the next stage, and the sums; the last stage adds to them."""

        def run(stage: int) -> tuple[Buffers, Any]:
            found = self._forward(stage, micro)
            if stage < self.last:
                return self.activations.pack(stage, found), sums
            loss, metrics = self.programs[stage].tree.unflatten(found)
            return self.activations.zeros(), jax.tree.map(jnp.add, sums, weighted(loss, metrics))

        return self._each(run)

    def _gradients(
        self, micro: MicroBatch, carry: tuple[Buffers, Any]
    ) -> tuple[Buffers, tuple[Buffers, Any]]:
        """Run backward; return the gradient for the stage before, and the carry.

        This stage's sums are added to the carry, and its leaves' gradients too, unless the schedule
        splits backwards.
        """
        grads, sums = carry

        def run(stage: int) -> tuple[Buffers, tuple[Buffers, Any]]:
            if self.halves and stage == 0 < self.last:  # no stage before it needs a gradient
                return self.cotangents.zeros(), carry
            program = self.halves[stage][0] if self.halves else self.programs[stage]
            of_leaves, of_x, mine = self._backward(program, stage, micro)
            new = grads if self.halves else self._add(stage, grads, of_leaves)
            dx = self.cotangents.pack(stage - 1, of_x) if stage else self.cotangents.zeros()
            return dx, (new, sums if mine is None else jax.tree.map(jnp.add, sums, mine))

        return self._each(run)

    def _leaf_gradients(self, micro: MicroBatch, carry: tuple[Buffers, Any]) -> tuple[Buffers, Any]:
        """Return the carry with the leaves' gradients added, if the schedule splits backwards."""
        grads, sums = carry

        def run(stage: int) -> Buffers:
            of_leaves, _, _ = self._backward(self.halves[stage][1], stage, micro)
            return self._add(stage, grads, of_leaves)

        return self._each(run), sums

    def _forward(self, stage: int, micro: MicroBatch) -> list[jax.Array]:
        program = self.programs[stage]
        sources, resident = self.ends.unpack(stage, self.held)
        return program.forward(sources, resident, self._inputs(stage, micro), micro.rows, micro.key)

    def _backward(
        self, program: StageProgram, stage: int, micro: MicroBatch
    ) -> tuple[list[jax.Array], list[jax.Array], Any]:
        assert micro.g is not None
        sources, resident = self.ends.unpack(stage, self.held)
        given = self.cotangents.unpack(stage, micro.g) if stage < self.last else []
        inputs = self._inputs(stage, micro)
        return program.backward(sources, resident, inputs, micro.rows, micro.key, given, self.scale)

    def _inputs(self, stage: int, micro: MicroBatch) -> list[jax.Array]:
        return self.activations.unpack(stage - 1, micro.x) if stage else []

    def _add(self, stage: int, grads: Buffers, found: Sequence[jax.Array]) -> Buffers:
        return jax.tree.map(jnp.add, grads, self.ends.gradients.pack(stage, found))

    def _each(self, run: Callable[[int], Any]) -> Any:
        return each_stage(len(self.programs), run)
