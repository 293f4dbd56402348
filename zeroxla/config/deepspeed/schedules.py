"""Makes DeepSpeed's learning rate schedulers: functions of the number of updates so far.

Formulas: `deepspeed/runtime/lr_schedules.py`. There a scheduler starts one call before its first
iteration and steps after each update. So the update with count k uses its iteration k - 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.config.deepspeed.sections import Findings, Key, nearest, take

Schedule = Callable[[Any], jax.Array]

_RESUME = {
    "last_batch_iteration": Key(
        kind="count",
        least=-1,
        reason="the state counts the updates, and checkpoints hold it",
        same=(-1,),
    )
}
_WARMUP = {
    "warmup_num_steps": Key(kind="count", least=1),
    "warmup_type": Key(kind="text"),
    **_RESUME,
}
_RATES = {"warmup_min_lr": Key(kind="number"), "warmup_max_lr": Key(kind="number")}
_TOTAL = {"total_num_steps": Key(kind="count", least=1)}
_SIZE, _STAIRS = Key(kind="count", least=1), Key(kind="count")

KEYS: dict[str, dict[str, Key]] = {
    "WarmupLR": {**_RATES, **_WARMUP},
    "WarmupDecayLR": {**_TOTAL, **_RATES, **_WARMUP},
    "WarmupCosineLR": {
        **_TOTAL,
        "warmup_min_ratio": Key(kind="number"),
        "cos_min_ratio": Key(kind="number"),
        **_WARMUP,
    },
    "OneCycle": {
        "cycle_min_lr": Key(kind="number"),
        "cycle_max_lr": Key(kind="number"),
        "decay_lr_rate": Key(kind="number"),
        "cycle_first_step_size": _SIZE,
        "cycle_second_step_size": Key(kind="count"),
        "cycle_first_stair_count": _STAIRS,
        "cycle_second_stair_count": _STAIRS,
        "decay_step_size": _STAIRS,
        "cycle_momentum": Key(kind="flag"),
        "cycle_min_mom": Key(kind="number", below=1),
        "cycle_max_mom": Key(kind="number", below=1),
        "decay_mom_rate": Key(kind="number"),
        **_RESUME,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": Key(kind="number"),
        "lr_range_test_step_size": _SIZE,
        "lr_range_test_step_rate": Key(kind="number"),
        "lr_range_test_staircase": Key(kind="flag"),
        **_RESUME,
    },
}
_TORCH = (
    "ChainedScheduler",
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LambdaLR",
    "LinearLR",
    "MultiStepLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "ReduceLROnPlateau",
    "SequentialLR",
    "StepLR",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scheduler:
    """A learning rate schedule, with a schedule of the first beta if that is cycled."""

    rate: Callable[[float], Schedule]
    """Returns, for the optimizer's own rate, the schedule of the rate."""

    momentum: Schedule | None = None
    """Schedule of the first beta; the second one is then 0.99. None does not cycle it."""


def make_scheduler(written: Mapping[str, Any], found: Findings) -> Scheduler | None:
    """Return the scheduler of the section `scheduler`; None if it names none.

    Raises:
      ValueError: the scheduler is unknown, or one of its parameters is unknown, missing or out of
        range.
      NotImplementedError: the scheduler is one of PyTorch's.
    """
    name = written.get("type")
    if name is None:
        if written.get("params"):
            found.ignored["scheduler.params"] = "scheduler.type is not written"
        return None
    if name in _TORCH:
        raise NotImplementedError(
            f"scheduler.type={name!r} is PyTorch's; take one of {', '.join(KEYS)}, or pass an "
            "optax optimizer with a schedule to make_step"
        )
    if name not in KEYS:
        raise ValueError(
            f"scheduler.type={name!r} is no scheduler of DeepSpeed's; the nearest one is "
            f"{nearest(name, KEYS)!r}"
        )
    raw = written.get("params", {})
    params = take(raw, KEYS[name], found, ("scheduler", "params"))
    for required in ("total_num_steps", "cycle_min_lr", "cycle_max_lr"):
        dotted, value = f"scheduler.params.{required}", raw.get(required)
        if required not in KEYS[name] or required in params:
            continue
        if value == "auto":
            raise ValueError(
                f'{dotted} is "auto", which stands for a number that the file does not have; say '
                f"from_deepspeed(..., auto={{{dotted!r}: NUMBER}}), or write it"
            )
        if value is None:
            raise ValueError(f"{dotted} is missing; {name} has no default for it")
        return None  # it was written wrong, which is noted
    make = {
        "WarmupLR": _warmup,
        "WarmupDecayLR": _warmup_decay,
        "WarmupCosineLR": _warmup_cosine,
        "OneCycle": _one_cycle,
        "LRRangeTest": _range_test,
    }
    return make[name](params)


def _iteration(count: Any) -> jax.Array:
    """Return DeepSpeed's iteration number of an update; the first two updates have 0."""
    return jnp.maximum(jnp.asarray(count, jnp.float32) - 1, 0)


