"""Wire formats as the command line writes them, such as `int4/128,rotated`."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroxla.config.wire_format import WireFormat

NONE = "none"
"""The word for a wire that is not quantized."""

_WORDS: dict[str, tuple[str, Any]] = {
    "rotated": ("hadamard", 32),
    "stochastic": ("rounding", "stochastic"),
    "asymmetric": ("symmetric", False),
    "bound": ("scale", "bound"),
    "mse": ("scale", "mse"),
    "deepspeed": ("scale", "deepspeed"),
    "float32": ("scale_dtype", "float32"),
    "bfloat16": ("scale_dtype", "bfloat16"),
}


def wire_fields(name: str, text: str) -> dict[str, Any] | None:
    """Return the fields of a `WireFormat` from a text, without importing JAX.

    Args:
      name: the flag, for errors.
      text: `none`, or bits and block such as `int8/256`, then words with commas between them.

    Returns:
      The fields; None for `none`.

    Raises:
      ValueError: the text is in another form, or has a word that is unknown or excludes another.

    >>> wire_fields("--weight-wire", "int4/128,rotated")
    {'bits': 4, 'block': 128, 'hadamard': 32}
    """
    first, *words = (word.strip() for word in text.split(","))
    if first == NONE and not words:
        return None
    match = re.fullmatch(r"int([48])(?:/([1-9]\d*))?", first)
    if match is None:
        raise ValueError(
            f"{name} {text}: a format is {NONE}, or int8 or int4 with a block, such as int8/256 or "
            "int4/128,rotated"
        )
    fields: dict[str, Any] = {"bits": int(match[1])}
    if match[2]:
        fields["block"] = int(match[2])
    for word in words:
        if word not in _WORDS:
            nearest = difflib.get_close_matches(word, _WORDS, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ValueError(f"{name} {text}: {word!r} is none of {', '.join(_WORDS)}{hint}")
        field, value = _WORDS[word]
        if fields.get(field, value) != value:
            raise ValueError(f"{name} {text}: {word} excludes {fields[field]}; leave one out")
        fields[field] = value
    return fields


def wire_format(name: str, text: str) -> WireFormat | None:
    """Return the format that a text names; None for `none`.

    Raises:
      ValueError: as `wire_fields` and `WireFormat`.
    """
    from zeroxla.config.wire_format import WireFormat  # here, because --help need not wait for JAX

    fields = wire_fields(name, text)
    if fields is None:
        return None
    try:
        return WireFormat(**fields)
    except ValueError as error:
        raise ValueError(f"{name} {text}: {error}") from error
