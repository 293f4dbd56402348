"""`ProgramReports`: the compiled training step, and what is the same whenever it runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax

from zeroxla import inspect


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReports:
    """A compiled step with its reports.

    Attributes:
      compiled: the program.
      memory: what the compiler plans for one device.
      comms: its collectives.
    """

    compiled: jax.stages.Compiled
    memory: inspect.MemoryReport
    comms: inspect.CommsReport

    @classmethod
    def of(cls, compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> ProgramReports:
        """Read a program that was compiled for a mesh."""
        return cls(
            compiled=compiled,
            memory=inspect.memory(compiled),
            comms=inspect.comms(compiled, mesh),
        )

    def values(self) -> dict[str, float]:
        """Return the values that are recorded with every step: the bytes that a device receives in
        it, those that a host sends to others, and those that a device holds by the compiler's
        plan."""
        return {
            "received_bytes": self.comms.total_bytes(),
            "cross_host_bytes": self.comms.cross_host_bytes(),
            "program_memory_bytes": self.memory.total_bytes,
        }

    def times(self, folder: Path, steps: int) -> inspect.PhaseTimes:
        """Return the time of each phase in a profile of so many steps of this program."""
        return inspect.phase_times(folder, self.compiled, steps=steps)

    def trace(self, folder: Path) -> Path:
        """Write a copy of that profile whose operations have the names of phases and scopes."""
        return inspect.write_scoped_trace(folder, self.compiled)
