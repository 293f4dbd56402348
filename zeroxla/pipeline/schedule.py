"""Which stage works on which micro-batch in which tick, as tables.

All stages advance tick by tick. Within one tick a stage does a forward, then a backward, then a
weight gradient, each of them or none. What it sends is there for its neighbour in the next tick:
activations for the stage after it, gradients for the stage before it.

p is the number of stages, s a stage, m the number of micro-batches, i a micro-batch.
"""

from __future__ import annotations

import dataclasses

import numpy as np

NONE = -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """Tables of micro-batches, int32 [ticks, stages], -1 for none.

    Built by the functions below or by hand; `check` proves that one can run.

    Attributes:
      name: for reports.
      stages: p, at least 1.
      microbatches: m, at least 1.
      forward: what a stage does the forward of.
      backward: what it does the backward of: the whole one, or where `weight` has entries the
        gradient of its input alone. No entries: a schedule for evaluation.
      weight: what it does the gradient of its leaves of.
      stash_bound: per stage the most micro-batches that it promises to hold at a time, or None.

    Raises:
      ValueError: a number, a shape or an entry is out of range.
    """

    name: str
    stages: int
    microbatches: int
    forward: np.ndarray = dataclasses.field(repr=False)
    backward: np.ndarray = dataclasses.field(repr=False)
    weight: np.ndarray = dataclasses.field(repr=False)
    stash_bound: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _validate_sizes(self.stages, self.microbatches)
        for field in ("forward", "backward", "weight"):
            object.__setattr__(self, field, self._table(field))
        if self.stash_bound is not None and len(self.stash_bound) != self.stages:
            raise ValueError(
                f"schedule {self.name!r} has {self.stages} stages and {len(self.stash_bound)} "
                "stash bounds; give one for each stage, or None"
            )

    @property
    def ticks(self) -> int:
        return len(self.forward)

    @property
    def trains(self) -> bool:
        """Whether there is any backward or weight gradient."""
        return bool((self.backward != NONE).any() or self.splits)

    @property
    def splits(self) -> bool:
        """Whether weight gradients have entries of their own."""
        return bool((self.weight != NONE).any())

    def _table(self, field: str) -> np.ndarray:
        given = np.asarray(getattr(self, field))
        shape = (len(self.forward), self.stages)
        if given.shape != shape or not np.issubdtype(given.dtype, np.integer):
            raise ValueError(
                f"schedule {self.name!r}: table {field!r} is {given.dtype} {list(given.shape)}; "
                f"make it int32 [ticks, stages] = {list(shape)}, like 'forward'"
            )
        wrong = np.argwhere((given < NONE) | (given >= self.microbatches))
        if len(wrong):
            tick, stage = wrong[0].tolist()
            raise ValueError(
                f"schedule {self.name!r}: {field} of micro-batch {given[tick, stage]} on stage "
                f"{stage} at tick {tick}, but there are {self.microbatches}; use 0 to "
                f"{self.microbatches - 1}, or {NONE} for none"
            )
        table = given.astype(np.int32)  # a copy, so that it can be made read-only
        table.flags.writeable = False
        return table


def one_f_one_b(p: int, m: int, memory: str = "fast") -> Schedule:
    """Return one forward, one backward (1F1B): a micro-batch goes back as soon as it can.

    Args:
      p: stages.
      m: micro-batches.
      memory: "fast": a tick holds one forward and one backward: forward of i at tick i + s,
        backward at i + 2(p - 1) - s. "low": a tick holds one or the other, in DeepSpeed's order:
        p - s - 1 forwards to warm up, then forward and backward in turn.

    Returns:
      The schedule. "fast": m + 2(p - 1) ticks, of which the first p - 1 are forwards alone and the
      last p - 1 backwards alone; a stage holds at most min(2(p - s) - 1, m) micro-batches. "low":
      2(m + p - 1) ticks; a stage holds at most min(p - s, m).

    Raises:
      ValueError: an unknown `memory`, or fewer than one stage or micro-batch.

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
      p: stages.
      m: micro-batches.

    Returns:
      The schedule: 2(m + p - 1) ticks; each stage holds all m micro-batches.

    Raises:
      ValueError: fewer than one stage or micro-batch.

    References:
      Huang et al., GPipe, arXiv 1811.06965. There backwards run in reverse order; here in the order
      of 1F1B, so that gradients are summed in the same order.
    """
    s, i = _grid(p, m)
    backward = (m + p - 1) + i + (p - 1 - s)
    return _build("gpipe", p, m, forward=i + s, backward=backward, bound=[m] * p)


