"""The options of a training setup."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import re
from collections.abc import Sequence

import jax.numpy as jnp

_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """How a model is sharded, gathered, reduced and stepped.

    The master copy of every leaf, the optimizer's arithmetic and all sums over devices are float32.
    Counts of elements are DeepSpeed's; the option it is called there is named with each field.
    """

    compute_dtype: str = "float32"
    """Dtype in which leaves travel and the model computes: float32, bfloat16 or float16. Floating
    leaves of the batch are cast to it too. float16 brings dynamic loss scaling."""

    reduce_dtype: str | None = None
    """Dtype in which gradients travel; float32 if None. (DeepSpeed: communication_data_type.)"""

    accumulate: int = 1
    """Micro-batches per step; the batch's leading dim holds all of them.
    (gradient_accumulation_steps)"""

    unit_elements: int | None = None
    """Most elements gathered together; a leaf larger than that is a unit of its own. None: one
    repeated block of the model, else 4 Mi elements."""

    prefetch_bucket: int | None = None
    """Most elements gathered ahead of their use, the next unit's or the next turn's included. None:
    0 on CPUs, where a collective blocks anyway, and on other devices what holds the next unit.
    (stage3_prefetch_bucket_size)"""

    max_live_parameters: int = 0
    """Most elements kept gathered for a later use. (stage3_max_live_parameters)"""

    max_reuse_distance: int = 0
    """A leaf is kept for its next use if at most this many elements are gathered in between.
    (stage3_max_reuse_distance)"""

    persistence_threshold: int = 100_000
    """Leaves of at most this many elements are gathered once at the start of a step and kept whole
    until its end; master and optimizer state are split like any other's.
    (stage3_param_persistence_threshold)"""

    model_persistence_cap: int | None = None
    """Most elements of all such leaves together. (stage3_model_persistence_threshold)"""

    frozen: str | Sequence[str] = ()
    """Regular expressions, searched in leaf paths such as "h_0/attn/kernel": matching leaves get no
    gradient and no optimizer state."""

    init_loss_scale: float = 2.0**15
    """First loss scale of float16 computation. (initial_scale_power)"""

    loss_scale_window: int = 1000
    """Finite steps after which the loss scale doubles; it halves at every step that is not.
    (loss_scale_window)"""

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value is None and name == "reduce_dtype":
                continue
            with contextlib.suppress(TypeError):
                value = jnp.dtype(value).name
            if value not in _DTYPES:
                raise ValueError(f"{name}={value!r} is not supported; use one of {_DTYPES}")
            object.__setattr__(self, name, value)
        for name, least in (
            ("accumulate", 1),
            ("unit_elements", 1),
            ("prefetch_bucket", 0),
            ("max_live_parameters", 0),
            ("max_reuse_distance", 0),
            ("persistence_threshold", 0),
            ("model_persistence_cap", 0),
            ("loss_scale_window", 1),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, float) and value.is_integer():  # 5e8, as people write it
                value = int(value)
                object.__setattr__(self, name, value)
            whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            if not whole or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number of {least} or more")
        if not self.init_loss_scale > 0:
            raise ValueError(f"init_loss_scale={self.init_loss_scale} must be above 0")
        patterns = (self.frozen,) if isinstance(self.frozen, str) else tuple(self.frozen)
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"frozen={pattern!r} is no regular expression: {error}") from None
        object.__setattr__(self, "frozen", patterns)

    def is_frozen(self, path: str) -> bool:
        """Return whether the leaf at `path` is frozen."""
        return any(re.search(pattern, path) for pattern in self.frozen)

    def unmatched(self, paths: Sequence[str]) -> list[str]:
        """Return the frozen patterns that match none of `paths`."""
        return [p for p in self.frozen if not any(re.search(p, path) for path in paths)]
