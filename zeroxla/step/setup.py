"""`Setup`: resolves the options for a model and a mesh into placements and plans."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.config.offload import PINNED
from zeroxla.config.undecided import AUTO
from zeroxla.fetch.segments import FetchPlan
from zeroxla.frontend.rewrite.report import RewriteReport
from zeroxla.frontend.rewrite.rewritten_loss import rewrites_of
from zeroxla.frontend.staged import StagedDifferentiator, StagesReport
from zeroxla.mesh.axes import PIPE, platform_of
from zeroxla.mesh.placement import Placement
from zeroxla.offload.choose import offloaded
from zeroxla.offload.memory_kinds import check_memory
from zeroxla.offload.update.on_host import check_host_compute
from zeroxla.program.compat import compiler_options
from zeroxla.program.shapes import shapes_of
from zeroxla.step.axes.deals import Deals
from zeroxla.step.axes.differentiator import AxesDifferentiator
from zeroxla.step.axes.parts_wire_state import PartsWireStatePlan
from zeroxla.step.gradients import Differentiator
from zeroxla.step.loss_plan import LossPlanner
from zeroxla.step.model_on_mesh import ModelOnMesh
from zeroxla.step.notices import narrowed, warn
from zeroxla.step.state_checks import check_state_of_stages, check_trainable
from zeroxla.wire.leaves import Layout, check_floating, place_opt_state, place_params
from zeroxla.wire.wire_state import WholeWireStatePlan, WireStatePlan

Placements = tuple[tuple[Placement, ...], tuple[Placement, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Setup(ModelOnMesh):
    """A model, a mesh, an optimizer and options, resolved into placements and plans."""

    @property
    def rewrites(self) -> RewriteReport | None:
        """What was rewritten for the newest shapes; None without the option."""
        return rewrites_of(self.losses)

    @property
    def first_loss_scale(self) -> float | None:
        """The loss scale of the first step; None if losses are not scaled."""
        return self.config.init_loss_scale if self.config.compute_dtype == "float16" else None

    @property
    def prefetch_bucket(self) -> int | None:
        """The most elements that are gathered ahead; None gathers the next unit."""
        ahead = self.config.prefetch_bucket
        return 0 if ahead is None and platform_of(self.mesh) == "cpu" else ahead

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The compiler's options for a program with gradients."""
        ahead = self.config.prefetch_bucket != 0
        return compiler_options(platform_of(self.mesh), prefetch=ahead)

    def placements(self, key: jax.Array, batch: Any) -> Placements:
        """Decide how parameters and optimizer state are stored, from shapes alone.

        Raises:
          ValueError: a leaf is not floating, or nothing would train.
          NotImplementedError: the model's state cannot be kept in stages.
        """
        rows = jax.eval_shape(self.first_rows, batch)
        params, model_state = jax.eval_shape(self.adapted.init, key, rows)
        check_floating(params, self.config)
        check_trainable(params, self.config)
        warn(narrowed(params), stacklevel=6)
        whole = tuple(Placement(shape=x.shape) for x in jax.tree.leaves(params))
        layout = self.layout_of(params, whole)
        planner = self._planner(layout, whole=True)
        dims = self.in_mesh(planner.layer_dims, model_state, rows, key)
        parts = None
        if self.axes is not None:
            decide = functools.partial(
                self.axes.parts, layout, rows_apart=self.rows_apart(train=True)
            )
            parts = self.in_mesh(decide, model_state, rows, key)
            split = zip(whole, parts, strict=True)
            whole = tuple(dataclasses.replace(p, parts=own) for p, own in split)
        in_parts = self.layout_of(params, whole)
        stages = self._staged(in_parts)
        stage_dims: dict[int, int] = {}
        if stages is not None:
            check_state_of_stages(model_state, planner.overwritten(model_state))
            leaves = [jax.ShapeDtypeStruct(p.of_part.shape, jnp.float32) for p in whole]
            find = functools.partial(stages.stage_dims, leaves=leaves)
            find = find if self.axes is None else functools.partial(self.in_mesh, find)
            stage_dims = find(model_state, self.rows(in_parts, model_state, batch, key), key)
        placed = place_params(params, self.mesh, dims, stage_dims, parts)
        trainable = layout.trainable(params, optax.MaskedNode())
        opt_state = jax.eval_shape(self.optimizer.init, trainable)
        in_opt = place_opt_state(opt_state, params, placed, self.mesh)
        self.check_offload()
        return offloaded(self.config.offload, placed, in_opt)

    def check_offload(self) -> None:
        """Check that the mesh and the model allow the options of `Offload`.

        Raises:
          ValueError: the devices cannot reach their host's memory, or it cannot compute.
          NotImplementedError: the parameters of a pipeline are on disk.
        """
        offload = self.config.offload
        if "host" in (offload.optimizer, offload.params, offload.secondary):
            check_memory(self.mesh, PINNED)
        if offload.update == "host":
            check_host_compute(self.mesh)
        if self.config.memory is not None and self.pipeline is not None:
            raise NotImplementedError(
                f"memory={self.config.memory!r} of a pipeline is not supported: its stages keep "
                "what their schedule says; use Pipeline(stash=) or remat in the model, or a mesh "
                "without `pipe`"
            )
        if self.asked.accumulate == AUTO and self.axes is not None:
            raise NotImplementedError(
                "accumulate='auto' with axes that split the work on one row is not supported: how "
                "a batch is placed depends on the number of micro-batches; give it as a number"
            )
        if offload.activations == "host":
            check_memory(self.mesh, PINNED)
        if offload.params == "disk" and self.pipeline is not None:
            raise NotImplementedError(
                "Offload(params='disk') of a pipeline is not supported: its stages exchange leaves "
                "once a step, all at once; use params='host', or a mesh without `pipe`"
            )

    def plan(self, layout: Layout, model_state: Any, batch: Any, key: jax.Array) -> FetchPlan:
        """Return the fetch plan of a training step, from shapes alone."""
        rows = self.rows(layout, model_state, batch, key)
        plan = functools.partial(self._planner(layout).plan, train=True)
        return self.in_mesh(plan, model_state, rows, key)[0]

    def wire_state_plan(
        self, layout: Layout, model_state: Any, batch: Any, key: jax.Array
    ) -> WireStatePlan:
        """Return the plan that makes the wire state and refreshes it."""
        of_parts = layout if self.axes is None else self.axes.of_parts(layout)[0]
        found: WireStatePlan = WholeWireStatePlan(layout=of_parts, wiring=self.wiring)
        stages = self._staged(layout)
        if not found.is_empty and stages is not None:
            shapes = self._stage_shapes(layout, model_state, batch, key)
            found = self.in_mesh(stages.wire_state_plan, *shapes)
        if self.axes is None:
            return found
        return PartsWireStatePlan(of_parts=found, deals=Deals(layout.placements, self.desk))

    def stage_layouts(
        self, layout: Layout, model_state: Any, batch: Any, key: jax.Array
    ) -> Sequence[Layout]:
        """Return the layout of each rank's leaves, from shapes alone; [layout] without stages."""
        stages = self._staged(layout)
        if stages is None:
            return [layout]
        shapes = self._stage_shapes(layout, model_state, batch, key)
        return self.in_mesh(stages.stage_layouts, *shapes)

    def describe_stages(
        self, layout: Layout, model_state: Any, batch: Any, key: jax.Array, at_rest: Sequence[str]
    ) -> StagesReport:
        """Return how a pipeline's layers are cut, from shapes alone; see `StagedDifferentiator`."""
        stages = self._staged(layout)
        assert stages is not None, "the mesh has no stages"
        describe = functools.partial(stages.describe, at_rest=at_rest)
        found = self.in_mesh(describe, *self._stage_shapes(layout, model_state, batch, key))
        axes = () if self.axes is None else self.axes.newest.reports()
        return found.beside(axes, self.rewrites)

    def _stage_shapes(
        self, layout: Layout, model_state: Any, batch: Any, key: jax.Array
    ) -> tuple[Any, Any, Any]:
        """Return the shapes of the model state, of one device's micro-batch and of a key."""
        rows = self.rows(layout, model_state, batch, key)
        return shapes_of(model_state), rows, jax.eval_shape(lambda key: key, key)

    def differentiator(
        self, layout: Layout
    ) -> Differentiator | StagedDifferentiator | AxesDifferentiator:
        """Return the object that computes losses and gradients, in stages if the mesh has them."""
        staged = self._staged(layout)
        inner = staged or Differentiator(
            planner=self._planner(layout), accumulate=self.config.num_micro_batches
        )
        if self.axes is None:
            return inner
        return AxesDifferentiator(inner=inner, deals=Deals(layout.placements, self.desk))

    def _staged(self, layout: Layout) -> StagedDifferentiator | None:
        """Return the object that differentiates the model in stages; None without stages."""
        if self.pipeline is None:
            return None
        planner, losses = self._planner(layout), self.losses if self.config.rewrite else None
        if self.axes is not None:
            layout, losses = self.axes.of_parts(layout)
        return self.pipeline.differentiator(
            num_ranks=self.mesh.shape[PIPE],
            layout=layout,
            wiring=self.wiring,
            unit_elements=planner.unit_elements,
            limits=planner.limits,
            microbatches=self.config.num_micro_batches,
            weights=self.weights,
            losses=losses,
        )

    def _planner(self, layout: Layout, *, whole: bool = False) -> LossPlanner:
        """Return the planner of the whole model, without stages.

        Args:
          layout: the leaves.
          whole: whether to plan as if no axis split the work on one row.
        """
        config, losses = self.config, self.losses
        if self.axes is not None and not whole:
            layout, losses = self.axes.of_parts(layout)
        return LossPlanner(
            losses=losses,
            layout=layout,
            wiring=self.wiring,
            unit_elements=config.unit_elements,
            limits=FetchLimits(
                prefetch=self.prefetch_bucket,
                max_live=config.max_live_parameters or 0,
                max_reuse=config.max_reuse_distance or 0,
            ),
            is_overwritten=self.adapted.overwritten,
            activations=self.activations,
        )
