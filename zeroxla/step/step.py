"""`Step`: one compiled training step of any Flax model, its state split over every device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal

import jax
import optax
from jax.sharding import Mesh

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.frontend import Adapted
from zeroxla.frontend.staged import StagedModel
from zeroxla.mesh.axes import as_auto
from zeroxla.mesh.processes import progress
from zeroxla.mesh.processes.same_program import ProgramCalls
from zeroxla.program.compat import AxisNames
from zeroxla.program.report import Report
from zeroxla.step.batches import BatchKinds, StepBatches
from zeroxla.step.changed_config import kept, useless_optimizer, with_microbatches
from zeroxla.step.checks import check_is_config, check_no_island, keys_named
from zeroxla.step.compiled_step import CompiledStep
from zeroxla.step.describe import describe_step
from zeroxla.step.disk.steps import DiskSteps, has_disk
from zeroxla.step.fit import StateFitter
from zeroxla.step.make_states import FirstStateMaker
from zeroxla.step.memory.step_memory import StepMemory
from zeroxla.step.model_on_mesh import KnownLosses
from zeroxla.step.notices import useless_on_mesh, useless_when_held, warn
from zeroxla.step.programs import Programs
from zeroxla.step.rates import Rates
from zeroxla.step.reshape import reshaped
from zeroxla.step.state import TrainState, check_is_state
from zeroxla.step.state_shapes import StateShapes
from zeroxla.wire.bundles import ALONE_ELEMENTS


class Step:
    """A training step. Call it with a state and a batch. `make_step` makes it.

    Attributes:
      adapted: the model, as pure functions.
      mesh: the mesh, with Auto axes.
      config: the options.
      optimizer: the optax transformation.
      programs: the functions that the step compiles.
      disk: runs the steps of a state whose arrays are on disk.
      batches: checks batches, and puts them on the mesh.
    """

    def __init__(
        self,
        *,
        adapted: Adapted,
        mesh: Mesh,
        optimizer: optax.GradientTransformation,
        config: ZeroConfig,
        pipeline: StagedModel | None = None,
        weights: Literal["step", "tick"] = "step",
        microbatches: int | None = None,
        alone_elements: int = ALONE_ELEMENTS,
        axis_names: AxisNames = (),
        known: KnownLosses | None = None,
    ) -> None:
        self._microbatches = microbatches
        config = with_microbatches(config, microbatches)
        frozen = dict.fromkeys((*config.frozen, *adapted.frozen))
        config = dataclasses.replace(config, frozen=tuple(frozen))
        self.adapted, self.mesh, self.optimizer, self.config = adapted, mesh, optimizer, config
        self.programs = Programs(
            adapted=adapted,
            mesh=mesh,
            optimizer=optimizer,
            config=config,
            pipeline=pipeline,
            weights=weights,
            alone_elements=alone_elements,
            axis_names=axis_names,
            known={} if known is None else known,
        )
        warn(useless_on_mesh(self.programs.wiring, config, mesh), stacklevel=4)
        if pipeline is not None and weights == "step":
            warn(useless_when_held(self.programs.config, self.programs.wiring), stacklevel=4)
        self._run = ProgramCalls(config)
        options = self.programs.compiler_options
        self._jit = functools.partial(jax.jit, compiler_options=options)
        self._compiled = CompiledStep(self.programs, self._jit)
        self.disk = DiskSteps(self.programs, self._jit, self._run)
        self._eval = self._jit(self.programs.evaluate)
        self._shapes = StateShapes(self.programs)
        self.batches = StepBatches(self.programs, self._shapes)
        self._fit = StateFitter(self.programs, self.disk, self._shapes, self._jit)
        self._rates = Rates()
        self._kinds = BatchKinds()
        self._states = FirstStateMaker(
            programs=self.programs,
            shapes=self._shapes,
            batches=self.batches,
            disk=self.disk,
            jit=self._jit,
            run=self._run,
        )

    def init(self, key: jax.Array, batch: Any) -> TrainState:
        """Make the state. Every leaf is born split, and no device ever holds the model.

        Args:
          key: a PRNG key. The model's parameters are initialised from the same random bits as on
            one device. Where XLA computes a distribution in another vector width, elements differ
            by a few roundings of the leaf's largest element.
          batch: a pytree of arrays or ShapeDtypeStructs; the leading dim is the global batch.

        Returns:
          The state before the first step.

        Raises:
          ValueError: the batch does not divide over the devices, or a leaf is not floating.
        """
        return self._states.init(key, batch)

    def init_from(
        self,
        params: Any,
        key: jax.Array,
        batch: Any = None,
        *,
        model_state: Any = None,
        donate: bool = False,
    ) -> TrainState:
        """Make the state for parameters that are given as whole arrays. See `zeroxla.init_from`."""
        options = {"model_state": model_state, "donate": donate}
        return self._states.init_from(params, key, batch, **options)

    def abstract_state(self, batch: Any) -> TrainState:
        """Return the state's shapes, dtypes and shardings without computing anything.

        Use them for `lower` and for restoring checkpoints.
        """
        shapes = self._shapes.decide(jax.random.key(0), self.batches.checked(batch))
        return self._shapes.placed(shapes)

    def reshape(self, state: TrainState, other: Step) -> TrainState:
        """Move a state, which is donated, to another step of the same model. Its mesh may have more
        stages, fewer, or none. No checkpoint is read or written.

        Args:
          state: a state of this step.
          other: a step that has seen a batch; in several processes, with the devices of this one.

        Raises:
          ValueError: it has another model, optimizer or frozen leaves, or has seen no batch.

        Cost: each leaf travels once, one after another.
        """
        check_is_state(state)
        return reshaped(state, other.shapes(), other.mesh)

    def shapes(self) -> TrainState:
        """Return `abstract_state` for the batch that the step has last seen.

        Raises:
          ValueError: the step has seen no batch.
        """
        return self._shapes.placed(self._shapes.decide(jax.random.key(0), self._shapes.last_batch))

    def place(self, rows: Any, *, train: bool = True) -> Any:
        """Make the global batch from the rows that each process has read, where the step reads it.

        As `zeroxla.global_batch`, but of an array that is read in parts alone a device is sent its
        part.

        Args:
          rows: pytree of host arrays: this process's part of the batch, as for `global_batch`.
          train: whether to train on the batch. Pass False for `eval`.

        Raises:
          ValueError: as `init` and `global_batch`.
        """
        return self.batches.place(rows, train=train)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Take one optimizer step. The state is donated: use the returned one.

        Args:
          state: a state from `init`, an earlier step, or a checkpoint.
          batch: as in `init`.

        Returns:
          The next state, and the metrics: `loss`, `grad_norm` (before any clipping), `finite`,
          `skipped` (the number of steps so far whose gradient was not finite: they changed only the
          counters), `loss_scale` (float16), `learning_rate` if the optimizer's state holds one, and
          the model's own. From the second call on also `examples_per_s` since the call before, and
          `tokens_per_s` for batches with `tokens`. For a state on disk also this process's
          `disk_read_bytes_per_s` and `disk_write_bytes_per_s` over the call.

        Raises:
          DeviceMemoryError: a device runs out of memory while the step is compiled or called. What
            surfaces later, where results are read, is the backend's own error.
          ValueError: the config has `outer`, so that the step trains in an `Island`; or as `init`.
        """
        check_no_island(self.config)
        return self.take(state, batch)

    def take(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Take one optimizer step, also as a part of an island: `Island` calls it. As calling the
        step, besides."""
        batch = self.batches.beside(state, batch)
        state = self._fit.fitted(state)
        progress.mark()
        with self._tracing("the step", state, batch):
            if has_disk(state):
                state, metrics = self.disk.train(state, batch)
            else:
                train = self._compiled.train(state, batch)
                state, metrics = self._run("train", train, state, batch)
        self._kinds.notice("step", batch, stacklevel=4)
        return state, {**metrics, **self._rates.since_last(batch)}

    def eval(self, state: TrainState, batch: Any) -> dict[str, Any]:
        """Return the loss and the model's metrics on a batch, with `train=False`."""
        batch = self.batches.beside(state, batch, train=False)
        with self._tracing("eval", state, batch):
            metrics = self.disk.call("eval", self._eval, state, batch)
        self._kinds.notice("evaluation", batch, stacklevel=3)
        return metrics

    def grad(self, state: TrainState, batch: Any) -> tuple[jax.Array, Any]:
        """Return the loss and the gradients that a step would use, for tests and debugging.

        Gradients are float32 global arrays in natural shapes, zeros for frozen leaves. That of a
        complex leaf has the derivatives by its two parts: the conjugate of what `jax.grad` returns.
        """
        batch = self.batches.beside(state, batch)
        with self._tracing("grad", state, batch):
            state = self._fit.wired(state)
            return self.disk.call("grad", self._compiled.grad(state, batch), state, batch)

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        """Lower the step for (shapes of) a state and a batch, as `jax.jit(...).lower` does.

        If the state is on disk, this is the part of the step that computes the gradients.
        """
        batch_shapes = self.batches.shapes(batch)
        with self.programs.tracing():
            state = self._fit.wired_shapes(state, batch)
            if has_disk(state):
                return self.disk.lower(state, batch_shapes)
            return self._compiled.train(state, batch_shapes).lower(state, batch_shapes)

    def describe(self) -> Report:
        """Return the table of leaves: shape, placement, unit, bytes of a shard.

        Of a pipeline it is the table of stages: layers, costs, what devices hold and who updates.

        Raises:
          ValueError: the model has not been traced, as `init` and the first call do.
        """
        return describe_step(self.programs, self._shapes, self._compiled.fit)

    def memory(self) -> StepMemory:
        """Return what a device holds over a step of the batch that was seen last, from the trace
        alone. See `zeroxla.inspect.memory`.

        Raises:
          ValueError: the step has seen no batch.
        """
        state, batch = self.shapes(), self.batches.shapes(self._shapes.last_batch)
        with self.programs.tracing():
            state = self._fit.wired_shapes(state, batch)
            return self._compiled.memory(state, batch)

    def model_flops(self) -> float:
        """Return the FLOPs of the model's products in a step of the last batch, on all devices; see
        `zeroxla.step.model_flops`. Raises ValueError if there was no batch."""
        return self._shapes.model_flops()

    def with_config(self, config: ZeroConfig, *, microbatches: int | None = None) -> Step:
        """Return a step with other options for the same state.

        A state is moved to the places of `config.offload` when the new step first takes it, and a
        loss scale begins when it first takes it in float16.

        Args:
          config: the new options. Options that the state depends on are kept: if `config` names no
            frozen leaves, those of this step stay frozen.
          microbatches: as for `make_step`. None takes `config.accumulate` if it is above 1, and
            otherwise the number that `make_step` was given.

        Raises:
          ValueError: `config` freezes other leaves than this step.
        """
        check_is_config(config)
        config = kept(config, self.config)
        warn(useless_optimizer(config, self.config), stacklevel=3)
        if microbatches is None and config.accumulate == 1:
            microbatches = self._microbatches
        step = Step(**{**self._options(), "config": config, "microbatches": microbatches})
        step._shapes.traced = self._shapes.traced
        return step

    def on_mesh(self, mesh: Mesh, config: ZeroConfig | None = None) -> Step:
        """Return the step of the same model and optimizer on another mesh, whose devices need not
        be there; `config` replaces the options. It takes no states of this step."""
        own = {**self._options(), "mesh": as_auto(mesh, pipeline=True), "known": {}}
        return Step(**{**own, "config": config or self.config}, microbatches=self._microbatches)

    @contextlib.contextmanager
    def _tracing(self, name: str, state: TrainState, batch: Any) -> Iterator[None]:
        """Return a context in which a program is traced and called, and its errors explained."""
        with (
            self.programs.tracing(),
            self._compiled.explained(name, state, batch),
            keys_named(batch),
        ):
            yield

    def _options(self) -> dict[str, Any]:
        fields = {f.name for f in dataclasses.fields(self.programs) if f.init} - {"activations"}
        return {name: getattr(self.programs, name) for name in fields}
