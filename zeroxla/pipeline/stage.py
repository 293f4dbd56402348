"""One stage of a pipeline: a function of pieces of the model's leaves, and its fetch plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.fetch.runner import FetchRunner
from zeroxla.fetch.ties import tie
from zeroxla.pipeline.leaf_piece import LeafPiece
from zeroxla.program.trace import Operand, Program, Value, closure, is_float, trace
from zeroxla.step.gradients import seed_of_backward
from zeroxla.step.loss_plan import leaf_shapes, make_runner, plan_gathers, trained_inputs
from zeroxla.step.metrics import counts, weighted
from zeroxla.wire.leaves import Layout
from zeroxla.wire.resolve import Wiring
from zeroxla.wire.routes import LeafSource


@dataclasses.dataclass(frozen=True, slots=True)
class StateShare:
    """A part of the model state whose new value a stage computes.

    Attributes:
      leaf: the number of the leaf of the state.
      rows: the first row of the leaf, along dim 0, and the one after the last; None for all of it.
    """

    leaf: int
    rows: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stage:
    """One stage as a function.

    Attributes:
      pieces: the pieces of the model's leaves that the stage uses, in the order that `run` takes.
      run: (leaves, x, batch, key, state) -> (y, state). `x` is the `y` of the stage before. The
        first stage is given None and reads the batch. The last stage's `y` is (loss, metrics).
        `state` is a list of all leaves of the model state.
      is_first, is_last: whether this is the first stage, and whether it is the last.
      keeps: the parts of the model state that it may change.
    """

    pieces: tuple[LeafPiece, ...]
    run: Callable[..., Any]
    is_first: bool
    is_last: bool
    keeps: tuple[StateShare, ...] = ()


class StageResults(NamedTuple):
    """What a forward and backward of a stage give.

    Attributes:
      outputs: the arrays for the next stage; of the last stage the loss and metrics.
      of_leaves: the gradients of the leaves, with `gradient_shapes`.
      of_inputs: the gradients of the floating inputs.
      sums: of the last stage the weighted sums of loss and metrics, None of the others.
      state: the new model state.
    """

    outputs: list[jax.Array]
    of_leaves: list[jax.Array]
    of_inputs: list[jax.Array]
    sums: Any
    state: list[jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageProgram:
    """Runs a stage by a fetch plan over the stage's devices; inside `shard_map`.

    Attributes:
      stage: the stage.
      layout: the stage's leaves, as its devices store them.
      wiring: how leaves travel between the stage's devices.
      runner: runs the fetch plan.
      inputs: the shapes of the arrays from the stage before.
      outputs: the shapes of the arrays for the next stage; () on the last stage.
      tree: the tree structure of the stage's result; on the last stage, of (loss, metrics).
      keeps: the parts of the model state that it changes.
      reads_state: whether its result depends on the model state.
    """

    stage: Stage
    layout: Layout
    wiring: Wiring
    runner: FetchRunner
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    tree: Any
    keeps: tuple[StateShare, ...]
    reads_state: bool

    @staticmethod
    def make(
        stage: Stage,
        layout: Layout,
        x: Any,
        batch: Any,
        key: jax.Array,
        state: Sequence[jax.ShapeDtypeStruct],
        *,
        wiring: Wiring,
        unit_elements: int | None,
        limits: FetchLimits,
    ) -> tuple[StageProgram, Any]:
        """Trace a stage and plan its gathers.

        Args:
          stage, layout, wiring: as the attributes.
          x: the shapes of the arrays from the stage before; None on the first stage.
          batch, key: the shapes of one device's micro-batch and of its key.
          state: the shapes of the leaves of the model state.
          unit_elements, limits: as for a model without stages.

        Returns:
          The program, and the shapes of its result.
        """
        leaves = layout.leaves
        shapes = leaf_shapes(layout, wiring.collectives.compute_dtype)
        program, _ = trace(stage.run, shapes, x, batch, key, state)
        result, _ = jax.eval_shape(stage.run, shapes, x, batch, key, state)
        num_outputs = len(program.outputs) - len(state)
        in_state = program.inputs[len(program.inputs) - len(state) :]
        new_state = program.outputs[num_outputs:]
        arrays = tuple(jax.tree.leaves(x))
        of_x = program.inputs[len(leaves) : len(leaves) + len(arrays)]
        trained = trained_inputs(program, layout)
        plan = plan_gathers(
            program,
            layout,
            [*trained, *(v for v in of_x if v.is_float)],
            unit_elements=unit_elements,
            gradient_of=program.outputs[: 1 if stage.is_last else num_outputs],
        )
        made = StageProgram(
            stage=stage,
            layout=layout,
            wiring=wiring,
            runner=make_runner(plan, layout, _in_a_branch(wiring), limits),
            inputs=arrays,
            outputs=() if stage.is_last else tuple(jax.tree.leaves(result)),
            tree=jax.tree.structure(result),
            keeps=tuple(x for x in stage.keeps if new_state[x.leaf] is not in_state[x.leaf]),
            reads_state=_depends(program, program.outputs[:num_outputs], in_state),
        )
        return made, result

    @property
    def gradient_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the leaves' gradients; see the function."""
        return gradient_shapes(self.layout, self.wiring)

    def forward(
        self,
        sources: Sequence[LeafSource],
        resident: Sequence[jax.Array],
        x: Sequence[jax.Array],
        batch: Any,
        key: jax.Array,
        state: Sequence[jax.Array],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the arrays for the next stage, on the last stage the loss and metrics; and the new
        model state.

        Args:
          sources: the arrays that fetched leaves are gathered from.
          resident: the leaves that are whole.
          x: the arrays from the stage before; empty on the first stage.
          batch, key: this device's micro-batch and its key.
          state: the leaves of the model state.
        """
        runner = self.runner
        held = dict(zip(runner.plan.leaves, sources, strict=True))
        inputs = self._inputs(resident, x, batch, key, state)
        with jax.named_scope("forward"):
            wire_key = self.wiring.key(key)
            found, _ = runner.forward(held, inputs, record=False, keep=False, key=wire_key)
        return self._split(found)

    def backward(
        self,
        sources: Sequence[LeafSource],
        resident: Sequence[jax.Array],
        x: Sequence[jax.Array],
        batch: Any,
        key: jax.Array,
        state: Sequence[jax.Array],
        cotangents: Sequence[jax.Array],
        scale: jax.Array,
    ) -> StageResults:
        """Run the stage forward, keeping residuals, and then backward.

        Args:
          sources, resident, x, batch, key, state: as in `forward`.
          cotangents: the gradients of the floating outputs; empty on the last stage.
          scale: the loss scale.
        """
        runner, by_data = self.runner, self.wiring.collectives.ties_by_data
        held = dict(zip(runner.plan.leaves, sources, strict=True))
        inputs, wire_key = self._inputs(resident, x, batch, key, state), self.wiring.key(key)
        with jax.named_scope("forward"):
            found, tape = runner.forward(held, inputs, record=True, key=wire_key)
        outputs, new_state = self._split(found)
        sums = counted = None
        if self.stage.is_last:
            loss, metrics = self.tree.unflatten(outputs)
            seed, loss = seed_of_backward(loss, metrics, scale, by_data=by_data)
            seeds: list[jax.Array | None] = [seed, *(None for _ in outputs[1:])]
            sums, counted = weighted(loss, metrics), counts(metrics)
        else:
            given = iter(tie(cotangents, outputs, by_data=by_data)[0])
            seeds = [next(given) if is_float(y.dtype) else None for y in self.outputs]
        with jax.named_scope("backward"):
            known = dict(zip(runner.plan.inputs, inputs, strict=True))
            seeds += [None] * len(new_state)
            reduced, whole = runner.backward(held, known, tape, seeds, key=wire_key, counts=counted)
        end = len(resident)
        of_leaves = self._of_leaves([reduced.get(v) for v in runner.plan.leaves], whole[:end])
        of_inputs = self._of_inputs(whole[end : end + len(self.inputs)])
        return StageResults(outputs, of_leaves, of_inputs, sums, new_state)

    def _split(self, found: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Split what the program returns into the stage's result and the model state."""
        num_outputs = self.tree.num_leaves
        return list(found[:num_outputs]), list(found[num_outputs:])

    def _of_leaves(
        self, fetched: Sequence[jax.Array | None], resident: Sequence[jax.Array | None]
    ) -> list[jax.Array]:
        """Return the gradients of `gradient_shapes`; zeros for leaves that have none."""
        found = [
            g
            for is_fetched, mine in ((True, fetched), (False, resident))
            for g, i in zip(mine, self.layout.indices(fetched=is_fetched), strict=True)
            if not self.layout.leaves[i].frozen
        ]
        return [
            jnp.zeros(s.shape, s.dtype) if g is None else g.astype(s.dtype)
            for g, s in zip(found, self.gradient_shapes, strict=True)
        ]

    def _of_inputs(self, found: Sequence[jax.Array | None]) -> list[jax.Array]:
        """Return the gradients of the floating inputs; zeros for inputs that have none."""
        return [
            jnp.zeros(s.shape, s.dtype) if g is None else g
            for g, s in zip(found, self.inputs, strict=True)
            if is_float(s.dtype)
        ]

    def _inputs(
        self,
        resident: Sequence[jax.Array],
        x: Sequence[jax.Array],
        batch: Any,
        key: jax.Array,
        state: Sequence[jax.Array],
    ) -> list[jax.Array]:
        return [*resident, *x, *jax.tree.leaves(batch), key, *state]


def gradient_shapes(layout: Layout, wiring: Wiring) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of leaves' gradients before they are reduced over a rank's devices: fetched
    leaves first, frozen leaves left out."""
    reduces = wiring.collectives.reduces
    shapes = [
        reduces.result_shape(leaf.placement) if fetched else leaf.placement.shape
        for fetched in (True, False)
        for leaf in (layout.leaves[i] for i in layout.indices(fetched=fetched))
        if not leaf.frozen
    ]
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def _depends(program: Program, outputs: Sequence[Operand], inputs: Sequence[Value]) -> bool:
    """Return whether outputs of a program depend on some of its inputs."""
    producers = {v: eq for eq in program.equations for v in eq.outputs}
    values = [a for a in outputs if isinstance(a, Value)]
    return not set(inputs).isdisjoint(closure(values, producers)[1])


def _in_a_branch(wiring: Wiring) -> Wiring:
    """Return the wiring of a stage, whose program is one branch of a step's.

    XLA runs the exchanges of a branch beside nothing, so none waits for a loop's next turn.
    """
    collectives = dataclasses.replace(wiring.collectives, exchanges_across_turns=False)
    return dataclasses.replace(wiring, collectives=collectives)
