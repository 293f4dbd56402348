"""`memory_bytes`: reads the memory that a device has for a step."""

from __future__ import annotations

import numbers
import re
from typing import Any

UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
DEVICE = "device"


def memory_bytes(name: str, value: Any) -> int | str | None:
    """Return a memory option as bytes; "device" and None stay.

    Args:
      name: the option's name, for messages.
      value: a number of bytes, or a text such as "24GB" or "1.5 GiB".

    Raises:
      ValueError: the value is none of these, or not above 0.

    >>> memory_bytes("memory", "24GB")
    24000000000
    """
    if value is None or value == DEVICE:
        return value
    number: float | None = None
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str):
        units = {unit.lower(): size for unit, size in UNITS.items()}
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", value.lower())
        if found is not None and (found[2] or "b") in units:
            number = float(found[1]) * units[found[2] or "b"]
    if number is None or not 1 <= number < float("inf"):
        raise ValueError(
            f"{name}={value!r} is no amount of memory; give bytes as a number, a text such as "
            f"'24GB' (units: {', '.join(UNITS)}), or 'device' for all that a device has"
        )
    return int(number)
