"""The bytes that an update on the host moves and reads, from the trace of a step."""

from __future__ import annotations

import dataclasses

from zeroxla.planning.liveness import size_of
from zeroxla.planning.timeline import is_move
from zeroxla.program import compat
from zeroxla.program.trace import Program


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostUpdate:
    """One device's part of an update on the host.

    Attributes:
      moved_bytes: bytes that cross the link to the host, gradients one way, parameters the other.
      host_bytes: bytes of its memory that the host reads and writes.
    """

    moved_bytes: int
    host_bytes: int

    @staticmethod
    def of(program: Program, num_devices: int) -> HostUpdate:
        """Read a step's traced program, in which the update is one of arrays over all devices.

        Each computation on the host counts as one pass over its operands and results.
        """
        moved = host = 0
        for eq in program.equations:
            if eq.name == compat.COMPUTE_ON:
                host += sum(map(size_of, {*eq.values, *eq.outputs}))
            elif is_move(eq):
                moved += sum(map(size_of, eq.outputs))
        return HostUpdate(moved_bytes=moved // num_devices, host_bytes=host // num_devices)
