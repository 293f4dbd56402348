"""A model's loss, traced, as a fetch plan and the runner that follows it.

Come here when you look for the place where a step traces the model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.config.rewrite import Rewrite
from zeroxla.fetch.fetch_plan import has_closed_remat, make_plan
from zeroxla.fetch.keeping.budget import ActivationBudget
from zeroxla.fetch.keeping.choose import Keeping
from zeroxla.fetch.keeping.keep_everything import KeepEverything
from zeroxla.fetch.runner import FetchRunner
from zeroxla.fetch.segments import FetchPlan, layer_dims
from zeroxla.frontend import Adapted
from zeroxla.frontend.rewrite.rewritten_loss import rewritten
from zeroxla.frontend.rewrite.runs_on import RunsOn
from zeroxla.mesh.axes import platform_of, split_axes
from zeroxla.program.paths import Path, paths_of
from zeroxla.program.rules import check_rules
from zeroxla.program.trace import Operand, Program, Value, trace
from zeroxla.step.memory.without_remat import without_remat
from zeroxla.step.metrics import check_metrics
from zeroxla.wire.leaves import Layout
from zeroxla.wire.resolve import Wiring

Losses = Mapping[bool, Callable[..., Any]]
"""By `train`: the function (params, model_state, batch, key) -> (loss, metrics, model_state)."""


def make_losses(
    adapted: Adapted,
    dtype: jnp.dtype,
    rewrite: Rewrite | bool | None,
    mesh: Mesh,
    *,
    keep_remat: bool = True,
) -> Losses:
    """Make a model's losses for training and for evaluation.

    JAX keeps the trace of a function as long as the function lives. So keep the returned functions:
    a loss is then traced once for each shape of its arguments, however often it is planned.

    Args:
      adapted: the model.
      dtype: the dtype to which floating arrays of a batch are cast.
      rewrite: what is rewritten in their traces.
      mesh: the mesh on which they run.
      keep_remat: whether `jax.checkpoint` in the model stays.
    """
    own: Losses = {
        train: functools.partial(_loss, adapted, dtype, train) for train in (True, False)
    }
    if not keep_remat:
        own = {train: without_remat(loss) for train, loss in own.items()}
    runs_on = RunsOn(cpus=platform_of(mesh) == "cpu", split_axes=bool(split_axes(mesh)))
    return rewritten(own, rewrite, runs_on)


def _loss(
    adapted: Adapted,
    dtype: jnp.dtype,
    train: bool,
    params: Any,
    model_state: Any,
    batch: Any,
    key: jax.Array,
) -> Any:
    return adapted.loss(params, model_state, cast_floats(batch, dtype), key, train=train)


def cast_floats(tree: Any, dtype: jnp.dtype) -> Any:
    """Cast the floating arrays of a pytree. Complex ones stay as they are."""

    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


def leaf_shapes(layout: Layout, dtype: jnp.dtype) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of leaves as a model computes with them: in `dtype`, wires as bytes."""
    return [
        jax.ShapeDtypeStruct(leaf.placement.shape, jnp.uint8 if leaf.is_wire else dtype)
        for leaf in layout
    ]


def plan_gathers(
    program: Program,
    layout: Layout,
    active: Iterable[Value],
    *,
    unit_elements: int | None,
    gradient_of: Sequence[Operand],
    opens_remat: bool = False,
) -> FetchPlan:
    """Plan a program whose first inputs are the leaves of a layout.

    Args:
      program: a traced loss, or a stage of a pipeline.
      layout: the leaves. The plan gathers those that are fetched.
      active: the inputs that get a gradient.
      unit_elements: see `ZeroConfig`.
      gradient_of: the outputs that are differentiated.
      opens_remat: see `make_plan`.

    Raises:
      ValueError: as `check_rules`.
    """
    check_rules(program.equations)
    fetched = layout.indices(fetched=True)
    return make_plan(
        program,
        [program.inputs[i] for i in fetched],
        active,
        unit_elements=unit_elements,
        split_dims={program.inputs[i]: layout.leaves[i].placement.dim for i in fetched},
        gradient_of=gradient_of,
        opens_remat=opens_remat,
    )


def trained_inputs(program: Program, layout: Layout) -> list[Value]:
    """Return the inputs of a program that are leaves of the layout and not frozen."""
    return [v for v, leaf in zip(program.inputs, layout, strict=False) if not leaf.frozen]


