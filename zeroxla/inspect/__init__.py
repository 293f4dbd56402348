"""Reports on steps, compiled programs and live arrays: bytes that travel, memory, pictures."""

from zeroxla.hybrid.phase_memory import PhaseReport
from zeroxla.inspect.comms import comms
from zeroxla.inspect.comms_report import CommsReport, Row
from zeroxla.inspect.memory import memory
from zeroxla.inspect.phase_times import PhaseTimes, phase_times
from zeroxla.inspect.pictures import (
    plot_axes,
    plot_comms,
    plot_disk,
    plot_explanation,
    plot_islands,
    plot_memory,
    plot_placement,
    plot_plan,
    plot_schedule,
    plot_search,
)
from zeroxla.inspect.schedule import ScheduleReport, schedule
from zeroxla.inspect.scoped_trace import write_scoped_trace
from zeroxla.offload.array_bytes import array_bytes_per_device
from zeroxla.program.compiled_memory import MemoryReport
from zeroxla.program.live.residents import Resident
from zeroxla.program.phases import PHASES
from zeroxla.program.report import format_bytes
from zeroxla.step.memory.step_memory import StepMemory

__all__ = [
    "PHASES",
    "CommsReport",
    "MemoryReport",
    "PhaseReport",
    "PhaseTimes",
    "Resident",
    "Row",
    "ScheduleReport",
    "StepMemory",
    "array_bytes_per_device",
    "comms",
    "format_bytes",
    "memory",
    "phase_times",
    "plot_axes",
    "plot_comms",
    "plot_disk",
    "plot_explanation",
    "plot_islands",
    "plot_memory",
    "plot_placement",
    "plot_plan",
    "plot_schedule",
    "plot_search",
    "schedule",
    "write_scoped_trace",
]