def zero_bubble(p: int, m: int) -> Schedule:
    """Return ZB-H1: gradients of inputs go up at once, those of leaves take ticks left over.

    A tick is a forward, an input gradient or a weight gradient. Forward of i is at tick 3 i + s, so
    that it meets its input as it arrives; input gradients come as early as they can in the ticks
    between forwards; weight gradients take what is left, which is always the very next tick.

    Args:
      p: stages.
      m: micro-batches.

    Returns:
      The schedule: 3 m + 2(p - 1) ticks. A stage holds at most min(p - s, m) micro-batches, from
      their forward to their weight gradient, the bound of 1F1B. With that bound no table is
      shorter: the last stage does each micro-batch's three ticks in one run, and its last input
      gradient has p - 1 hops to go before stage 0 ends with a weight gradient. (The paper lets
      every stage hold p, and with that reaches 3 m + p - 1.)

    Raises:
      ValueError: fewer than one stage or micro-batch.

    References:
      Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.2.
    """
    s, i = _grid(p, m)
    forward = 3 * i + s
    backward, weight = np.zeros_like(forward), np.zeros_like(forward)
    for stage in reversed(range(p)):
        taken = set(forward[stage].tolist())
        # On the last stage a gradient is there once its forward is done.
        sent = forward[stage] if stage == p - 1 else backward[stage + 1]
        backward[stage] = _earliest(sent + 1, taken)
        weight[stage] = _earliest(backward[stage] + 1, taken)
    bound = [p - stage for stage in range(p)]
    return _build("zb-h1", p, m, forward=forward, backward=backward, weight=weight, bound=bound)


def forward_only(p: int, m: int) -> Schedule:
    """Return forwards alone, for evaluation: forward of i at tick i + s.

    Args:
      p: stages.
      m: micro-batches.

    Returns:
      The schedule: m + p - 1 ticks; a stage holds one micro-batch.

    Raises:
      ValueError: fewer than one stage or micro-batch.
    """
    s, i = _grid(p, m)
    return _build("forward", p, m, forward=i + s, bound=[1] * p)


_BUILDERS = {"gpipe": gpipe, "zb-h1": zero_bubble, "forward": forward_only}
NAMES = ("1f1b", *_BUILDERS)


def make_schedule(name: str, p: int, m: int, memory: str | None = None) -> Schedule:
    """Return a schedule by its name.

    Args:
      name: "1f1b", "gpipe", "zb-h1", or "forward" for evaluation.
      p: stages.
      m: micro-batches.
      memory: of "1f1b", as in `one_f_one_b`, "fast" if None; the others have no such setting.

    Raises:
      ValueError: an unknown name, an unknown `memory` or one without effect, or fewer than one
        stage or micro-batch.
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


def times(table: np.ndarray, microbatches: int) -> np.ndarray:
    """Return the tick of each micro-batch on each stage, int32 [stages, microbatches], -1 for none.

    The inverse of a table that holds nothing twice on a stage.
    """
    when = np.full((table.shape[1], microbatches), NONE, np.int32)
    tick, stage = np.nonzero(table != NONE)
    when[stage, table[tick, stage]] = tick
    return when


def _validate_sizes(stages: int, microbatches: int) -> None:
    if stages < 1 or microbatches < 1:
        raise ValueError(
            f"a schedule cannot have {stages} stages and {microbatches} micro-batches; "
            "use at least 1 of each"
        )


def _grid(p: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    _validate_sizes(p, m)
    return np.arange(p)[:, None], np.arange(m)[None, :]


def _earliest(ready: np.ndarray, taken: set[int]) -> np.ndarray:
    """Place ops in their order, each in the first free tick from `ready` on, and take it."""
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
    """Turn ticks [stages, microbatches] into tables."""
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
