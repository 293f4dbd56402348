"""Tells what JAX's C++ code prints when processes lose each other from what a program prints.

When a process is gone, JAX's coordination service prints some thirty lines in each other one, and
aborts it. The launcher says the same in a sentence, so it does not pass these lines on.
"""

from __future__ import annotations

import re

_BEGINS = re.compile(
    r"[WEF]\d{4} \d\d:\d\d:\d\d\.\d+\s+\d+ "
    r"(preemption_\w+\.cc|coordination_service\w*\.cc|client\.h|distributed_runtime\S*):\d+\]"
)
# The lines that follow such a line. Those of a stack trace may follow any line.
_CONTINUES = re.compile(
    r"$|Additional GRPC error|:[A-Z_]+:|RPC: /xla\.|=== Source Location Trace|external/xla|"
    r"\. This is only expected|\d+$|\S*task:\d+$|The tasks have crashed|# of tasks that reached|"
    r"The first task at the barrier|Some timed out task"
)
_FRAME = re.compile(r"\s+@\s+0x[0-9a-f]+|\*\*\* Check failure stack trace: \*\*\*")


def is_frame(line: str) -> bool:
    """Return whether a line belongs to a stack trace of C++."""
    return _FRAME.match(line) is not None


class NoticeFilter:
    """Says of each line of a stream whether it belongs to a notice of JAX's."""

    def __init__(self) -> None:
        self._inside = False

    def takes(self, line: str) -> bool:
        """Return whether the next line of the stream belongs to a notice."""
        if is_frame(line):
            return True
        begins = _BEGINS.match(line) is not None
        self._inside = begins or (self._inside and _CONTINUES.match(line) is not None)
        return self._inside
