"""`Splits`: what a user says about the axes that split the work on one row."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from zeroxla.config.values import patterns

AXES = ("tensor", "context", "expert")

ByPattern = Mapping[str, int | None]
"""By a regular expression: the dim that is split, counted from the end if it is negative; None for
what stays whole."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SplitPin:
    """One thing that a user says.

    Attributes:
      of: whether it is about leaves or about arrays.
      axis: the axis.
      pattern: a regular expression that is searched in names.
      dim: the dim that is split; None for what stays whole.
    """

    of: Literal["leaves", "arrays"]
    axis: str
    pattern: str
    dim: int | None

    def finds(self, name: str) -> bool:
        """Return whether the expression is found in a name."""
        return re.search(self.pattern, name) is not None

    def __str__(self) -> str:
        return f"Splits({self.of}={{{self.axis!r}: {{{self.pattern!r}: {self.dim}}}}})"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """Pins what is split over the axes `tensor`, `context` and `expert`, and along which dim. The
    rest is searched.

    Raises:
      ValueError: an axis is unknown, a pattern is no regular expression, or a dim no number.
    """

    leaves: Mapping[str, ByPattern] = dataclasses.field(default_factory=dict)
    """By axis and regular expression, searched in leaf paths such as "h/attn/c_attn/kernel": the
    dim along which matching leaves are split, or None for leaves that stay whole."""

    arrays: Mapping[str, ByPattern] = dataclasses.field(default_factory=dict)
    """By axis and regular expression: the dim along which arrays are split, or None for arrays that
    stay whole. The expression is searched in names given by `jax.ad_checkpoint.checkpoint_name`,
    and in scopes such as "h/attn" (`jax.named_scope`, and Flax's modules). A scope stands for the
    arrays that are computed in it and read outside of it."""

    def __post_init__(self) -> None:
        for name in ("leaves", "arrays"):
            value = getattr(self, name)
            if not isinstance(value, Mapping) or not all(
                isinstance(each, Mapping) for each in value.values()
            ):
                raise ValueError(
                    f"Splits({name}={value!r}): give a mapping of axes to mappings of regular "
                    f"expressions, such as {{'tensor': {{'wte': 0}}}}"
                )
            for axis, pins in value.items():
                _check(name, axis, pins)
            object.__setattr__(self, name, {axis: dict(pins) for axis, pins in value.items()})

    def pins(self, of: Literal["leaves", "arrays"], axis: str) -> list[SplitPin]:
        """Return what is said about leaves or arrays on one axis."""
        found: ByPattern = getattr(self, of).get(axis, {})
        return [SplitPin(of=of, axis=axis, pattern=p, dim=d) for p, d in found.items()]

    def useless(self, axes: Sequence[str]) -> list[str]:
        """Return the pins of other axes than these, as text."""
        others = [axis for axis in AXES if axis not in axes]
        return [str(pin) for of in _KINDS for axis in others for pin in self.pins(of, axis)]


_KINDS: tuple[Literal["leaves", "arrays"], ...] = ("leaves", "arrays")


def _check(name: str, axis: str, pins: Mapping[str, Any]) -> None:
    if axis not in AXES:
        raise ValueError(f"Splits({name}={{{axis!r}: ...}}): use one of the axes {AXES}")
    patterns(f"Splits.{name}", tuple(pins))
    for pattern, dim in pins.items():
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
            raise ValueError(
                f"Splits({name}={{{axis!r}: {{{pattern!r}: {dim!r}}}}}): give the number of a dim, "
                "or None for what stays whole"
            )
