"""The phases of a train step, and which of them an instruction belongs to, by its scopes."""

from __future__ import annotations

import re
from collections.abc import Iterable

PHASES = (
    "deal",
    "move",
    "forward gather",
    "forward",
    "backward gather",
    "backward",
    "send",
    "reduce",
    "update",
    "owners",
    "other",
)
"""The phases, in the order of a step. Only pipelines have `move`, which brings leaves to their
stages and gradients back, and `send`, which brings activations and their gradients to neighbours.
Only axes that split the work on one row have `deal`, which brings shards to the devices that
compute with their part, and gradients back. Only updates that need matrices whole have `owners`,
which brings each matrix to the device that computes it, and the result back.
"""
_UNIT = re.compile(r"unit\[([^\]]*)\]")


def unit_scope(names: Iterable[str]) -> str:
    """Return the scope of a unit's gather or reduce, which profiles show.

    Args:
      names: the paths of its leaves, `a/b/c`.

    >>> unit_scope(["h/attn/c_attn/bias", "h/attn/c_proj/bias"])
    'unit[h.attn]'
    >>> unit_scope(["ln_f/bias", "wte/embedding"])
    'unit[ln_f.bias and 1 more]'
    """
    paths = [name.split("/") for name in names]
    common = []
    for parts in zip(*paths):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    if common or not paths:
        return f"unit[{'.'.join(common)}]"
    return f"unit[{'.'.join(paths[0])} and {len(paths) - 1} more]"


def unit_of(op_name: str) -> str:
    """Return the unit in a path of scopes, as `unit_scope` names it; "" if there is none.

    >>> unit_of("jit(train)/shard_map/unit[h.attn]/gather/all_gather")
    'h.attn'
    """
    found = _UNIT.search(op_name)
    return found[1] if found else ""


def phase_of(op_name: str, kind: str) -> str:
    """Return the phase of a train step that a collective belongs to.

    Args:
      op_name: a path of scopes and transforms with the primitive last, such as
        "jit(step)/transpose(jvp(forward))/checkpoint/rematted_computation/gather/all_gather". A
        merged collective has the form "prefix/(first:second)".
      kind: the HLO kind of the collective.

    Returns:
      One of `PHASES`; for a merged collective, its different phases joined by "+".
    """
    merged = re.fullmatch(r"(?P<prefix>.*?/)?\((?P<paths>.*)\)", op_name)
    if merged:
        prefix = merged["prefix"] or ""
        phases = {_phase(prefix + path, kind) for path in merged["paths"].split(":")}
        return "+".join(sorted(phases, key=PHASES.index))
    return _phase(op_name, kind)


def _phase(path: str, kind: str) -> str:
    # The last component is the primitive. It does not count: one primitive is named `gather`.
    words = re.findall(r"\w+", _UNIT.sub("", path).rpartition("/")[0])
    if "update" in words:
        return "owners" if "owners" in words else "update"
    backward = "backward" in words or "transpose" in words
    innermost = next((word for word in reversed(words) if word in ("gather", "reduce")), None)
    # The transpose of a plain gather is a reduce, but it keeps the gather's scope.
    if innermost == "reduce" or (innermost and kind in ("reduce-scatter", "all-reduce")):
        return "reduce"
    if innermost == "gather":
        return "backward gather" if backward else "forward gather"
    if backward:
        return "backward"
    return next((word for word in ("forward", "move", "send", "deal") if word in words), "other")
