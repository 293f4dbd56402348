"""`schedule`: reports the cost and the memory of a pipeline schedule, as text and as a picture."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from zeroxla.inspect.pictures.schedule import plot_schedule, row_of, sizes_of
from zeroxla.pipeline.schedule import Schedule
from zeroxla.pipeline.schedule_check import check
from zeroxla.pipeline.schedule_cost import bubble, cost, critical_path
from zeroxla.pipeline.stash import Stash, make_stash
from zeroxla.program.report import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduleReport(Report):
    """The figures of one schedule. Work is in the caller's unit; by default a forward is 1.

    Attributes:
      schedule: the schedule.
      stash: its slots, and the most that each rank holds.
      forward: the work of one micro-batch's forward on a rank, in all its stages.
      backward: the work of its whole backward.
      weight: the part of `backward` for the gradient of the leaves. None means half.
      bubble: the share of the lockstep time in which ranks are idle.
      lockstep: the critical path if every tick waits for the busiest rank.
      asynchronous: the critical path if a rank waits only for the inputs of its next op.
    """

    schedule: Schedule
    stash: Stash
    forward: float
    backward: float
    weight: float | None
    bubble: float
    lockstep: float
    asynchronous: float

    @property
    def one_f_one_b(self) -> float:
        """The critical path of 1F1B, (m + p - 1)(forward + backward), with a stage on each of the p
        ranks. The backward counts only if the schedule trains."""
        work = self.forward + (self.backward if self.schedule.trains else 0)
        return (self.schedule.microbatches + self.schedule.num_ranks - 1) * work

    def table(self) -> Table:
        """Return the figures as a rich table."""
        from rich.table import Table

        s = self.schedule
        table = Table(
            title=f"Schedule {s.name} ({sizes_of(s)})",
            title_justify="left",
        )
        table.add_column("")
        table.add_column("value", justify="right")
        table.add_column("meaning")
        if not s.trains:
            work = f"forward {self.forward:g}"
        elif not s.splits:
            work = f"forward {self.forward:g}, backward {self.backward:g}"
        else:
            part = self.backward / 2 if self.weight is None else self.weight
            work = (
                f"forward {self.forward:g}, input gradient {self.backward - part:g}, "
                f"weight gradient {part:g}"
            )
        of = "" if s.num_chunks == 1 else f" in all {s.num_chunks} chunks"
        table.add_row("ticks", str(s.ticks), f"work{of}: {work}")
        table.add_row("bubble", f"{self.bubble:.1%}", "of the lockstep time is idle")
        for name, value in (("lockstep", self.lockstep), ("asynchronous", self.asynchronous)):
            base = "(m + p - 1)(F + B)" if s.trains else "(m + p - 1) F"
            meaning = f"{value / self.one_f_one_b:.3f} x {base}" if self.one_f_one_b else ""
            table.add_row(f"{name} critical path", f"{value:g}", meaning)
        table.add_section()
        row = row_of(s)
        held = "micro-batches held" if s.num_chunks == 1 else "inputs of chunks held"
        for rank, (most, inputs, gradients) in enumerate(
            zip(
                self.stash.in_flight,
                self.stash.peak_inputs,
                self.stash.peak_gradients,
                strict=True,
            )
        ):
            received = f"{held}; received inputs {inputs}, gradients {gradients}"
            table.add_row(f"{row} {rank} peak stash", str(most), received)
        table.add_row(
            f"slots of every {row}",
            f"{self.stash.num_input_slots} + {self.stash.num_gradient_slots}",
            "inputs + gradients",
        )
        if s.splits:
            most = str(self.stash.num_kept_slots)
            table.add_row("weight gradients put off", most, f"the most of a {row} at a time")
        return table

    def plot(self, *, path: str | os.PathLike | None = None) -> Figure:
        """Draw the schedule; see `plot_schedule`."""
        return plot_schedule(
            self.schedule,
            forward=self.forward,
            backward=self.backward,
            weight=self.weight,
            path=path,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain types, for JSON."""
        return {
            "name": self.schedule.name,
            "stages": self.schedule.stages,
            "ranks": self.schedule.num_ranks,
            "chunks": self.schedule.num_chunks,
            "microbatches": self.schedule.microbatches,
            "ticks": self.schedule.ticks,
            "bubble": self.bubble,
            "lockstep": self.lockstep,
            "asynchronous": self.asynchronous,
            "in_flight": list(self.stash.in_flight),
            "num_input_slots": self.stash.num_input_slots,
            "num_gradient_slots": self.stash.num_gradient_slots,
            "num_kept_slots": self.stash.num_kept_slots,
        }


def schedule(
    schedule: Schedule, *, forward: float = 1, backward: float = 2, weight: float | None = None
) -> ScheduleReport:
    """Report the cost and the memory of a pipeline schedule.

    Args:
      schedule: a schedule that `zeroxla.make_schedule` made, or tables of your own.
      forward: the work of one micro-batch's forward on a rank, in all its stages, in any unit.
      backward: the work of its whole backward.
      weight: the part of `backward` for the gradient of the leaves. None means half. It does not
        matter if the schedule does not split that part off.

    Returns:
      The report: print it, or `plot()` it.

    Raises:
      ValueError: the schedule cannot run, negative work, or `weight` above `backward`.
    """
    check(schedule)
    return ScheduleReport(
        schedule=schedule,
        stash=make_stash(schedule),
        forward=forward,
        backward=backward,
        weight=weight,
        bubble=bubble(schedule, forward, backward, weight),
        lockstep=cost(schedule, forward, backward, weight),
        asynchronous=critical_path(schedule, forward, backward, weight),
    )
