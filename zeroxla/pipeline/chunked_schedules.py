"""Schedules with several stages on a rank: interleaved 1F1B, ZB-V and DualPipeV.

A rank's stages are its chunks. p is the number of ranks, v that of chunks, m that of micro-batches;
s is a stage, d its rank, i a micro-batch.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from zeroxla.pipeline.schedule import Schedule, check_sizes
from zeroxla.pipeline.schedule_tables import Entry, Fill, from_ticks, grid, place

PUT_OFF = 3
"""The most weight gradients that a rank puts off in ZB-V."""


def interleaved(p: int, m: int, chunks: int = 2) -> Schedule:
    """Return interleaved 1F1B: stage s on rank s % p, and micro-batches in groups of p.

    A rank does a group's forwards in its first chunk, then in its second, and so on; backwards in
    the opposite order. A tick is a forward and a backward.

    Args:
      p: the number of ranks.
      m: the number of micro-batches; the last group may have fewer than p.
      chunks: the number v of stages of a rank, at least 2.

    Returns:
      The schedule. If p divides m, it takes m v + p v + p - 2 ticks, the first p v - 1 of which are
      forwards alone, the last p v - 1 backwards alone. In lockstep that is as long as m + (p - 1)/v
      forwards and backwards of a whole rank. Rank d holds at most p (v + 1) - 2 d - 1 inputs.

    Raises:
      ValueError: there are fewer than two chunks, no rank or no micro-batch.

    References:
      Narayanan et al., arXiv 2104.04473, section 2.2, here with a forward and a backward in a tick.
    """
    if chunks < 2:
        raise ValueError(
            f"chunks={chunks} for schedule 'interleaved'; use 2 or more, or '1f1b' for one stage "
            "on each rank"
        )
    check_sizes(p, m)
    s, i = grid(p * chunks, m)
    (chunk, d), (group, r) = np.divmod(s, p), np.divmod(i, p)
    start = group * p * chunks + r
    forward = start + chunk * p + d
    backward = start + (p * chunks - 1) + (chunks - 1 - chunk) * p + (p - 1 - d)
    bound = [p * (chunks + 1) - 2 * rank - 1 for rank in range(p)]
    ranks = cyclic(p, chunks)
    return from_ticks("interleaved", forward=forward, backward=backward, ranks=ranks, bound=bound)


def zb_v(p: int, m: int) -> Schedule:
    """Return ZB-V: stages down the ranks and up again, and one op of a rank in a tick.

    Rank d has the stages d and 2 p - 1 - d, so the first rank has the last stage. A tick is a
    forward, an input gradient or a weight gradient. Forwards and input gradients have a fixed
    order. Where a rank would wait it does a weight gradient, the oldest that was put off.

    Args:
      p: the number of ranks.
      m: the number of micro-batches.

    Returns:
      The schedule. For m >= 2 p it takes 6 m + p - 1 + max(p - 3, 0) ticks. None takes fewer than
      6 m + p - 1, as the last rank has 6 m ops and begins in tick p - 1. A rank puts off at most 3
      weight gradients; up to p of them, each more would save a tick. It holds at most 2 p inputs of
      chunks whose forward it has done, and one or two more that have arrived.

    Raises:
      ValueError: there is no rank or no micro-batch.

    References:
      Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362: ZB-V's places and
      its stash. The paper puts off more weight gradients.
    """
    check_sizes(p, m)
    ranks = down_and_up(p)
    orders: list[list[Entry]] = []
    for d in range(p):
        (f0, b0, _), (f1, b1, _) = _ops(d), _ops(2 * p - 1 - d)
        above = p - 1 - d
        order = [f0] * (2 * above) + [f0, f1] * (d + 1)
        order += [b1, f1] * above
        order += [b1, f0, b0, f1] * max(m - 2 * p + d + 1, 0)
        order += [b1, b0, f1] * above
        order += [b1, b0] * (d + 1) + [b0] * above
        # With few micro-batches the parts are longer than these, and their ends are left out.
        count: Counter[tuple[str, int]] = Counter()
        orders.append([])
        for op in order:
            count[op] += 1
            if count[op] <= m:
                orders[d].append((op,))
    when = place(orders, ranks, m, fill=Fill(put_off=PUT_OFF, held=2 * p))
    bound = [2 * p + (1 if d in (0, p - 1) else 2) for d in range(p)]
    return from_ticks("zb-v", **when, ranks=ranks, bound=bound)


def dualpipe_v(p: int, m: int) -> Schedule:
    """Return DualPipeV: forwards of one chunk and backwards of the other in the same ticks.

    Rank d has the stages d and 2 p - 1 - d, so the first rank has the last stage. The last weight
    gradients of a rank are put off, to fill the ticks in which it would wait.

    Args:
      p: the number of ranks.
      m: the number of micro-batches, at least 2 p.

    Returns:
      The schedule. A rank holds at most 2 p + 1 inputs of a chunk, and rank d puts off at most
      d + 1 weight gradients.

    Raises:
      ValueError: there are fewer than 2 p micro-batches, or no rank.

    References:
      DeepSeek-AI, https://github.com/deepseek-ai/DualPipe, `dualpipev.py`: the order of a rank. A
      backward whose weight gradient follows at once is one tick here.
    """
    check_sizes(p, m)
    if m < 2 * p:
        raise ValueError(
            f"schedule 'dualpipev' of {p} ranks takes at least {2 * p} micro-batches, and there "
            f"are {m}; use more micro-batches, or 'zb-v'"
        )
    ranks = down_and_up(p)
    orders: list[list[Entry]] = []
    for d in range(p):
        (f0, b0, w0), (f1, b1, w1) = _ops(d), _ops(2 * p - 1 - d)
        above = p - 1 - d
        order: list[Entry] = [(f0,)] * (2 * above) + [(f0,), (f1,)] * (d + 1)
        order += [(b1, w1), (f1,)] * above
        order += [(f0, b1, w1), (f1, b0, w0)] * (m - 2 * p + d + 1)
        order += [(b1, w1), (f1, b0, w0)] * above
        # Of these backwards the second half puts its weight gradients off.
        backwards = [(b1, w1), (b0, w0)] * (d + 1)
        order += backwards[: d + 1] + [(b,) for b, _ in backwards[d + 1 :]]
        late = [(w,) for _, w in backwards[d + 1 :]] + [(w0,)] * above
        for w in late[:above]:
            order += [w, (b0,)]
        orders.append(order + late[above:])
    when = place(orders, ranks, m)
    return from_ticks("dualpipev", **when, ranks=ranks, bound=[2 * p + 1] * p)


def cyclic(p: int, chunks: int) -> tuple[int, ...]:
    """Return the ranks of stages that go round: stage s on rank s % p."""
    return tuple(range(p)) * chunks


def down_and_up(p: int) -> tuple[int, ...]:
    """Return the ranks of stages that go down and up again: 0, 1, ..., p - 1, p - 1, ..., 0."""
    return (*range(p), *reversed(range(p)))


def _ops(stage: int) -> tuple[tuple[str, int], tuple[str, int], tuple[str, int]]:
    """Return the forward, the backward and the weight gradient of a stage."""
    return ("forward", stage), ("backward", stage), ("weight", stage)
