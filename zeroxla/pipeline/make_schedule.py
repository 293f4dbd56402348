"""Makes schedules: one forward one backward (1F1B), GPipe, zero bubble (ZB-H1), forward alone.

Those with several stages on a rank are in `chunked_schedules`; here stage s is on rank s. p is the
number of ranks, s a stage, m the number of micro-batches, i a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from zeroxla.pipeline.chunked_schedules import cyclic, dualpipe_v, interleaved, zb_v
from zeroxla.pipeline.schedule import Schedule, check_sizes
from zeroxla.pipeline.schedule_tables import from_ticks, grid


def one_f_one_b(p: int, m: int, memory: str = "fast") -> Schedule:
    """Return one forward, one backward (1F1B): each backward comes as early as it can.

    Args:
      p: the number of ranks.
      m: the number of micro-batches.
      memory: "fast" puts a forward and a backward into each tick: the forward of i at tick i + s,
        its backward at tick i + 2(p - 1) - s. "low" puts one or the other into a tick, in
        DeepSpeed's order: p - s - 1 forwards to warm up, then forward and backward in turn.

    Returns:
      The schedule. "fast" takes m + 2(p - 1) ticks: the first p - 1 are forwards alone, the last
      p - 1 backwards alone. A stage holds at most min(2(p - s) - 1, m) micro-batches. "low" takes
      2(m + p - 1) ticks, and a stage holds at most min(p - s, m).

    Raises:
      ValueError: `memory` is unknown, or there is no stage or no micro-batch.

    References:
      Narayanan et al., PipeDream, arXiv 1806.03377; DeepSpeed's `TrainSchedule` ("low").
    """
    s, i = grid(p, m)
    if memory == "fast":
        forward, backward = i + s, i + 2 * (p - 1) - s
        bound = [2 * (p - stage) - 1 for stage in range(p)]
    elif memory == "low":
        # Neighbours alternate: even stages go forward in even ticks, odd stages in odd ticks.
        forward, backward = 2 * i + s, 2 * i + 2 * p - 1 - s
        bound = [p - stage for stage in range(p)]
    else:
        raise ValueError(
            f"memory={memory!r} is unknown; use 'fast' (a forward and a backward in each tick) or "
            "'low' (one of them, with half the stash)"
        )
    name = "1f1b" if memory == "fast" else "1f1b low"
    return from_ticks(name, forward=forward, backward=backward, bound=bound)


def gpipe(p: int, m: int) -> Schedule:
    """Return all forwards, then all backwards, both in the order of the micro-batches.

    Args:
      p: the number of ranks.
      m: the number of micro-batches.

    Returns:
      The schedule. It takes 2(m + p - 1) ticks, and each stage holds all m micro-batches.

    Raises:
      ValueError: there is no stage or no micro-batch.

    References:
      Huang et al., GPipe, arXiv 1811.06965. The paper runs backwards in reverse order. Here they
      run in the order of 1F1B, so that gradients are summed in the same order.
    """
    s, i = grid(p, m)
    backward = (m + p - 1) + i + (p - 1 - s)
    return from_ticks("gpipe", forward=i + s, backward=backward, bound=[m] * p)


def zero_bubble(p: int, m: int) -> Schedule:
    """Return ZB-H1: gradients of inputs go up at once, gradients of leaves fill free ticks.

    A tick is a forward, an input gradient or a weight gradient. The forward of i is at tick
    3 i + s, when its input arrives. Input gradients come as early as they can in the ticks between
    forwards. Weight gradients take the first tick that is left, which is always the very next one.

    Args:
      p: the number of ranks.
      m: the number of micro-batches.

    Returns:
      The schedule. It takes 3 m + 2(p - 1) ticks. A stage holds at most min(p - s, m)
      micro-batches, from their forward to their weight gradient, as in 1F1B. With this bound no
      table is shorter: the last stage does each micro-batch's three ticks in a row, and its last
      input gradient has p - 1 hops to go before stage 0 ends with a weight gradient. (The paper
      lets every stage hold p, and so reaches 3 m + p - 1 ticks.)

    Raises:
      ValueError: there is no stage or no micro-batch.

    References:
      Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.2.
    """
    s, i = grid(p, m)
    forward = 3 * i + s
    backward, weight = np.zeros_like(forward), np.zeros_like(forward)
    for stage in reversed(range(p)):
        taken = set(forward[stage].tolist())
        # The last stage has its gradient as soon as its forward is done.
        sent = forward[stage] if stage == p - 1 else backward[stage + 1]
        backward[stage] = _earliest(sent + 1, taken)
        weight[stage] = _earliest(backward[stage] + 1, taken)
    bound = [p - stage for stage in range(p)]
    return from_ticks("zb-h1", forward=forward, backward=backward, weight=weight, bound=bound)


def forward_only(p: int, m: int, ranks: Sequence[int] | None = None) -> Schedule:
    """Return forwards alone, for evaluation: each in the tick in which its input arrives.

    A micro-batch begins in the first tick from which none of its forwards meets another one on a
    rank. Where rank s has stage s alone, the forward of i is at tick i + s.

    Args:
      p: the number of ranks.
      m: the number of micro-batches.
      ranks: for each stage, the rank that runs it; None puts stage s on rank s.

    Returns:
      The schedule. A rank holds one input at a time. Without `ranks` it takes m + p - 1 ticks.

    Raises:
      ValueError: there is no rank or no micro-batch, or `ranks` does not name all p ranks.
    """
    check_sizes(p, m)
    ranks = tuple(range(p)) if ranks is None else tuple(ranks)
    if {*ranks} != {*range(p)}:
        raise ValueError(
            f"a forward schedule of {p} ranks with stages on the ranks {ranks}; name each of 0 to "
            f"{p - 1}, and no other"
        )
    taken: set[tuple[int, int]] = set()
    starts, start = [], 0
    for _ in range(m):
        while any((rank, start + s) in taken for s, rank in enumerate(ranks)):
            start += 1
        taken |= {(rank, start + s) for s, rank in enumerate(ranks)}
        starts.append(start)
    forward = np.array(starts)[None, :] + np.arange(len(ranks))[:, None]
    return from_ticks("forward", forward=forward, ranks=ranks, bound=[1] * p)


_BUILDERS: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "zb-h1": zero_bubble,
    "zb-v": zb_v,
    "dualpipev": dualpipe_v,
}
NAMES = ("1f1b", "gpipe", "zb-h1", "interleaved", "zb-v", "dualpipev")
"""The names of the schedules that train."""


def make_schedule(
    name: str, p: int, m: int, memory: str | None = None, chunks: int | None = None
) -> Schedule:
    """Return a schedule by its name.

    Args:
      name: "1f1b", "gpipe", "zb-h1", "interleaved", "zb-v", "dualpipev", or "forward" for
        evaluation.
      p: the number of ranks: the length of the mesh axis `pipe`.
      m: the number of micro-batches.
      memory: "fast" or "low" for "1f1b", as in `one_f_one_b`; None means "fast". The others have no
        such setting.
      chunks: the number of stages on each rank, for "interleaved" and for "forward", where stage s
        is on rank s % p. None means 2 for "interleaved" and 1 for "forward". "zb-v" and "dualpipev"
        always have 2, stage s on rank s and on rank 2 p - 1 - s; the others 1.

    Raises:
      ValueError: the name is unknown, `memory` or `chunks` has no such value or no effect, there is
        no rank or no micro-batch, or "dualpipev" has fewer than 2 p micro-batches.
    """
    if name not in (*NAMES, "forward"):
        raise ValueError(
            f"schedule {name!r} is unknown; use one of {', '.join(map(repr, NAMES))}, 'forward', "
            "or a Schedule of your own"
        )
    if memory is not None and name != "1f1b":
        raise ValueError(
            f"memory={memory!r} has no effect on schedule {name!r}; leave it out, or use '1f1b'"
        )
    if chunks is not None and name not in ("interleaved", "forward"):
        raise ValueError(
            f"chunks={chunks} has no effect on schedule {name!r}; leave it out, or use "
            "'interleaved'"
        )
    if name == "1f1b":
        return one_f_one_b(p, m, "fast" if memory is None else memory)
    if name == "interleaved":
        return interleaved(p, m, 2 if chunks is None else chunks)
    if name == "forward":
        if chunks is not None and chunks < 1:
            raise ValueError(f"chunks={chunks} for schedule 'forward'; use 1 or more")
        return forward_only(p, m, cyclic(p, 1 if chunks is None else chunks))
    return _BUILDERS[name](p, m)


def _earliest(ready: np.ndarray, taken: set[int]) -> np.ndarray:
    """Return a tick for each op, in order: the first free one from its tick in `ready` on.

    The ticks are added to `taken`.
    """
    placed, tick = [], 0
    for first in ready.tolist():
        tick = max(tick, first)
        while tick in taken:
            tick += 1
        taken.add(tick)
        placed.append(tick)
    return np.array(placed)
