"""The bytes that one collective moves, and the most that several move in one run.

Bytes follow from shapes. In a group of g devices, one device receives

    all-gather          result  * (g - 1) / g
    reduce-scatter      operand * (g - 1) / g
    all-reduce          operand * (g - 1) / g * 2      (a reduce-scatter, then an all-gather)
    all-to-all          operand * (g - 1) / g
    collective-permute  operand                        (if something is sent to it)

Bytes between hosts are those that one host sends to others. They are exact for all-to-all and
permutes. The other kinds count as a ring in the order in which the program lists a group. A hop
over `node` alone sends the same in any ring. Gloo's flat gathers and all-reduces send that many
bytes (measured). Its reduce-scatter sends less, and so does NCCL, which orders its rings by
topology.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar


class InBranches(Protocol):
    """Something inside branches of conditionals: (conditional, which branch), outermost first."""

    @property
    def branches(self) -> tuple[tuple[int, int], ...]: ...


T = TypeVar("T", bound=InBranches)


def most(rows: Iterable[T], value: Callable[[T], float], *, depth: int = 0) -> float:
    """Sum a value over rows; of a conditional's branches, only the one with the largest sum counts.

    A device takes one branch in a run, so the result is the most that a run can reach. The stages
    of a pipeline are branches of one program; there it is the figure of the heaviest stage.

    Args:
      rows: the rows to sum over.
      value: returns the value of a row in a run that takes its branches.
      depth: the number of conditionals, from the outermost, whose branch is the same for all rows.
    """
    total = 0.0
    conditionals: dict[int, dict[int, list[T]]] = {}
    for row in rows:
        if len(row.branches) == depth:
            total += value(row)
        else:
            conditional, branch = row.branches[depth]
            conditionals.setdefault(conditional, {}).setdefault(branch, []).append(row)
    for branches in conditionals.values():
        total += max(most(mine, value, depth=depth + 1) for mine in branches.values())
    return total


def received_bytes(kind: str, num_bytes: int, size: int) -> float:
    """Return the bytes that one device receives in one run.

    Args:
      kind: the HLO kind of the collective.
      num_bytes: bytes of the operand, or of an all-gather's result.
      size: the number of devices in a group.
    """
    if kind == "collective-permute":
        return num_bytes
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * num_bytes * (size - 1) / size


def messages(kind: str, group: Sequence[int], num_bytes: int) -> list[tuple[int, int, float]]:
    """Return (source, target, bytes) for each message within one group in one run."""
    size = len(group)
    if kind == "collective-permute":
        return [(group[0], group[1], num_bytes)]
    if kind == "all-to-all":
        return [(a, b, num_bytes / size) for a in group for b in group if a != b]
    share = received_bytes(kind, num_bytes, size)
    return [(group[i], group[(i + 1) % size], share) for i in range(size)]