def _rise(params: Mapping[str, Any]) -> tuple[int, Callable[[jax.Array], jax.Array]]:
    """Return the length of the warmup, and a function that maps an iteration to its progress from 0
    to 1."""
    steps = max(2, params.get("warmup_num_steps", 1000))
    kind = params.get("warmup_type", "log")
    if kind not in ("log", "linear"):
        raise ValueError(
            f"scheduler.params.warmup_type={kind!r}; the nearest known one is "
            f"{nearest(kind, ('log', 'linear'))!r}"
        )
    if kind == "log":
        return steps, lambda i: jnp.log(i + 1) / math.log(steps)
    return steps, lambda i: i / steps


def _warmup(params: Mapping[str, Any]) -> Scheduler:
    steps, rise = _rise(params)
    low = params.get("warmup_min_lr", 0.0)

    def rate(own: float) -> Schedule:
        high = params.get("warmup_max_lr", own)
        return lambda count: low + (high - low) * _held(_iteration(count), steps, rise, 1.0)

    return Scheduler(rate=rate)


def _warmup_decay(params: Mapping[str, Any]) -> Scheduler:
    steps, rise = _rise(params)
    total = params["total_num_steps"]
    low, high = params.get("warmup_min_lr", 0.0), params.get("warmup_max_lr", 0.001)

    def rate(count: Any) -> jax.Array:
        i = _iteration(count)
        left = jnp.maximum((total - i) / max(1, total - steps), 0.0)
        return low + (high - low) * _held(i, steps, rise, left)

    return Scheduler(rate=lambda own: rate)


def _warmup_cosine(params: Mapping[str, Any]) -> Scheduler:
    steps, rise = _rise(params)
    total = params["total_num_steps"]
    start, end = params.get("warmup_min_ratio", 0.0), params.get("cos_min_ratio", 0.0001)

    def ratio(count: Any) -> jax.Array:
        i = _iteration(count)
        along = jnp.minimum((i - steps + 1) / max(1, total - steps), 1.0)
        fall = jnp.maximum(end + (1 - end) * (1 + jnp.cos(jnp.pi * along)) / 2, 0.0)
        warming = _held(i, steps, lambda i: start + (1 - start) * rise(i), fall)
        # DeepSpeed's very first update has the rate 0, whatever the ratio.
        return jnp.where(jnp.asarray(count) == 0, 0.0, warming)

    return Scheduler(rate=lambda own: lambda count: own * ratio(count))


def _held(
    i: jax.Array, steps: int, rise: Callable[[jax.Array], jax.Array], after: jax.Array | float
) -> jax.Array:
    return jnp.where(i < steps, rise(i), after)


def _one_cycle(params: Mapping[str, Any]) -> Scheduler:
    first = params.get("cycle_first_step_size", 2000)
    second = params.get("cycle_second_step_size", first)
    stairs = params.get("cycle_first_stair_count", 0)
    stairs = stairs, params.get("cycle_second_stair_count", stairs)
    total, interval = first + second, params.get("decay_step_size", 0)

    def cycle(count: jax.Array) -> jax.Array:
        """Return the height of the cycle, which goes from 0 to 1 and back."""
        place = count % total

        def part(done: jax.Array, size: int, stairs: int) -> jax.Array:
            # Integer arithmetic, as a float just below a stair would give the stair before.
            return (done * stairs // size) / stairs if stairs else done / size

        rising = part(place, first, stairs[0])
        return jnp.where(place <= first, rising, part(total - place, max(1, second), stairs[1]))

    def decayed(count: jax.Array, rate: float) -> jax.Array | float:
        return 1 + rate * (count - total) / interval if interval and rate else 1.0

    low, high = params["cycle_min_lr"], params["cycle_max_lr"]

    def rate(count: Any) -> jax.Array:
        count = jnp.asarray(count, jnp.int32)
        after = low / decayed(count, params.get("decay_lr_rate", 0.0))
        return jnp.where(count <= total, low + (high - low) * cycle(count), after)

    least, most = params.get("cycle_min_mom", 0.8), params.get("cycle_max_mom", 0.9)

    def momentum(count: Any) -> jax.Array:
        count = jnp.asarray(count, jnp.int32)
        after = most * decayed(count, params.get("decay_mom_rate", 0.0))
        cycled = jnp.where(count <= total, most - (most - least) * cycle(count), after)
        # DeepSpeed's very first update has the lowest beta, where the cycle has the highest.
        return jnp.where(count == 0, least, cycled)

    cycled = params.get("cycle_momentum", True)
    return Scheduler(rate=lambda own: rate, momentum=momentum if cycled else None)


def _range_test(params: Mapping[str, Any]) -> Scheduler:
    low, size = (
        params.get("lr_range_test_min_lr", 1e-3),
        params.get("lr_range_test_step_size", 2000),
    )
    step, stairs = params.get("lr_range_test_step_rate", 1.0), params.get("lr_range_test_staircase")

    def rate(count: Any) -> jax.Array:
        count = jnp.asarray(count, jnp.int32)
        return low * (1 + step * (count // size if stairs else count / size))

    return Scheduler(rate=lambda own: rate)
