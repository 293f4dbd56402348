"""Which argument of a model's call is which, by its usual names."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from zeroxla.frontend.cache_argument import is_cache

TOKENS = ("input_ids", "tokens", "token_ids", "inputs", "ids", "decoder_input_ids", "x")
"""Usual names of the tokens; they are the call's first argument if that is nothing else."""

EVALUATION: Mapping[str, bool] = {
    "deterministic": True,
    **dict.fromkeys(("train", "training", "is_train", "is_training"), False),
    **dict.fromkeys(("enable_dropout", "use_dropout"), False),
}
"""Usual names of the flags that tell training from evaluation, with their values in evaluation."""

_OTHERS = {"encoder", "cross", "head", "loss", "label", "labels", "target", "targets"}
_TABLES = {"embedding", "embeddings", "embed", "emb", "encoding", "encodings", "bias"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CallNames:
    """The names of a call's arguments, by what they are; None where the call has no such one.

    Attributes:
      tokens: the token numbers; None if they are the first argument.
      positions: the tokens' positions.
      mask: the mask of real tokens.
      segments: the segments of packed rows.
      cache: the cache.
      flags: the flags that tell training from evaluation.
      needed: those of the flags that must be given to evaluate.
      required: all arguments without a default.
      unknown: those of them, tokens aside, that are none of the above.
    """

    tokens: str | None
    positions: str | None
    mask: str | None
    segments: str | None
    cache: str | None
    flags: tuple[str, ...]
    needed: tuple[str, ...]
    required: frozenset[str]
    unknown: tuple[str, ...]

    @staticmethod
    def of(signature: inspect.Signature) -> CallNames:
        """Read the names of a call's signature, `self` aside."""
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = {n: p for n, p in signature.parameters.items() if p.kind not in several}
        roles = {name: _role(name) for name in parameters}

        def named(role: str) -> str | None:
            return next((name for name, r in roles.items() if r == role), None)

        first = next(iter(parameters), None)
        leads = first is None or roles[first] is None
        tokens = None if leads else next((n for n in TOKENS if n in parameters), None)
        required = {n for n, p in parameters.items() if p.default is p.empty}
        known = {name for name, role in roles.items() if role is not None}
        known |= {x for x in (first if leads else tokens,) if x is not None}
        flags = tuple(name for name in parameters if name in EVALUATION)

        def is_needed(name: str) -> bool:
            default: Any = parameters[name].default
            return name in required or (isinstance(default, bool) and default != EVALUATION[name])

        return CallNames(
            tokens=tokens,
            positions=named("positions"),
            mask=named("mask"),
            segments=named("segments"),
            cache=named("cache"),
            flags=flags,
            needed=tuple(filter(is_needed, flags)),
            required=frozenset(required),
            unknown=tuple(name for name in parameters if name in required - known),
        )


def _role(name: str) -> str | None:
    """Return what an argument is, or None if its name says nothing about that."""
    if name in EVALUATION:
        return "flag"
    low = name.lower()
    words = set(low.split("_"))
    if words & _OTHERS:
        return None
    if is_cache(name):
        return "cache"
    if ("position" in low or "pos" in words) and not words & _TABLES:
        return "positions"
    if "mask" in low:
        return "mask"
    if words & {"segment", "segments", "segmentation"}:
        return "segments"
    return None
