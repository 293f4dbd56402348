"""Reads one section of a DeepSpeed configuration against a table of its keys."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
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
_NOT_DEEPSPEEDS = "it is no key of DeepSpeed's, which passes over it too"
_SAME_AS: dict[str, str] = {
    "max_grad_norm": "gradient_clipping",
    "learning_rate": "optimizer.params.lr",
    "lr": "optimizer.params.lr",
    "mixed_precision": "bf16.enabled or fp16.enabled",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "zero_stage": "zero_optimization.stage",
}
"""Keys of programs around DeepSpeed, and the key of DeepSpeed's that means the same."""
_FLAGS: dict[Any, bool] = {
    **dict.fromkeys(("true", "yes", "on", "1", 1), True),
    **dict.fromkeys(("false", "no", "off", "0", 0), False),
}
"""Other forms of true and false that DeepSpeed's sections take."""


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Collects what a reader finds in a configuration, so that one message tells all of it."""

    ignored: dict[str, str] = dataclasses.field(default_factory=dict)
    """The dotted keys that have no effect, or another one than in DeepSpeed, and the reasons."""

    problems: list[Exception] = dataclasses.field(default_factory=list)
    """What makes the configuration unusable."""

    auto: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The values of keys that are written "auto", by their dotted names."""

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Note an error of the block, instead of raising it."""
        try:
            yield
        except (ValueError, NotImplementedError) as error:
            self.problems.append(error)

    def check(self) -> None:
        """Raise all problems as one error.

        Raises:
          NotImplementedError: zeroxla lacks all that is asked for in vain.
          ValueError: there are other problems.
        """
        if not self.problems:
            return
        lacks = all(isinstance(problem, NotImplementedError) for problem in self.problems)
        texts = list(dict.fromkeys(map(str, self.problems)))
        text = texts[0]
        if len(texts) > 1:
            text = "\n".join([f"{len(texts)} problems:", *(f"  {line}" for line in texts)])
        raise (NotImplementedError if lacks else ValueError)(text)


def take(
    values: Mapping[str, Any],
    keys: Mapping[str, Key],
    found: Findings,
    place: tuple[str, ...] = (),
    *,
    lenient: bool = False,
) -> dict[str, Any]:
    """Return the honoured keys of a section, nested sections included, and note the others.

    Args:
      values: the section as the user wrote it.
      keys: the known keys.
      found: receives the keys that have no effect and the problems: a key that is unknown or
        written twice, a value of the wrong type or out of range. Such keys are left out.
      place: the names of the sections around this one, the outermost first, and its own.
      lenient: whether an unknown key is noted as one without effect, unless it is nearly a known
        one. At the top level and in sections without effect nothing depends on it.
    """
    taken: dict[str, Any] = {}
    for name, value in values.items():
        dotted = ".".join((*place, str(name)))
        if name not in keys:
            with found.collected():
                found.ignored[dotted] = _unknown(str(name), keys, place, lenient)
            continue
        key = keys[name]
        if value == "auto" and dotted in found.auto:
            value = found.auto[dotted]
        if value is None:
            continue
        if value == "auto":
            found.ignored[dotted] = AUTO
            continue
        try:
            value = checked(dotted, value, key)
        except ValueError as error:
            found.problems.append(error)
            continue
        if key.reason is not None:
            if not _asks_for_nothing(value, key):
                found.ignored[dotted] = key.reason
            if key.keys is not None:  # only for typing errors: the section has no effect
                inner = dataclasses.replace(found, ignored={})
                take(value, key.keys, inner, (*place, name), lenient=True)
            continue
        if key.keys is not None:
            inner = dataclasses.replace(found, ignored={})
            value = take(value, key.keys, inner, (*place, name))
            off = "enabled" in key.keys and not value.get("enabled", False)
            # A section that is switched off asks for nothing, but its "auto" is listed.
            found.ignored.update({k: v for k, v in inner.ignored.items() if not off or v == AUTO})
        target = key.alias or name
        if target in taken:
            both = [k for k in values if k == target or (k in keys and keys[k].alias == target)]
            two = f"{' and '.join(map(repr, both))} are two names of one key; write one"
            found.problems.append(ValueError(two))
        taken[target] = value
    return taken


def _unknown(name: str, keys: Mapping[str, Key], place: tuple[str, ...], lenient: bool) -> str:
    """Return the reason why an unknown key has no effect. Comments pass in any section.

    Raises:
      ValueError: the key is nearly a real one, so it was meant to have an effect; or its section
        takes no other keys.
    """
    if name.startswith(("_", "/", "#", "$")) or "comment" in name.lower():
        return "it is a comment"
    near = nearest(name, keys, cutoff=0.8)
    dotted = ".".join((*place, name))
    if near is not None:
        raise ValueError(
            f"{dotted!r} is no key of DeepSpeed's; the nearest one is {'.'.join((*place, near))!r}"
        )
    if not lenient:
        raise ValueError(
            f"{dotted!r} is no key of DeepSpeed's; {'.'.join(place)!r} takes "
            f"{', '.join(sorted(keys))}"
        )
    same = f"; {_SAME_AS[name]} is the key for it" if name in _SAME_AS else ""
    return f"{_NOT_DEEPSPEEDS}{same}"


def checked(dotted: str, value: Any, key: Key) -> Any:
    """Return a value, converted to the type of its key. Numbers and flags may be strings.

    Raises:
      ValueError: the value has another type, or is out of range.
    """
    if key.kind in ("count", "number"):
        number = number_of(value)
        if not _is_number(number) or not _in_range(number, key):
            raise ValueError(f"{dotted}={value!r} must be {_range(key)}")
        return int(number) if key.kind == "count" else float(number)
    if key.kind == "flag":
        flag = flag_of(value)
        if flag is None:
            raise ValueError(f"{dotted}={value!r} must be {_WORDS['flag']}")
        return flag
    if key.kind == "pair" and isinstance(value, list | tuple):
        value = [number_of(x) for x in value]
    pair = isinstance(value, list | tuple) and len(value) == 2
    fits = {
        "text": isinstance(value, str),
        "pair": pair and all(_is_number(x) and 0 <= x < 1 for x in value),
        "section": isinstance(value, Mapping),
        "any": True,
    }[key.kind]
    if not fits:
        words = _WORDS[key.kind] + (" in [0, 1)" if key.kind == "pair" else "")
        raise ValueError(f"{dotted}={value!r} must be {words}")
    return value


def nearest(name: str, known: Iterable[Any], *, cutoff: float = 0.0) -> Any:
    """Return the known name that is most similar to `name`, capitals aside.

    Args:
      name: a name that somebody wrote.
      known: the names that there are.
      cutoff: the least similarity of a near name, from 0 to 1. A name that begins one of the known
        names, with 5 characters or more, is near at any cutoff.

    Returns:
      The nearest name; None if none is near.
    """
    names = {str(k).lower(): k for k in known}
    if close := difflib.get_close_matches(name.lower(), names, n=1, cutoff=cutoff):
        return names[close[0]]
    begun = [k for text, k in names.items() if len(name) >= 5 and text.startswith(name.lower())]
    return begun[0] if begun else None


def number_of(value: Any) -> Any:
    """Return the number that a string says, such as "5e8"; any other value as it is."""
    if not isinstance(value, str):
        return value
    with contextlib.suppress(ValueError):
        return float(value)
    return value


def flag_of(value: Any) -> bool | None:
    """Return true or false in any form that DeepSpeed takes; None for another value."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _FLAGS.get(value.strip().lower())
    return _FLAGS.get(value) if isinstance(value, int) else None


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
