"""`KeepEverything`: the choice of a step without a budget."""

from __future__ import annotations

from collections.abc import Iterable

from zeroxla.fetch.segments import FetchPlan, Straight
from zeroxla.fetch.traced_segment import TracedSegment, trace_segment
from zeroxla.program.trace import Value


class KeepEverything:
    """Segments keep every residual that is an activation.

    Attributes:
      traced: the segments that have been asked for, with their derivatives.
    """

    def __init__(self) -> None:
        self.traced: dict[Straight, TracedSegment] = {}

    def of(
        self, plan: FetchPlan, segment: Straight, summed: Iterable[Value]
    ) -> tuple[TracedSegment, None]:
        """Return a segment of a plan, traced, and None; see `trace_segment`."""
        if segment not in self.traced:
            traced = trace_segment(segment, plan.active, plan.constants, summed)
            self.traced[segment] = traced
        return self.traced[segment], None
