"""What the options make of a model and a mesh: wires, placements, plans, differentiators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax
from jax.sharding import Mesh, PartitionSpec

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.config.offload import PINNED
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.fetch.segments import FetchPlan
from zeroxla.frontend import Adapted
from zeroxla.frontend.staged import StagedGradients, StagedModel
from zeroxla.mesh.axes import PIPE, platform_of, world_size
from zeroxla.mesh.placement import Placement
from zeroxla.offload.choose import offloaded
from zeroxla.offload.disk.desk import Desk
from zeroxla.offload.memory_kinds import check_memory
from zeroxla.offload.update.on_host import check_host_compute
from zeroxla.program.report import Report
from zeroxla.step.gradients import Differentiator
from zeroxla.step.state import TrainState
from zeroxla.wire.bundles import ALONE_ELEMENTS
from zeroxla.wire.leaves import Layout, check_floating, make_layout, place_opt_state, place_params
from zeroxla.wire.resolve import Wiring, make_wiring
from zeroxla.wire.wire_state import WholeWireStatePlan, WireStatePlan

REPLICATED = PartitionSpec()
Placements = tuple[tuple[Placement, ...], tuple[Placement, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Setup:
    """A model, a mesh, an optimizer and options.

    Attributes:
      adapted: the model.
      mesh: with Auto axes.
      optimizer: the optax transformation.
      config: the options.
      pipeline: the model as layers; None where there are no stages.
      weights: of a pipeline, how often leaves are gathered.
      alone_elements: a shard of at least this many elements shares no buffer with others.
      desk: where programs get parameters on disk.
    """

    adapted: Adapted
    mesh: Mesh
    optimizer: optax.GradientTransformation
    config: ZeroConfig
    pipeline: StagedModel | None = None
    weights: Literal["step", "tick"] = "step"
    alone_elements: int = ALONE_ELEMENTS
    desk: Desk = dataclasses.field(default_factory=Desk, init=False)

    @property
    def wiring(self) -> Wiring:
        """What the options make of the mesh."""
        return make_wiring(self.config, self.mesh, self.desk, self.alone_elements)

    def placements(self, key: jax.Array, batch: Any) -> Placements:
        """Decide how parameters and optimizer state are stored, from shapes alone.

        Raises:
          ValueError: a leaf is not floating.
          NotImplementedError: a model in stages keeps a state between steps.
        """
        rows = jax.eval_shape(self.first_rows, batch)
        params, model_state = jax.eval_shape(self.adapted.init, key, rows)
        check_floating(params, self.config)
        whole = tuple(Placement(shape=x.shape) for x in jax.tree.leaves(params))
        differentiator = self._whole(make_layout(params, whole, self.config))
        dims = self._in_mesh(
            lambda rows, key: differentiator.layer_dims(model_state, rows, key), rows, key
        )
        stages = self._staged(make_layout(params, whole, self.config))
        stage_dims: dict[int, int] = {}
        if stages is not None:
            stage_dims = stages.stage_dims(model_state, rows, key, jax.tree.leaves(params))
        placed = place_params(params, self.mesh, dims, stage_dims)
        trainable = make_layout(params, placed, self.config).trainable(params, optax.MaskedNode())
        opt_state = jax.eval_shape(self.optimizer.init, trainable)
        in_opt = place_opt_state(opt_state, params, placed, self.mesh)
        offload = self.config.offload
        if "host" in (offload.optimizer, offload.params, offload.secondary):
            check_memory(self.mesh, PINNED)
        if offload.update == "host":
            check_host_compute(self.mesh)
        if offload.params != "none" and self.pipeline is not None:
            raise NotImplementedError(
                f"Offload(params={offload.params!r}) of a pipeline is not supported: its stages "
                "exchange leaves once a step; offload the optimizer, or use a mesh without `pipe`"
            )
        return offloaded(offload, placed, in_opt)

    def plan(self, layout: Layout, model_state: Any, batch: Any, key: jax.Array) -> FetchPlan:
        """Return the fetch plan of a training step, from shapes alone."""
        rows = jax.eval_shape(self.first_rows, batch)
        differentiator = self._whole(layout)
        return self._in_mesh(
            lambda rows, key: differentiator.plan(model_state, rows, key, train=True)[0], rows, key
        )

    def wire_state_plan(self, layout: Layout, batch: Any, key: jax.Array) -> WireStatePlan:
        """Return what makes and carries on the wire state."""
        whole = WholeWireStatePlan(layout=layout, wiring=self.wiring)
        stages = self._staged(layout)
        if whole.is_empty or stages is None:
            return whole
        rows = jax.eval_shape(self.first_rows, batch)
        return self._in_mesh(stages.wire_state_plan, rows, jax.eval_shape(lambda key: key, key))

    def partition(self, layout: Layout, batch: Any, key: jax.Array) -> Report:
        """Return how a pipeline's layers are cut, from shapes alone."""
        stages = self._staged(layout)
        assert stages is not None, "the mesh has no stages"
        return stages.partition(jax.eval_shape(self.first_rows, batch), key)

    def first_rows(self, batch: Any) -> Any:
        """Return rank 0's first micro-batch."""
        parts = world_size(self.mesh) * self.config.accumulate
        return jax.tree.map(lambda x: x[: x.shape[0] // parts], batch)

    def layout(self, state: TrainState) -> Layout:
        """Return what the configuration makes of a state's leaves."""
        return make_layout(state.params, state.placements[0], self.config)

    def _in_mesh(self, fun: Callable[..., Any], *args: Any) -> Any:
        """Call `fun` where the mesh's axes are bound, on shapes; return what it returns."""
        found: list[Any] = []
        mapped = jax.shard_map(
            lambda *args: found.append(fun(*args)),
            mesh=self.mesh,
            in_specs=REPLICATED,
            out_specs=REPLICATED,
            check_vma=False,
        )
        jax.eval_shape(mapped, *args)
        return found[0]

    def differentiator(self, layout: Layout) -> Differentiator | StagedGradients:
        """Return what computes losses and gradients, in stages where the mesh has them."""
        return self._staged(layout) or self._whole(layout)

    def _staged(self, layout: Layout) -> StagedGradients | None:
        """Return what differentiates the model in stages; None without stages."""
        if self.pipeline is None:
            return None
        whole = self._whole(layout)
        return self.pipeline.gradients(
            num_stages=self.mesh.shape[PIPE],
            layout=layout,
            wiring=whole.wiring,
            unit_elements=whole.unit_elements,
            limits=whole.limits,
            microbatches=whole.accumulate,
            weights=self.weights,
        )

    def _whole(self, layout: Layout) -> Differentiator:
        """Return what differentiates the model as one, without stages."""
        config = self.config
        on_cpu = platform_of(self.mesh) == "cpu"
        prefetch = config.prefetch_bucket
        return Differentiator(
            adapted=self.adapted,
            layout=layout,
            wiring=self.wiring,
            unit_elements=config.unit_elements,
            limits=FetchLimits(
                prefetch=0 if prefetch is None and on_cpu else prefetch,
                max_live=config.max_live_parameters,
                max_reuse=config.max_reuse_distance,
            ),
            accumulate=config.accumulate,
        )
