"""Checks and shapes of parameters of a model with adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeroxla.frontend.lora.leaf_plan import LoraPlan
from zeroxla.program.paths import Path, paths_of


def check_adapted(plan: LoraPlan, have: Mapping[Path, Sequence[int]], what: str) -> None:
    """Check that shapes belong to a base and its adapters.

    Args:
      plan: the model's plan.
      have: natural shapes, by path.
      what: the owner of the shapes, for the message.

    Raises:
      ValueError: a leaf is missing, unknown or has another shape.
    """
    want = plan.stored_shapes()
    for path in sorted(want.keys() | have.keys()):
        if have.get(path) != want.get(path):
            raise ValueError(
                f"{what} is not of this model with adapters: {'/'.join(path)} has the shape "
                f"{have.get(path)}, and that of the model is {want.get(path)}; give natural shapes "
                "of a base and its adapters, as zeroxla.full_params returns them"
            )


def shapes_of(params: Any) -> dict[Path, tuple[int, ...]]:
    """Return the shape of each leaf by path."""
    return {path: tuple(x.shape) for path, x in paths_of(params)}
