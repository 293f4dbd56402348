"""`CheckedModel`: a small model with its batch, on a mesh and on one device, for all checks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.axes import PIPE, world_size
from zeroxla.mesh.make_mesh import make_mesh
from zeroxla.program.compat import mesh_context
from zeroxla.program.trace import Program, trace
from zeroxla.step.loss_plan import Losses, make_losses
from zeroxla.step.make import make_step
from zeroxla.step.state import TrainState, natural
from zeroxla.step.step import Step
from zeroxla.wire.leaves import Layout

KEY = 0
"""The seed of the model's first weights and of its random streams."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CheckedModel:
    """A model and a batch. What several checks need is made once.

    Attributes:
      step: the step of the model in float32, without quantized wires and persistent leaves, and in
        units no larger than a leaf, so that small leaves travel as large ones do.
      config: the options that the user trains with.
      batch: the global batch, on the host or on a device.
    """

    step: Step
    config: ZeroConfig
    batch: Any

    @property
    def mesh(self) -> Mesh:
        """The mesh of the step."""
        return self.step.mesh

    @functools.cached_property
    def one_device(self) -> Mesh:
        """A mesh of the first device alone, on which a model may name the same axes."""
        return make_mesh(nodes=1, devices_per_node=1, devices=[self.mesh.devices.flat[0]])

    @functools.cached_property
    def state(self) -> TrainState:
        """The state before the first step, on the mesh. It must not be donated."""
        return self.step.init(jax.random.key(KEY), self.batch)

    @functools.cached_property
    def params(self) -> Any:
        """The first weights, whole, in natural shapes, on the device of `one_device`."""
        naturals = natural(self.state.params, self.state.placements[0])
        return jax.device_put(naturals, self.one_device.devices.flat[0])

    @functools.cached_property
    def model_state(self) -> Any:
        """The model's other collections, on the device of `one_device`."""
        return jax.device_put(self.state.model_state, self.one_device.devices.flat[0])

    @functools.cached_property
    def layout(self) -> Layout:
        """The leaves."""
        return self.step.programs.layout(self.state)

    @property
    def num_slices(self) -> int:
        """The number of slices of the batch that run by themselves: devices x micro-batches."""
        return world_size(self.mesh) * self.step.config.num_micro_batches

    @functools.cached_property
    def rows(self) -> Any:
        """The first slice of the batch: the rows of one device."""
        return jax.tree.map(lambda x: jnp.asarray(x[: x.shape[0] // self.num_slices]), self.batch)

    def losses(self, dtype: Any) -> Losses:
        """Return the losses for batches whose floats are cast to `dtype`. They are new functions,
        so JAX traces them anew."""
        return make_losses(self.step.adapted, dtype, None, self.mesh)

    def on_one_device(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs `fun` inside `shard_map` over `one_device`."""
        return jax.shard_map(
            fun,
            mesh=self.one_device,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )

    def tracing_on_one_device(self) -> Any:
        """Return the context in which functions of `on_one_device` are traced."""
        return mesh_context(self.one_device, self.step.programs.axis_names)

    def trace_loss(self, *, train: bool) -> Program:
        """Trace the loss of one device's rows on the mesh, anew.

        The inputs are the leaves, the model state, the rows and the key.
        """
        loss = self.losses(jnp.float32)[train]
        args = self.params, self.model_state, self.rows, jax.random.key(KEY)
        shapes = jax.eval_shape(lambda *args: args, *args)
        return self.step.programs.in_mesh(lambda *args: trace(loss, *args)[0], *shapes)

    @functools.cached_property
    def programs(self) -> dict[bool, Program]:
        """The traced loss by `train`; see `trace_loss`."""
        return {train: self.trace_loss(train=train) for train in (True, False)}

    @functools.cached_property
    def step_program(self) -> Program:
        """The program that computes the step's loss and gradients on the whole mesh."""
        programs, state = self.step.programs, self.step.shapes()
        batch = self.step.batches.shapes(self.batch)
        with programs.tracing():
            return trace(programs.gradients, state, batch)[0]

    def leaf_names(self) -> list[str]:
        """Return the paths of the leaves, in order."""
        return [leaf.path for leaf in self.layout]

    def is_random(self, *, train: bool) -> bool:
        """Return whether the loss draws random numbers."""
        program = self.programs[train]
        return any(program.inputs[-1] in eq.values for eq in program.equations)


def checked_model(
    model: Any,
    batch: Any,
    mesh: Mesh,
    *,
    config: ZeroConfig,
    loss: Callable[..., Any] | None,
    optimizer: optax.GradientTransformation | None,
    axis_names: Any,
) -> CheckedModel:
    """Make the subject of the checks; see `zeroxla.check` for the arguments.

    Raises:
      ValueError: as `make_step`, and if the mesh has stages.
    """
    if mesh.shape.get(PIPE, 1) > 1:
        raise ValueError(
            f"check on a mesh with pipe={mesh.shape[PIPE]}: a check compares the whole model with "
            "its step; pass a mesh without stages, such as zeroxla.make_mesh()"
        )
    if optimizer is None:
        optimizer = config.optimizer or optax.adamw(3e-4)
    plain = ZeroConfig(
        accumulate=config.num_micro_batches,
        frozen=config.frozen,
        splits=config.splits,
        rewrite=config.rewrite,
        owners=config.owners,
        persistence_threshold=0,
        unit_elements=config.unit_elements,
    )
    step = make_step(
        model,
        mesh,
        optax.chain(remember_gradients(), optimizer),
        loss=loss,
        config=plain,
        axis_names=axis_names,
    )
    leaves = jax.tree.leaves(step.abstract_state(batch).params)
    if config.unit_elements is None:
        # The usual units would hold all of a small model.
        largest = max((leaf.size for leaf in leaves), default=1)
        step = step.with_config(dataclasses.replace(step.config, unit_elements=largest))
        step.abstract_state(batch)
    return CheckedModel(step=step, config=config, batch=batch)


def remember_gradients() -> optax.GradientTransformation:
    """Return a transformation that changes nothing, and whose state is the newest gradients."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (updates, updates),
    )
