"""What the stages of a pipeline do in a tick, as one program for all: each device takes its stage's
branch.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.pipeline.stage import StageProgram
from zeroxla.pipeline.stage_buffers import Packing, make_packing
from zeroxla.pipeline.stage_ends import Begun, StagesEnds
from zeroxla.pipeline.stage_moves import Buffers, each_stage
from zeroxla.program.trace import is_float
from zeroxla.step.metrics import weighted


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """What a stage works on.

    Attributes:
      x: what came from the stage before, packed.
      g: the gradient that came from the stage after, packed; None in forward.
      rows: of the batch.
      key: of the model's randomness.
    """

    x: Buffers
    g: Buffers | None
    rows: Any
    key: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Body:
    """The stages of a pipeline.

    Attributes:
      programs: of the stages.
      halves: for a schedule that splits backward, programs of each stage that give the gradient of
        its inputs alone, and of its leaves alone.
      ends: which bring the leaves.
      begun: what this device's stage holds of them.
      scale: the loss scale.
      activations, cotangents: how what travels is packed; number s is between the stages s and
        s + 1.
    """

    programs: Sequence[StageProgram]
    halves: Sequence[tuple[StageProgram, StageProgram]]
    ends: StagesEnds
    begun: Begun
    scale: jax.Array
    activations: Packing
    cotangents: Packing

    @staticmethod
    def make(
        ends: StagesEnds,
        begun: Begun,
        scale: jax.Array,
        halves: Sequence[tuple[StageProgram, StageProgram]] = (),
    ) -> Body:
        """Plan what travels between the stages; the arguments are the attributes."""
        inner = [program.outputs for program in ends.programs[:-1]] or [()]
        return Body(
            programs=ends.programs,
            halves=halves,
            ends=ends,
            begun=begun,
            scale=scale,
            activations=make_packing(inner),
            cotangents=make_packing([[x for x in arrays if is_float(x.dtype)] for arrays in inner]),
        )

    @property
    def last(self) -> int:
        return len(self.programs) - 1

    def zeros(self) -> tuple[Buffers, Any]:
        """Return zeros like the sums of gradients, and of the loss and its metrics."""
        tree = self.programs[-1].tree
        names = tree.unflatten(range(tree.num_leaves))[1]
        zeros = dict.fromkeys(names, jnp.zeros((), jnp.float32))
        sums = jax.tree.map(jnp.zeros_like, weighted(jnp.zeros(()), zeros))
        return self.ends.gradients.zeros(), sums

    def forward(self, micro: MicroBatch) -> Buffers:
        """Return what goes to the next stage. The last one runs in its backward alone."""

        def run(stage: int) -> Buffers:
            if stage == self.last:
                return self.activations.zeros()
            return self.activations.pack(stage, self._forward(stage, micro))

        return self._each(run)

    def evaluate(self, micro: MicroBatch, sums: Any) -> tuple[Buffers, Any]:
        """Return what goes to the next stage, and the sums with those of the last stage added."""

        def run(stage: int) -> tuple[Buffers, Any]:
            found = self._forward(stage, micro)
            if stage < self.last:
                return self.activations.pack(stage, found), sums
            loss, metrics = self.programs[stage].tree.unflatten(found)
            return self.activations.zeros(), jax.tree.map(jnp.add, sums, weighted(loss, metrics))

        return self._each(run)

    def backward(
        self, micro: MicroBatch, carry: tuple[Buffers, Any]
    ) -> tuple[Buffers, tuple[Buffers, Any]]:
        """Return the gradient for the stage before, and the gradients and sums with these added; of
        a schedule that splits backward, without those of leaves."""
        grads, sums = carry

        def run(stage: int) -> tuple[Buffers, tuple[Buffers, Any]]:
            if self.halves and stage == 0 < self.last:  # no stage before it wants a gradient
                return self.cotangents.zeros(), carry
            program = self.halves[stage][0] if self.halves else self.programs[stage]
            found, of_x, mine = self._backward(program, stage, micro)
            new = grads if self.halves else self._add(stage, grads, found)
            dx = self.cotangents.pack(stage - 1, of_x) if stage else self.cotangents.zeros()
            return dx, (new, sums if mine is None else jax.tree.map(jnp.add, sums, mine))

        return self._each(run)

    def weight(self, micro: MicroBatch, carry: tuple[Buffers, Any]) -> tuple[Buffers, Any]:
        """Return the gradients of leaves with these added, and the sums as they are."""
        grads, sums = carry

        def run(stage: int) -> Buffers:
            found, _, _ = self._backward(self.halves[stage][1], stage, micro)
            return self._add(stage, grads, found)

        return self._each(run), sums

    def _forward(self, stage: int, micro: MicroBatch) -> list[jax.Array]:
        program = self.programs[stage]
        sources, resident = self.ends.held(stage, self.begun)
        return program.forward(sources, resident, self._inputs(stage, micro), micro.rows, micro.key)

    def _backward(
        self, program: StageProgram, stage: int, micro: MicroBatch
    ) -> tuple[list[jax.Array], list[jax.Array], Any]:
        assert micro.g is not None
        sources, resident = self.ends.held(stage, self.begun)
        given = self.cotangents.unpack(stage, micro.g) if stage < self.last else []
        inputs = self._inputs(stage, micro)
        return program.backward(sources, resident, inputs, micro.rows, micro.key, given, self.scale)

    def _inputs(self, stage: int, micro: MicroBatch) -> list[jax.Array]:
        return self.activations.unpack(stage - 1, micro.x) if stage else []

    def _add(self, stage: int, grads: Buffers, found: Sequence[jax.Array]) -> Buffers:
        return jax.tree.map(jnp.add, grads, self.ends.gradients.pack(stage, found))

    def _each(self, run: Callable[[int], Any]) -> Any:
        return each_stage(len(self.programs), run)
