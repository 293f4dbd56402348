"""What one collective moves, and what many do at most.

Bytes follow from shapes. For a group of g devices one device receives

    all-gather          result  * (g - 1) / g
    reduce-scatter      operand * (g - 1) / g
    all-reduce          operand * (g - 1) / g * 2      (a reduce-scatter, then an all-gather)
    all-to-all          operand * (g - 1) / g
    collective-permute  operand                        (a device to which something goes)

Bytes between hosts are those that a host sends to others: exact for all-to-all and permutes, for
the rest those of a ring in the order in which the program lists a group. A hop over `node` alone
gives the same in any ring. For a flat collective it is what Gloo sends in gathers and all-reduces
(measured); Gloo's reduce-scatter and NCCL, which orders its rings by topology, send less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar


class InBranches(Protocol):
    """Something in branches of conditionals: (conditional, which branch), outermost first."""

    @property
    def branches(self) -> tuple[tuple[int, int], ...]: ...


T = TypeVar("T", bound=InBranches)


def most(rows: Iterable[T], value: Callable[[T], float], *, depth: int = 0) -> float:
    """Sum over rows, and of the branches of a conditional take the one with the largest sum.

    A device takes one branch in a run, so that is the most that it can come to; of the stages of a
    pipeline, which are branches of one program, it is the heaviest.

    Args:
      rows: any.
      value: of a row in a run that takes its branches.
      depth: of how many conditionals the branch is settled.
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
    """Return what one device receives in one run, from the payload and the group size."""
    if kind == "collective-permute":
        return num_bytes
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * num_bytes * (size - 1) / size


def messages(kind: str, group: Sequence[int], num_bytes: int) -> list[tuple[int, int, float]]:
    """Return (source, target, bytes) of all that travels within one group in one run."""
    size = len(group)
    if kind == "collective-permute":
        return [(group[0], group[1], num_bytes)]
    if kind == "all-to-all":
        return [(a, b, num_bytes / size) for a in group for b in group if a != b]
    share = received_bytes(kind, num_bytes, size)
    return [(group[i], group[(i + 1) % size], share) for i in range(size)]
