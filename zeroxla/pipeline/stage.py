"""A stage: what it reads of the model's leaves, what it computes, and that as a fetch plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.fetch.fetch_plan import make_plan
from zeroxla.fetch.order import tie
from zeroxla.fetch.runner import FetchRunner
from zeroxla.pipeline.stage_moves import Piece
from zeroxla.program.trace import is_float, trace
from zeroxla.step.metrics import weight_of, weighted
from zeroxla.step.once_per_step import OncePerStep
from zeroxla.wire.leaves import Layout
from zeroxla.wire.resolve import Wiring
from zeroxla.wire.routes import LeafSource


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stage:
    """What one stage computes.

    Attributes:
      pieces: of the model's leaves, in the order in which `run` takes them.
      run: (leaves, x, batch, key) -> the arrays for the next stage, or of the last one (loss,
        metrics). `x` is what the stage before returned, None on the first.
      is_first, is_last: whether it reads the batch instead of `x`, and returns the loss.
    """

    pieces: tuple[Piece, ...]
    run: Callable[..., Any]
    is_first: bool
    is_last: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageProgram:
    """A stage as a fetch plan over the devices that share it; inside `shard_map`.

    Attributes:
      stage: what it computes.
      layout: its leaves.
      wiring: how they travel between the stage's devices.
      runner: of the plan.
      inputs: shapes of the arrays that come from the stage before.
      outputs: of those that go to the next one; () on the last.
      tree: structure of these, or of (loss, metrics).
      of_leaves, of_inputs: what its backward gives: the gradients of its leaves, of its inputs.
    """

    stage: Stage
    layout: Layout
    wiring: Wiring
    runner: FetchRunner
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    tree: Any
    of_leaves: bool = True
    of_inputs: bool = True

    @staticmethod
    def make(
        stage: Stage,
        layout: Layout,
        x: Any,
        batch: Any,
        key: jax.Array,
        *,
        wiring: Wiring,
        unit_elements: int | None,
        limits: FetchLimits,
        of_leaves: bool = True,
        of_inputs: bool = True,
    ) -> tuple[StageProgram, Any]:
        """Trace a stage and plan its gathers.

        Args:
          stage: what it computes.
          layout: its leaves, as the stage's devices store them.
          x: shapes of what comes from the stage before; None on the first.
          batch, key: of a micro-batch on one device.
          wiring, unit_elements, limits: as for a whole model.
          of_leaves, of_inputs: see the attributes.

        Returns:
          The program, and the shapes of what it returns.
        """
        leaves, dtype = layout.leaves, wiring.collectives.compute_dtype
        shapes = [jax.ShapeDtypeStruct(leaf.placement.shape, dtype) for leaf in leaves]
        program, tree = trace(stage.run, shapes, x, batch, key)
        result = jax.eval_shape(stage.run, shapes, x, batch, key)
        fetched = layout.indices(fetched=True)
        arrays = tuple(jax.tree.leaves(x))
        of_x = program.inputs[len(leaves) : len(leaves) + len(arrays)]
        trained = [v for v, leaf in zip(program.inputs, leaves, strict=False) if not leaf.frozen]
        plan = make_plan(
            program,
            [program.inputs[i] for i in fetched],
            [*(trained if of_leaves else ()), *(v for v in of_x if of_inputs and v.is_float)],
            unit_elements=unit_elements,
            split_dims={program.inputs[i]: leaves[i].placement.dim for i in fetched},
            gradient_of=program.outputs[:1] if stage.is_last else program.outputs,
        )
        routes = {v: wiring.route(leaves[i]) for v, i in zip(plan.leaves, fetched, strict=True)}
        made = StageProgram(
            stage=stage,
            layout=layout,
            wiring=wiring,
            runner=FetchRunner(plan, wiring.collectives, routes, limits),
            inputs=arrays,
            outputs=() if stage.is_last else tuple(jax.tree.leaves(result)),
            tree=tree,
            of_leaves=of_leaves,
            of_inputs=of_inputs,
        )
        return made, result

    @property
    def ends(self) -> OncePerStep:
        return OncePerStep(layout=self.layout, wiring=self.wiring)

    @property
    def gradient_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of what `backward` returns of leaves: fetched ones first, frozen ones left out."""
        reduces = self.wiring.collectives.reduces
        shapes = [
            reduces.result_shape(leaf.placement) if fetched else leaf.placement.shape
            for fetched in (True, False)
            for leaf in (self.layout.leaves[i] for i in self.layout.indices(fetched=fetched))
            if not leaf.frozen and self.of_leaves
        ]
        return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def forward(
        self,
        sources: Sequence[LeafSource],
        resident: Sequence[jax.Array],
        x: Sequence[jax.Array],
        batch: Any,
        key: jax.Array,
    ) -> list[jax.Array]:
        """Return what goes to the next stage, or of the last one the loss and metrics."""
        runner = self.runner
        held = dict(zip(runner.plan.leaves, sources, strict=True))
        inputs = self._inputs(resident, x, batch, key)
        with jax.named_scope("forward"):
            return runner.forward(held, inputs, record=False, keep=False, key=self.wiring.key(key))[
                0
            ]

    def backward(
        self,
        sources: Sequence[LeafSource],
        resident: Sequence[jax.Array],
        x: Sequence[jax.Array],
        batch: Any,
        key: jax.Array,
        cotangents: Sequence[jax.Array],
        scale: jax.Array,
    ) -> tuple[list[jax.Array], list[jax.Array], Any]:
        """Run the stage again, keeping what its backward needs, and then that.

        Args:
          sources, resident, x, batch, key: as in `forward`.
          cotangents: of the floating outputs; none on the last stage.
          scale: the loss scale.

        Returns:
          The gradients of `gradient_shapes`, those of the floating inputs, and of the last stage
          the weighted sums of loss and metrics.
        """
        runner, firmly = self.runner, self.wiring.collectives.firm_ties
        held = dict(zip(runner.plan.leaves, sources, strict=True))
        inputs, wire_key = self._inputs(resident, x, batch, key), self.wiring.key(key)
        with jax.named_scope("forward"):
            outputs, tape = runner.forward(held, inputs, record=True, key=wire_key)
        sums = None
        if self.stage.is_last:
            loss, metrics = self.tree.unflatten(outputs)
            seed = (scale * weight_of(metrics)).astype(loss.dtype)
            (seed,), (loss,) = tie([seed], [loss], firmly=firmly)
            seeds: list[jax.Array | None] = [seed, *(None for _ in outputs[1:])]
            sums = weighted(loss, metrics)
        else:
            given = iter(tie(cotangents, outputs, firmly=firmly)[0])
            seeds = [next(given) if is_float(y.dtype) else None for y in self.outputs]
        with jax.named_scope("backward"):
            known = dict(zip(runner.plan.inputs, inputs, strict=True))
            reduced, whole = runner.backward(held, known, tape, seeds, key=wire_key)
        grads = [
            reduced.get(v)
            for v, i in zip(runner.plan.leaves, self.layout.indices(fetched=True), strict=True)
            if not self.layout.leaves[i].frozen and self.of_leaves
        ]
        grads += [
            ct
            for ct, i in zip(whole, self.layout.indices(fetched=False), strict=False)
            if not self.layout.leaves[i].frozen and self.of_leaves
        ]
        filled = [
            jnp.zeros(s.shape, s.dtype) if g is None else g.astype(s.dtype)
            for g, s in zip(grads, self.gradient_shapes, strict=True)
        ]
        start = len(resident)
        of_x = [
            jnp.zeros(s.shape, s.dtype) if ct is None else ct
            for ct, s in zip(whole[start : start + len(self.inputs)], self.inputs, strict=True)
            if is_float(s.dtype)
        ]
        return filled, of_x, sums

    def _inputs(
        self, resident: Sequence[jax.Array], x: Sequence[jax.Array], batch: Any, key: jax.Array
    ) -> list[jax.Array]:
        return [*resident, *x, *jax.tree.leaves(batch), key]
