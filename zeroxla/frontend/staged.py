"""`StagedModel`: the interface of a model that a mesh axis `pipe` cuts into stages.

The training step knows only this interface; `zeroxla/pipeline` fulfils it.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import jax

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.frontend.base import Adapted
from zeroxla.program.report import Report
from zeroxla.wire.leaves import Layout
from zeroxla.wire.resolve import Wiring
from zeroxla.wire.wire_state import WireState, WireStatePlan


class StagedModel(abc.ABC):
    """A model of layers that run one after another. `zeroxla.Pipeline` is one."""

    @property
    @abc.abstractmethod
    def adapted(self) -> Adapted:
        """The whole model as pure functions."""

    @abc.abstractmethod
    def gradients(
        self,
        *,
        num_stages: int,
        layout: Layout,
        wiring: Wiring,
        unit_elements: int | None,
        limits: FetchLimits,
        microbatches: int,
        weights: str,
    ) -> StagedGradients:
        """Return the program that computes losses and gradients of the model in stages.

        Args:
          num_stages: length of the axis `pipe`.
          layout: the model's leaves, split over all devices.
          wiring: how leaves travel between the devices of a stage.
          unit_elements: see `ZeroConfig`.
          limits: how far gathers run ahead, and which gathered leaves are kept.
          microbatches: number of micro-batches in a step.
          weights: "step" gathers a stage's leaves once in a step, "tick" in every tick.
        """


class StagedGradients(abc.ABC):
    """Computes losses and gradients of a model in stages, on one device, inside `shard_map`.

    In every method `rows` and `key` are the shapes of a device's micro-batch and of its key.
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
        """Return this device's gradient shards, the metrics, the model state and the wire state."""

    @abc.abstractmethod
    def evaluate(self, params: Any, model_state: Any, batch: Any, key: jax.Array) -> dict[str, Any]:
        """Return the metrics of the whole batch, without gradients."""

    @abc.abstractmethod
    def stage_dims(
        self, model_state: Any, rows: Any, key: jax.Array, leaves: Sequence[Any]
    ) -> dict[int, int]:
        """Return which leaves are stored by stage, and the dim that the stages split.

        Args:
          model_state: its shapes.
          leaves: the shapes of the model's leaves.

        Raises:
          NotImplementedError: the model keeps a state between steps.
        """

    @abc.abstractmethod
    def wire_state_plan(self, rows: Any, key: jax.Array) -> WireStatePlan:
        """Return the plan of the stages' wire state: it makes the state and carries it on."""

    @abc.abstractmethod
    def partition(self, rows: Any, key: jax.Array) -> Report:
        """Return how the layers are cut into stages."""
