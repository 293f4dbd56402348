"""Makes schedules: one forward one backward (1F1B), GPipe, zero bubble (ZB-H1), forward alone.

p is the number of stages, s a stage, m the number of micro-batches, i a micro-batch.
"""

from __future__ import annotations

import numpy as np

from zeroxla.pipeline.schedule import NONE, Schedule, check_sizes


def one_f_one_b(p: int, m: int, memory: str = "fast") -> Schedule:
    """Return one forward, one backward (1F1B): each backward comes as early as it can.

    Args:
      p: the number of stages.
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
    s, i = _grid(p, m)
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
    return _build(name, p, m, forward=forward, backward=backward, bound=bound)


def gpipe(p: int, m: int) -> Schedule:
    """Return all forwards, then all backwards, both in the order of the micro-batches.

    Args:
      p: the number of stages.
      m: the number of micro-batches.

    Returns:
      The schedule. It takes 2(m + p - 1) ticks, and each stage holds all m micro-batches.

    Raises:
      ValueError: there is no stage or no micro-batch.

    References:
      Huang et al., GPipe, arXiv 1811.06965. The paper runs backwards in reverse order. Here they
      run in the order of 1F1B, so that gradients are summed in the same order.
    """
    s, i = _grid(p, m)
    backward = (m + p - 1) + i + (p - 1 - s)
    return _build("gpipe", p, m, forward=i + s, backward=backward, bound=[m] * p)


def zero_bubble(p: int, m: int) -> Schedule:
    """Return ZB-H1: gradients of inputs go up at once, gradients of leaves fill free ticks.

    A tick is a forward, an input gradient or a weight gradient. The forward of i is at tick
    3 i + s, when its input arrives. Input gradients come as early as they can in the ticks between
    forwards. Weight gradients take the first tick that is left, which is always the very next one.

    Args:
      p: the number of stages.
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
    s, i = _grid(p, m)
    forward = 3 * i + s
    backward, weight = np.zeros_like(forward), np.zeros_like(forward)
    for stage in reversed(range(p)):
        taken = set(forward[stage].tolist())
        # The last stage has its gradient as soon as its forward is done.
        sent = forward[stage] if stage == p - 1 else backward[stage + 1]
        backward[stage] = _earliest(sent + 1, taken)
        weight[stage] = _earliest(backward[stage] + 1, taken)
    bound = [p - stage for stage in range(p)]
    return _build("zb-h1", p, m, forward=forward, backward=backward, weight=weight, bound=bound)


def forward_only(p: int, m: int) -> Schedule:
    """Return forwards alone, for evaluation: the forward of i at tick i + s.

    Args:
      p: the number of stages.
      m: the number of micro-batches.

    Returns:
      The schedule. It takes m + p - 1 ticks, and a stage holds one micro-batch.

    Raises:
      ValueError: there is no stage or no micro-batch.
    """
    s, i = _grid(p, m)
    return _build("forward", p, m, forward=i + s, bound=[1] * p)


_BUILDERS = {"gpipe": gpipe, "zb-h1": zero_bubble, "forward": forward_only}
NAMES = ("1f1b", *_BUILDERS)


def make_schedule(name: str, p: int, m: int, memory: str | None = None) -> Schedule:
    """Return a schedule by its name.

    Args:
      name: "1f1b", "gpipe", "zb-h1", or "forward" for evaluation.
      p: the number of stages.
      m: the number of micro-batches.
      memory: "fast" or "low" for "1f1b", as in `one_f_one_b`; None means "fast". The others have no
        such setting.

    Raises:
      ValueError: the name is unknown, `memory` is unknown or has no effect, or there is no stage or
        no micro-batch.
    """
    if name == "1f1b":
        return one_f_one_b(p, m, "fast" if memory is None else memory)
    if name not in _BUILDERS:
        raise ValueError(
            f"schedule {name!r} is unknown; use one of {', '.join(map(repr, NAMES))}, or a "
            "Schedule of your own"
        )
    if memory is not None:
        raise ValueError(
            f"memory={memory!r} has no effect on schedule {name!r}; leave it out, or use '1f1b'"
        )
    return _BUILDERS[name](p, m)


def _grid(p: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the stages [p, 1] and the micro-batches [1, m], to be broadcast."""
    check_sizes(p, m)
    return np.arange(p)[:, None], np.arange(m)[None, :]


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


def _build(
    name: str,
    p: int,
    m: int,
    *,
    forward: np.ndarray,
    backward: np.ndarray | None = None,
    weight: np.ndarray | None = None,
    bound: list[int],
) -> Schedule:
    """Make a schedule from the tick of each micro-batch on each stage, [stages, microbatches]."""
    ticks = 1 + max(int(when.max()) for when in (forward, backward, weight) if when is not None)
    tables = []
    for when in (forward, backward, weight):
        table = np.full((ticks, p), NONE, np.int32)
        if when is not None:
            table[when, np.arange(p)[:, None]] = np.arange(m)[None, :]
        tables.append(table)
    return Schedule(
        name=name,
        stages=p,
        microbatches=m,
        forward=tables[0],
        backward=tables[1],
        weight=tables[2],
        stash_bound=tuple(min(most, m) for most in bound),
    )
