"""Models by the names that people know."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from zeroxla.models import GPT, Llama

_GPT2 = {"vocab": 50257, "length": 1024}
_GPT3 = {"vocab": 50257, "length": 2048}
_LLAMA2 = {"vocab": 32000, "length": 4096}
_LLAMA3 = {"vocab": 128256, "length": 8192, "theta": 500000.0}


def _gpt(base: Mapping[str, Any], layers: int, width: int, heads: int) -> Callable[..., Any]:
    shape = {**base, "layers": layers, "width": width, "heads": heads}
    return lambda **more: GPT(**{**shape, **more})


def _llama(
    base: Mapping[str, Any], layers: int, width: int, heads: int, kv_heads: int, hidden: int
) -> Callable[..., Any]:
    shape = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads}
    shape = {**base, **shape, "hidden": hidden}
    return lambda **more: Llama.small(**{**shape, **more})


PRESETS: dict[str, tuple[Callable[..., Any], int]] = {
    name: (make, length)
    for make, length, name in (
        (_gpt(_GPT2, 12, 768, 12), 1024, "gpt2"),
        (_gpt(_GPT2, 24, 1024, 16), 1024, "gpt2-medium"),
        (_gpt(_GPT2, 36, 1280, 20), 1024, "gpt2-large"),
        (_gpt(_GPT2, 48, 1600, 25), 1024, "gpt2-xl"),
        (_gpt(_GPT3, 40, 5120, 40), 2048, "gpt3-13b"),
        (_gpt(_GPT3, 96, 12288, 96), 2048, "gpt3-175b"),
        (_llama(_LLAMA2, 32, 4096, 32, 32, 11008), 4096, "llama-7b"),
        (_llama(_LLAMA2, 40, 5120, 40, 40, 13824), 4096, "llama-13b"),
        (_llama(_LLAMA2, 80, 8192, 64, 8, 28672), 4096, "llama-70b"),
        (_llama(_LLAMA3, 32, 4096, 32, 8, 14336), 8192, "llama3-8b"),
        (_llama(_LLAMA3, 80, 8192, 64, 8, 28672), 8192, "llama3-70b"),
        (_llama(_LLAMA3, 126, 16384, 128, 8, 53248), 8192, "llama3-405b"),
    )
}
"""By name: (a function that makes the model from its other fields, the length of its context)."""


def model_named(name: str, **fields: Any) -> tuple[Any, int]:
    """Return a model and the length of its context.

    Args:
      name: the name of a preset.
      fields: fields of the module that replace the preset's own, such as `remat=True`.

    Raises:
      ValueError: no preset has that name. The message offers the nearest ones.
    """
    if name.lower() not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.4)
        words = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"there is no model {name!r}; {words}there are {', '.join(PRESETS)}")
    make, length = PRESETS[name.lower()]
    return make(**fields), fields.get("length", length)
