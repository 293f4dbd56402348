"""What the stages of a pipeline do, as one program for all: each device takes its stage's branch.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.layout import Layout, Leaf
from zeroxla.mesh import PIPE
from zeroxla.metrics import weighted
from zeroxla.pipeline.moves import Buffers, Moves
from zeroxla.pipeline.packing import Packing, make_packing
from zeroxla.pipeline.stage import StageProgram
from zeroxla.routes import Form, Source
from zeroxla.trace import is_float
from zeroxla.vectors import as_vector, from_vector


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Begun:
    """What a stage holds of its leaves through a step: packed.

    Attributes:
      resident: leaves that are whole.
      sources: what the others are gathered from.
    """

    resident: Buffers
    sources: Buffers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Body:
    """The stages of a pipeline.

    Attributes:
      programs: of the stages.
      halves: for a schedule that splits backward, programs of each stage that give the gradient of
        its inputs alone, and of its leaves alone.
      moves: of the leaves.
      layout: of the model.
      resident, sources, gradients: how these are packed, by stage.
      forms: of the sources, by stage.
      activations, cotangents: how what travels is packed; number s is between the stages s and
        s + 1.
    """

    programs: Sequence[StageProgram]
    halves: Sequence[tuple[StageProgram, StageProgram]]
    moves: Moves
    layout: Layout
    resident: Packing
    sources: Packing
    gradients: Packing
    forms: Sequence[Sequence[Form]]
    activations: Packing
    cotangents: Packing

    @staticmethod
    def make(
        programs: Sequence[StageProgram],
        halves: Sequence[tuple[StageProgram, StageProgram]],
        moves: Moves,
        layout: Layout,
        stored: Sequence[jax.Array],
    ) -> tuple[Body, Begun]:
        """Bring the leaves to their stages.

        Args:
          programs, halves, moves, layout: as the attributes.
          stored: what this device stores of the model's leaves.

        Returns:
          The body, and what this device's stage holds.
        """
        received = moves.to_stages(stored)
        forms: list[list[Form]] = [[] for _ in programs]

        def begin(stage: int) -> tuple[list[jax.Array], list[jax.Array]]:
            program = programs[stage]
            shards = iter(moves.shards(stage, received))
            mine = [
                next(shards) if layout.leaves[p.leaf].is_split else p.cut(stored[p.leaf])
                for p in program.stage.pieces
            ]
            found, _ = program.ends.sources(mine, None, None)
            forms[stage] = [source.form for source in found]
            return program.ends.resident(mine), [source.array for source in found]

        shapes = [jax.eval_shape(lambda s=s: begin(s)) for s in range(len(programs))]
        inner = [program.outputs for program in programs[:-1]] or [()]
        body = Body(
            programs=programs,
            halves=halves,
            moves=moves,
            layout=layout,
            resident=make_packing([resident for resident, _ in shapes]),
            sources=make_packing([sources for _, sources in shapes]),
            gradients=make_packing([program.gradient_shapes for program in programs]),
            forms=forms,
            activations=make_packing(inner),
            cotangents=make_packing([[x for x in arrays if is_float(x.dtype)] for arrays in inner]),
        )

        def packed(stage: int) -> tuple[Buffers, Buffers]:
            resident, sources = begin(stage)
            return body.resident.pack(stage, resident), body.sources.pack(stage, sources)

        resident, sources = body._each(packed)
        return body, Begun(resident=resident, sources=sources)

    @property
    def last(self) -> int:
        return len(self.programs) - 1

    def zero_gradients(self) -> Buffers:
        return self.gradients.zeros()

    def zero_sums(self) -> Any:
        """Return zeros like the weighted sums of the loss and its metrics."""
        tree = self.programs[-1].tree
        names = tree.unflatten(range(tree.num_leaves))[1]
        zeros = dict.fromkeys(names, jnp.zeros((), jnp.float32))
        return jax.tree.map(jnp.zeros_like, weighted(jnp.zeros(()), zeros))

    def forward(self, begun: Begun, x: Buffers, batch: Any, key: jax.Array) -> Buffers:
        """Return what goes to the next stage. The last one runs in its backward alone."""

        def run(stage: int) -> Buffers:
            if stage == self.last:
                return self.activations.zeros()
            return self.activations.pack(stage, self._forward(stage, begun, x, batch, key))

        return self._each(run)

    def evaluate(
        self, begun: Begun, x: Buffers, batch: Any, key: jax.Array, sums: Any
    ) -> tuple[Buffers, Any]:
        """Return what goes to the next stage, and the sums with those of the last stage added."""

        def run(stage: int) -> tuple[Buffers, Any]:
            found = self._forward(stage, begun, x, batch, key)
            if stage < self.last:
                return self.activations.pack(stage, found), sums
            loss, metrics = self.programs[stage].tree.unflatten(found)
            return self.activations.zeros(), jax.tree.map(jnp.add, sums, weighted(loss, metrics))

        return self._each(run)

    def backward(
        self,
        begun: Begun,
        x: Buffers,
        g: Buffers,
        batch: Any,
        key: jax.Array,
        scale: jax.Array,
        carry: tuple[Buffers, Any],
    ) -> tuple[Buffers, tuple[Buffers, Any]]:
        """Return the gradient for the stage before, and the gradients and sums with these added; of
        a schedule that splits backward, without those of leaves."""
        grads, sums = carry

        def run(stage: int) -> tuple[Buffers, tuple[Buffers, Any]]:
            program = self.halves[stage][0] if self.halves else self.programs[stage]
            if self.halves and stage == 0 < self.last:  # no stage before it wants a gradient
                return self.cotangents.zeros(), carry
            given = self.cotangents.unpack(stage, g) if stage < self.last else []
            found, of_x, mine = program.backward(
                self._sources(stage, begun),
                self.resident.unpack(stage, begun.resident),
                self._inputs(stage, x),
                batch,
                key,
                given,
                scale,
            )
            new = grads
            if not self.halves:
                new = jax.tree.map(jnp.add, grads, self.gradients.pack(stage, found))
            dx = self.cotangents.pack(stage - 1, of_x) if stage else self.cotangents.zeros()
            return dx, (new, sums if mine is None else jax.tree.map(jnp.add, sums, mine))

        return self._each(run)

    def weight(
        self,
        begun: Begun,
        x: Buffers,
        g: Buffers,
        batch: Any,
        key: jax.Array,
        scale: jax.Array,
        carry: tuple[Buffers, Any],
    ) -> tuple[Buffers, Any]:
        """Return the gradients of leaves with these added, and the sums as they are."""
        grads, sums = carry

        def run(stage: int) -> Buffers:
            given = self.cotangents.unpack(stage, g) if stage < self.last else []
            found, _, _ = self.halves[stage][1].backward(
                self._sources(stage, begun),
                self.resident.unpack(stage, begun.resident),
                self._inputs(stage, x),
                batch,
                key,
                given,
                scale,
            )
            return jax.tree.map(jnp.add, grads, self.gradients.pack(stage, found))

        return self._each(run), sums

    def end(self, grads: Buffers) -> list[jax.Array | None]:
        """Return this device's shards of the sums, of all leaves; None of frozen ones."""
        whole = [i for i, leaf in enumerate(self.layout) if not leaf.is_split and not leaf.frozen]

        def run(stage: int) -> tuple[Buffers, list[jax.Array]]:
            program = self.programs[stage]
            found = iter(self.gradients.unpack(stage, grads))
            by_form = [
                [
                    None if program.layout.leaves[i].frozen else next(found)
                    for i in program.layout.indices(fetched=fetched)
                ]
                for fetched in (True, False)
            ]
            shards, _ = program.ends.reduce((by_form[0], by_form[1]), None, None)
            split, tiny = [], {i: jnp.zeros(self.layout.leaves[i].placement.shape) for i in whole}
            for piece, leaf, shard in zip(program.stage.pieces, program.layout, shards):
                if leaf.is_split:
                    shape = leaf.placement.part_shape(program.wiring.collectives.world)
                    split.append(jnp.zeros(shape) if shard is None else shard)
                elif shard is not None:
                    tiny[piece.leaf] = piece.add_to(tiny[piece.leaf], shard)
            return self.moves.packed(stage, split), [tiny[i] for i in whole]

        buffers, tiny = self._each(run)
        leaves = self.moves.from_stages(buffers)
        summed = from_vector(lax.psum(as_vector(tiny), PIPE), tiny) if tiny else []
        for i, x in zip(whole, summed, strict=True):
            leaves[i] = x
        return [
            None if leaf.frozen else self._shard(x, leaf)
            for x, leaf in zip(leaves, self.layout, strict=True)
        ]

    def _shard(self, x: jax.Array | None, leaf: Leaf) -> jax.Array:
        """Return a gradient; zeros for that of a leaf that no stage uses."""
        if x is not None:
            return x
        return jnp.zeros(leaf.placement.part_shape(self._world))

    @property
    def _world(self) -> int:
        return self.programs[0].wiring.collectives.world * len(self.programs)

    def _forward(
        self, stage: int, begun: Begun, x: Buffers, batch: Any, key: jax.Array
    ) -> list[jax.Array]:
        return self.programs[stage].forward(
            self._sources(stage, begun),
            self.resident.unpack(stage, begun.resident),
            self._inputs(stage, x),
            batch,
            key,
        )

    def _inputs(self, stage: int, x: Buffers) -> list[jax.Array]:
        return self.activations.unpack(stage - 1, x) if stage else []

    def _sources(self, stage: int, begun: Begun) -> list[Source]:
        arrays = self.sources.unpack(stage, begun.sources)
        return [Source(x, form) for x, form in zip(arrays, self.forms[stage], strict=True)]

    def _each(self, run: Callable[[int], Any]) -> Any:
        """Return what `run` returns of this device's stage."""
        branches = [lambda s=s: run(s) for s in range(len(self.programs))]
        return lax.switch(lax.axis_index(PIPE), branches)
