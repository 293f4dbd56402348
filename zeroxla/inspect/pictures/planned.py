"""Protocols of plans and of searches: the fields that their pictures read.

`zeroxla.planning` makes plans and searches. It lies above this room and cannot be imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from zeroxla.inspect.comms_report import CommsReport
from zeroxla.inspect.pictures.memory import HasParts
from zeroxla.mesh.machines import Device, Link


class PlannedStep(Protocol):
    """A `zeroxla.Plan`: what a step needs and costs."""

    @property
    def target(self) -> PlannedTarget: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def memory(self) -> HasParts: ...
    @property
    def comms(self) -> CommsReport: ...
    @property
    def time(self) -> PlannedTime: ...
    @property
    def most_bytes(self) -> int: ...
    @property
    def fits(self) -> bool: ...
    @property
    def tokens_per_s(self) -> float: ...


class PlannedTarget(Protocol):
    """The cluster of a plan: the kind of device, the link of each axis, the axis lengths."""

    @property
    def device(self) -> Device: ...
    @property
    def links(self) -> Mapping[str, Link]: ...
    @property
    def mesh_shape(self) -> Mapping[str, int]: ...


class PlannedTime(Protocol):
    """The time line of a planned step: its seconds, each lane's seconds, what takes the lanes."""

    @property
    def seconds(self) -> float: ...
    @property
    def busy_s(self) -> Mapping[str, float]: ...
    @property
    def events(self) -> Sequence[PlannedEvent]: ...


class PlannedEvent(Protocol):
    """Something that takes a lane for some seconds of the step."""

    @property
    def lane(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...


class RankedPlans(Protocol):
    """A `zeroxla.Search`: plans in several settings, the best first."""

    @property
    def found(self) -> Sequence[RankedPlan]: ...


class RankedPlan(Protocol):
    """Settings, and the plan for them."""

    @property
    def choice(self) -> PlannedSettings: ...
    @property
    def plan(self) -> PlannedStep: ...


class PlannedSettings(Protocol):
    """The settings of a plan: a preset, a mesh, and whether blocks are recomputed in backward."""

    @property
    def zero(self) -> str: ...
    @property
    def mesh_shape(self) -> Mapping[str, int]: ...
    @property
    def remat(self) -> bool | None: ...
