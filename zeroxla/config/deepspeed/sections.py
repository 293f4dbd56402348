"""Reads one section of a DeepSpeed configuration against a table of its keys."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["flag", "count", "number", "text", "pair", "section", "any"]
_WORDS: dict[str, str] = {
    "flag": "true or false",
    "text": "a string",
    "pair": "a list of two numbers",
    "section": "an object of keys and values",
}
AUTO = (
    '"auto" counts as not written: the program that starts DeepSpeed would have filled it in, and '
    "here the default of the option stands"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of DeepSpeed: the values that it takes, and whether zeroxla honours it."""

    kind: Kind
    reason: str | None = None
    """Why the key has no effect here. None means that it is honoured."""

    same: tuple[Any, ...] = ()
    """Values that ask for what happens here anyway, or for nothing. They are not listed as
    ignored."""

    least: float | None = 0
    """Smallest value of a count or number. None sets no limit."""

    above: float | None = None
    """Bound that a number must exceed. None sets no bound."""

    below: float | None = None
    """Bound that a number must stay below. None sets no bound."""

    keys: Mapping[str, Key] | None = None
    """Known keys of a section. None takes any key."""

    alias: str | None = None
    """Current name of a key that DeepSpeed has under two names. None means its own name."""


def take(
    values: Mapping[str, Any],
    keys: Mapping[str, Key],
    ignored: dict[str, str],
    place: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the honoured keys of a section, nested sections included, and list the others.

    Args:
      values: the section as the user wrote it.
      keys: the known keys.
      ignored: receives the dotted keys that have no effect, and the reason for each.
      place: the names of the sections around this one, the outermost first, and its own.

    Raises:
      ValueError: a key is unknown or written twice, or its value has the wrong type or is out of
        range.
    """
    taken: dict[str, Any] = {}
    for name, value in values.items():
        dotted = ".".join((*place, str(name)))
        if name not in keys:
            raise ValueError(
                f"{dotted!r} is no key of DeepSpeed's; the nearest one is "
                f"{'.'.join((*place, nearest(str(name), keys)))!r}"
            )
        key = keys[name]
        if value is None:
            continue
        if value == "auto":
            ignored[dotted] = AUTO
            continue
        value = checked(dotted, value, key)
        if key.reason is not None:
            if not _asks_for_nothing(value, key):
                ignored[dotted] = key.reason
            if key.keys is not None:
                take(value, key.keys, {}, (*place, name))
            continue
        if key.keys is not None:
            listed: dict[str, str] = {}
            value = take(value, key.keys, listed, (*place, name))
            off = "enabled" in key.keys and not value.get("enabled", False)
            # A section that is switched off asks for nothing, but its "auto" is listed.
            ignored.update({k: v for k, v in listed.items() if not off or v == AUTO})
        target = key.alias or name
        if target in taken:
            both = [k for k in values if k == target or (k in keys and keys[k].alias == target)]
            raise ValueError(f"{' and '.join(map(repr, both))} are two names of one key; write one")
        taken[target] = value
    return taken


def checked(dotted: str, value: Any, key: Key) -> Any:
    """Return a value, converted to the type of its key.

    Raises:
      ValueError: the value has another type, or is out of range.
    """
    if key.kind in ("count", "number"):
        if not _is_number(value) or not _in_range(value, key):
            raise ValueError(f"{dotted}={value!r} must be {_range(key)}")
        return int(value) if key.kind == "count" else float(value)
    pair = isinstance(value, list | tuple) and len(value) == 2
    fits = {
        "flag": isinstance(value, bool),
        "text": isinstance(value, str),
        "pair": pair and all(_is_number(x) and 0 <= x < 1 for x in value),
        "section": isinstance(value, Mapping),
        "any": True,
    }[key.kind]
    if not fits:
        words = _WORDS[key.kind] + (" in [0, 1)" if key.kind == "pair" else "")
        raise ValueError(f"{dotted}={value!r} must be {words}")
    return value


def nearest(name: str, known: Any) -> str:
    """Return the known name that is most similar to `name`, capitals aside."""
    names = {str(k).lower(): k for k in known}
    return names[difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.0)[0]]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _in_range(value: float, key: Key) -> bool:
    return (
        (key.kind != "count" or value == int(value))
        and (key.least is None or value >= key.least)
        and (key.above is None or value > key.above)
        and (key.below is None or value < key.below)
    )


def _range(key: Key) -> str:
    words = "a whole number" if key.kind == "count" else "a number"
    bounds = [f"of {key.least:g} or more"] if key.least is not None and key.above is None else []
    bounds += [f"above {key.above:g}"] if key.above is not None else []
    bounds += [f"below {key.below:g}"] if key.below is not None else []
    return " ".join([words, " and ".join(bounds)]).strip()


def _asks_for_nothing(value: Any, key: Key) -> bool:
    if isinstance(value, Mapping):
        switch = key.keys is not None and "enabled" in key.keys
        device = value.get("device") if key.keys is not None and "device" in key.keys else None
        off = value.get("enabled", False if switch else None) is False or device == "none"
        return not value or off or value in key.same
    # 1 == True in Python, but a flag of 1 is not True.
    return any(value == same and type(value) is type(same) for same in key.same)
