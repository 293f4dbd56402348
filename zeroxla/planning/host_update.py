"""The bytes that an update on the host moves and reads, from the trace of a step."""

from __future__ import annotations

import dataclasses

from zeroxla.program import compat
from zeroxla.program.host_values import is_move
from zeroxla.program.live.splits import Splits, bytes_per_device
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
    def of(program: Program, splits: Splits) -> HostUpdate:
        """Read a step's traced program, in which the update is one of arrays over all devices.

        Each computation on the host counts as one pass over its operands and results. A device's
        part of an array follows from `splits`; an array that every device has whole is updated for
        each of them.
        """
        moved = host = 0
        for eq in program.equations:
            if eq.name == compat.COMPUTE_ON:
                host += sum(bytes_per_device(v, splits) for v in {*eq.values, *eq.outputs})
            elif is_move(eq):
                moved += sum(bytes_per_device(v, splits) for v in eq.outputs)
        return HostUpdate(moved_bytes=moved, host_bytes=host)
