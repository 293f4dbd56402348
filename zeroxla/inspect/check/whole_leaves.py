"""Check: what every device stores whole."""

from __future__ import annotations

import math
from typing import Any

import jax

from zeroxla.inspect.check.check_report import CheckResult
from zeroxla.inspect.check.checked_model import CheckedModel
from zeroxla.program.paths import paths_of
from zeroxla.program.report import format_bytes
from zeroxla.program.trace import Constant
from zeroxla.program.walk import walk
from zeroxla.wire.leaves import Leaf

NAME = "whole leaves"

MOST_SHARE = 0.01
"""The largest share of the parameters that may be whole without being a fault. Leaves with fewer
elements than there are devices do not count: they do not grow with the model."""

MOST_BESIDES = 0.25
"""The largest size of the model state, or of arrays that the model closes over, relative to the
parameters, that is no notice."""

_NAMED = 4  # leaves that a result names


def check_whole_leaves(checked: CheckedModel) -> CheckResult:
    """Look for parameters, other collections and constants that no mesh splits.

    A leaf with fewer elements than there are devices stays whole, and so does one all of whose dims
    a loop slices. The latter are a fault if they hold more than a hundredth of the parameters. The
    model's other collections, and arrays that it closes over, are whole on each device; they are a
    notice if they are more than a quarter as large as the parameters.
    """
    total = sum(leaf.elements for leaf in checked.layout)
    whole = [leaf for leaf in checked.layout if leaf.placement.dim is None]
    large = [leaf for leaf in whole if leaf.elements >= checked.mesh.size]
    share = sum(leaf.elements for leaf in large) / max(total, 1)
    if share > MOST_SHARE:
        return CheckResult(
            name=NAME,
            verdict="fault",
            found=f"each device stores {share:.1%} of the parameters whole, with their optimizer "
            f"state: {_few([_words(leaf) for leaf in large])}",
            remedy="give the leaf a dim that no loop slices: reshape the leaf to several layers or "
            "places in each turn, or index it inside the loop by a counter, so that it is gathered "
            "before the loop",
        )
    for arrays, what, remedy in (
        (
            {"/".join(path): x for path, x in paths_of(checked.model_state)},
            "other collections than parameters (model state)",
            "make large arrays parameters and freeze them (ZeroConfig(frozen=...)), or compute "
            "them in the model",
        ),
        (
            _constants(checked),
            "arrays that the loss closes over",
            "make them parameters and freeze them, pass them in the batch, or compute them in the "
            "model",
        ),
    ):
        elements = sum(math.prod(x.shape) for x in arrays.values())
        if elements > MOST_BESIDES * total:
            largest = sorted(arrays, key=lambda name: -math.prod(arrays[name].shape))
            names = _few([f"{name} {_shape(arrays[name])}" for name in largest])
            return CheckResult(
                name=NAME,
                verdict="notice",
                found=f"each device holds {what} whole, {elements / total:.0%} of the size of the "
                f"parameters: {names}",
                remedy=remedy,
            )
    found = f"all {len(checked.layout.leaves)} leaves are split"
    if whole:
        size = format_bytes(4 * sum(leaf.elements for leaf in whole))
        found = (
            f"{len(checked.layout.leaves) - len(whole)} leaves are split, {len(whole)} whole on "
            f"each device ({size}): {_few([_words(leaf) for leaf in whole])}"
        )
    return CheckResult(name=NAME, verdict="ok", found=found)


def _words(leaf: Leaf) -> str:
    """Return a leaf, and why it stays whole."""
    placement = leaf.placement
    if not placement.shape:
        why = "a scalar"
    elif leaf.elements == 0:
        why = "empty"
    elif len(placement.layer_dims) == len(placement.shape):
        why = "a loop slices all its dims"
    else:
        why = "fewer elements than devices"
    return f"{leaf.path} {_shape(placement)} ({why})"


def _shape(x: Any) -> str:
    return "x".join(map(str, x.shape)) or "scalar"


def _constants(checked: CheckedModel) -> dict[str, jax.Array]:
    """Return the arrays that the loss closes over, each once, named by number."""
    found: dict[int, Any] = {}
    for visit in walk(checked.programs[True], "cpu"):
        for operand in visit.equation.inputs:
            if isinstance(operand, Constant) and getattr(operand.value, "shape", ()):
                found[id(operand.value)] = operand.value
    return {f"constant {i}": x for i, x in enumerate(found.values())}


def _few(words: list[str]) -> str:
    more = len(words) - _NAMED
    return ", ".join(words[:_NAMED]) + (f" and {more} more" if more > 0 else "")