def make_runner(
    plan: FetchPlan,
    layout: Layout,
    wiring: Wiring,
    limits: FetchLimits,
    keeping: Keeping | KeepEverything | None = None,
) -> FetchRunner:
    """Make the runner of a plan from `plan_gathers`."""
    fetched = [layout.leaves[i] for i in layout.indices(fetched=True)]
    routes = {v: wiring.route(leaf) for v, leaf in zip(plan.leaves, fetched, strict=True)}
    return FetchRunner(plan, wiring.collectives, routes, limits, keeping=keeping)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TracedLoss:
    """A loss as a plan, for one batch shape and one value of `train`.

    Attributes:
      runner: runs the plan. The plan's leaves are the layout's fetched leaves, in order.
      result: the tree structure of (loss, metrics, model_state).
      overwritten: the leaves of the model state whose gradient is their new value, by number.
    """

    runner: FetchRunner
    result: Any
    overwritten: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossPlanner:
    """Traces a model's loss on one device's micro-batch, and plans its gathers.

    Call its methods inside `shard_map`, as a loss may name mesh axes. Of `model_state`, `batch` and
    `key` they read the shapes and dtypes alone.

    Attributes:
      losses: the functions to trace.
      layout: the model's leaves.
      wiring: how the leaves travel.
      unit_elements: see `ZeroConfig`.
      limits: how far gathers run ahead, and how many gathered leaves are kept.
      is_overwritten: says by its path whether a leaf of the model state is overwritten with its
        gradient.
      activations: the bytes that activations may take; None keeps all that backward reads.
    """

    losses: Losses
    layout: Layout
    wiring: Wiring
    unit_elements: int | None
    limits: FetchLimits
    is_overwritten: Callable[[Path], bool]
    activations: ActivationBudget | None = None

    def overwritten(self, model_state: Any) -> tuple[int, ...]:
        """Return the leaves of a model state that are overwritten with their gradient, by
        number."""
        paths = [path for path, _ in paths_of(model_state)]
        return tuple(i for i, path in enumerate(paths) if self.is_overwritten(path))

    def trace(self, model_state: Any, batch: Any, key: jax.Array, *, train: bool) -> TracedLoss:
        """Trace the loss and make the runner of its fetch plan."""
        plan, result = self.plan(model_state, batch, key, train=train)
        keeping, limits = None, self.limits
        if self.activations is not None and train:
            opened = None
            if self.activations.limit is not None and has_closed_remat(plan):
                opened, result = self.plan(model_state, batch, key, train=train, opens_remat=True)
            plan, keeping = self.activations.choose(plan, opened)
            limits = limits.holding(self.activations.reused_elements)
        runner = make_runner(plan, self.layout, self.wiring, limits, keeping)
        overwritten = self.overwritten(model_state)
        return TracedLoss(runner=runner, result=result, overwritten=overwritten)

    def plan(
        self,
        model_state: Any,
        batch: Any,
        key: jax.Array,
        *,
        train: bool,
        opens_remat: bool = False,
    ) -> tuple[FetchPlan, Any]:
        """Return the fetch plan of the loss, and the tree structure of the loss's result.

        Args:
          model_state, batch, key, train: the loss's arguments.
          opens_remat: see `make_plan`.

        Raises:
          ValueError: the loss gives its metrics names that the step uses.
        """
        program, result = self._program(model_state, batch, key, train=train)
        in_state = program.inputs[len(self.layout.leaves) :]
        overwritten = [in_state[i] for i in self.overwritten(model_state)]
        plan = plan_gathers(
            program,
            self.layout,
            [*trained_inputs(program, self.layout), *overwritten],
            unit_elements=self.unit_elements,
            gradient_of=program.outputs[:1],
            opens_remat=opens_remat,
        )
        check_metrics(result)
        return plan, result

    def layer_dims(self, model_state: Any, batch: Any, key: jax.Array) -> list[tuple[int, ...]]:
        """Return the dims along which the model's loops slice each leaf."""
        program, _ = self._program(model_state, batch, key, train=True)
        leaves = program.inputs[: len(self.layout.leaves)]
        plan = make_plan(program, leaves, (), unit_elements=None, split_dims=dict.fromkeys(leaves))
        dims = layer_dims(plan)
        return [tuple(sorted(dims.get(v, ()))) for v in leaves]

    def _program(
        self, model_state: Any, batch: Any, key: jax.Array, *, train: bool
    ) -> tuple[Program, Any]:
        shapes = leaf_shapes(self.layout, self.wiring.collectives.compute_dtype)
        params = self.layout.tree.unflatten(shapes)
        return trace(self.losses[train], params, model_state, batch, key)
