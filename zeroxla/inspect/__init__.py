"""Reports on compiled programs and live arrays: what travels, what memory holds, pictures."""

from .comms import CommsReport, Row, comms
from .memory import MemoryReport, array_bytes_per_device, format_bytes, memory
from .phase_memory import PhaseReport
from .phases import PHASES
from .pictures import (
    plot_comms,
    plot_disk,
    plot_memory,
    plot_placement,
    plot_plan,
    plot_schedule,
    plot_search,
)
from .schedule import ScheduleReport, schedule

__all__ = [
    "PHASES",
    "CommsReport",
    "MemoryReport",
    "PhaseReport",
    "Row",
    "ScheduleReport",
    "array_bytes_per_device",
    "comms",
    "format_bytes",
    "memory",
    "plot_comms",
    "plot_disk",
    "plot_memory",
    "plot_placement",
    "plot_plan",
    "plot_schedule",
    "plot_search",
    "schedule",
]
