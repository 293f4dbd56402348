"""The phases of a train step, and which of them an instruction belongs to, by its scopes."""

from __future__ import annotations

import re

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
    "deal",
    "other",
)
"""The phases, in the order of a step. Only pipelines have `move`, which brings leaves to their
stages and gradients back, and `send`, which brings activations and their gradients to neighbours.
Only axes that split the work on one row have `deal`, which brings shards to the devices that
compute with their part, and gradients back. Only updates that need matrices whole have `owners`,
which brings each matrix to the device that computes it, and the result back.
"""


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
    words = re.findall(r"\w+", path.rpartition("/")[0])
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
