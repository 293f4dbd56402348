"""Checks of single options: dtypes, counts, regular expressions."""

from __future__ import annotations

import contextlib
import numbers
import re
from typing import Any

import jax.numpy as jnp

_DTYPES = ("float32", "bfloat16", "float16")


def dtype_name(name: str, value: Any, optional: bool) -> str | None:
    """Return the canonical name of a dtype option.

    Args:
      name: the option's name, for messages.
      value: what the user gave: anything that `jnp.dtype` takes.
      optional: whether None is allowed, and stays None.

    Raises:
      ValueError: the value is not float32, bfloat16 or float16.
    """
    if value is None and optional:
        return None
    with contextlib.suppress(TypeError):
        value = jnp.dtype(value).name
    if value not in _DTYPES:
        raise ValueError(f"{name}={value!r} is not supported; use one of {_DTYPES}")
    return value


def whole_number(name: str, value: Any, least: int) -> int | None:
    """Return a count option as an int; None stays None.

    Raises:
      ValueError: the value is not a whole number, or below `least`.
    """
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():  # people write 5e8
        value = int(value)
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of {least} or more")
    return int(value)


def patterns(name: str, value: Any) -> tuple[str, ...]:
    """Return one pattern or several as a tuple.

    Raises:
      ValueError: a pattern is no regular expression.
    """
    found = (value,) if isinstance(value, str) else tuple(value)
    for pattern in found:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name}={pattern!r} is no regular expression: {error}") from None
    return found
