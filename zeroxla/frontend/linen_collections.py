"""The collections of a linen module: parameters, state between steps, and what is neither."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax.core import unfreeze

from zeroxla.frontend.base import Tree, to_flat, to_nested
from zeroxla.program.paths import Path

INTERMEDIATES = "intermediates"
"""The collection that `sow` mostly fills."""
PERTURBATIONS = "perturbations"
"""The collection that `perturb` makes. Without it `perturb` does nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Extras:
    """What the collections of a module hold beside parameters and state.

    Attributes:
      outputs: the collections that `sow` fills.
      constants: leaves that hold no arrays, such as names and settings, by path. They stay as they
        were made.
    """

    outputs: tuple[str, ...]
    constants: dict[Path, Any]

    def variables(self, params: Tree, state: Tree) -> Tree:
        """Return the variables that the module is called with."""
        merged = to_nested({**to_flat(state), **self.constants})
        return {"params": params, **merged}

    def state(self, changed: Mapping[str, Any]) -> Tree:
        """Return the state in the collections that a call has changed."""
        return to_nested(
            {
                path: leaf
                for path, leaf in to_flat(unfreeze(dict(changed))).items()
                if path[0] not in (*self.outputs, INTERMEDIATES) and path not in self.constants
            }
        )


def sort_collections(variables: Mapping[str, Any]) -> tuple[Tree, Tree, Extras]:
    """Return the parameters of a module that was initialised, its state, and the rest.

    Raises:
      ValueError: a leaf of the parameters is no array.
    """
    collections = unfreeze(dict(variables))
    params = collections.pop("params", {})
    collections.pop(INTERMEDIATES, None)
    for path, leaf in to_flat(params).items():
        if not hasattr(leaf, "dtype"):
            raise ValueError(
                f"parameter {'/'.join(path)} is a {type(leaf).__name__}; a parameter must be "
                "one array: declare each array with a self.param of its own"
            )
    outputs = tuple(name for name, c in collections.items() if is_output(c))
    leaves = to_flat({name: c for name, c in collections.items() if name not in outputs})
    constants = {path: leaf for path, leaf in leaves.items() if not holds_arrays(leaf)}
    state = {path: leaf for path, leaf in leaves.items() if path not in constants}
    return params, to_nested(state), Extras(outputs=outputs, constants=constants)


def is_output(collection: Tree) -> bool:
    """Say whether `sow` filled the collection: its values are tuples, one item for each call.

    If they were kept as state, they would grow by one item in each step.
    """
    return any(isinstance(leaf, tuple) for leaf in to_flat(collection).values())


def holds_arrays(leaf: Any) -> bool:
    """Return whether a leaf is an array or a number, or a pytree of such."""
    parts = jax.tree.leaves(leaf)
    return bool(parts) and all(hasattr(x, "dtype") or isinstance(x, (int, float)) for x in parts)
