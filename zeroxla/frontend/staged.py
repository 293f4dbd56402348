"""`StagedModel`: the interface of a model that a mesh axis `pipe` cuts into stages.

The training step knows only this interface; `zeroxla/pipeline` fulfils it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.frontend.base import Adapted
from zeroxla.program.report import Report
from zeroxla.wire.leaves import Layout
from zeroxla.wire.resolve import Wiring
from zeroxla.wire.wire_state import WireState, WireStatePlan


class StagedModel(abc.ABC):
    """A model of layers that run one after another. `zeroxla.Pipeline` is one.

    `make_step` takes it like any other model: as a whole through `adapted`, or, on a mesh with the
    axis `pipe`, in stages through `differentiator`.
    """

    @property
    @abc.abstractmethod
    def adapted(self) -> Adapted:
        """The whole model as pure functions."""

    @abc.abstractmethod
    def differentiator(
        self,
        *,
        num_ranks: int,
        layout: Layout,
        wiring: Wiring,
        unit_elements: int | None,
        limits: FetchLimits,
        microbatches: int,
        weights: Literal["step", "tick"],
        losses: Mapping[bool, Callable[..., Any]] | None = None,
    ) -> StagedDifferentiator:
        """Return the functions that compute losses and gradients of the model in stages.

        Args:
          num_ranks: length of the axis `pipe`.
          layout: the model's leaves, split over all devices.
          wiring: how leaves travel between the devices of a stage.
          unit_elements: see `ZeroConfig`.
          limits: how far gathers run ahead, and which gathered leaves are kept.
          microbatches: number of micro-batches in a step.
          weights: "step" gathers a stage's leaves once in a step, "tick" in every tick.
          losses: by `train`, the loss of the parts that `layout` describes, if axes split the work
            on one row, or the loss that is rewritten; None takes the model's own loss.

        Raises:
          NotImplementedError: the model cannot be cut into stages from the trace of a loss.
        """


class StagesReport(Report):
    """A table of stages. `zeroxla.Partition` is one."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def gradient_bytes(self) -> int:
        """Bytes of float32 gradients that a device adds up."""

    @abc.abstractmethod
    def beside(self, axes: Sequence[Report], rewrites: Report | None) -> StagesReport:
        """Return the report with one on each axis that splits the work on one row, and one on what
        was rewritten in the model's trace."""


class StagedDifferentiator(abc.ABC):
    """Computes losses and gradients of a model in stages: one device's part of a step.

    `gradients` and `evaluate` run inside `shard_map`. The other methods work on shapes alone. Their
    `model_state` is the model state, their `rows` are one device's micro-batch, and `key` is its
    PRNG key.
    """

    @abc.abstractmethod
    def gradients(
        self,
        params: Any,
        model_state: Any,
        batch: Any,
        key: jax.Array,
        scale: jax.Array,
        wire_state: WireState | None,
    ) -> tuple[list[jax.Array | None], dict[str, Any], Any, WireState | None]:
        """Compute one step's gradients.

        Args:
          params: this device's shards.
          model_state: the state that the model keeps between steps.
          batch: this device's rows of the batch.
          key: the step's PRNG key.
          scale: the loss scale, a float32 scalar.
          wire_state: the wires' state after the last step; None if they keep none.

        Returns:
          This device's shards of the mean gradient in float32, None for frozen leaves; the metrics
          of the whole batch; the new model state; the new wire state.
        """

    @abc.abstractmethod
    def evaluate(self, params: Any, model_state: Any, batch: Any, key: jax.Array) -> dict[str, Any]:
        """Return the metrics of the whole batch, without gradients; the arguments are those of
        `gradients`."""

    @abc.abstractmethod
    def stage_dims(
        self, model_state: Any, rows: Any, key: jax.Array, leaves: Sequence[Any]
    ) -> dict[int, int]:
        """Return the leaves that are split over stages, by number, each with the dim that is split.

        Args:
          model_state, rows, key: see the class.
          leaves: the shapes of the model's leaves.
        """

    @abc.abstractmethod
    def wire_state_plan(self, model_state: Any, rows: Any, key: jax.Array) -> WireStatePlan:
        """Return the plan that makes the wire state of all stages, and its new value in each
        step."""

    @abc.abstractmethod
    def stage_layouts(self, model_state: Any, rows: Any, key: jax.Array) -> Sequence[Layout]:
        """Return the layout of each rank's leaves."""

    @abc.abstractmethod
    def describe(
        self, model_state: Any, rows: Any, key: jax.Array, at_rest: Sequence[str]
    ) -> StagesReport:
        """Return a table of the stages: their layers, parameters, cost, and what they hold.

        Args:
          model_state, rows, key: see the class.
          at_rest: sentences of the report, on what a device stores between steps.
        """
