"""The collections of a linen module: parameters, state between steps, and what is neither."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import unfreeze

from zeroxla.frontend.base import Tree, to_flat, to_nested
from zeroxla.program.compat import redirect
from zeroxla.program.paths import Path

INTERMEDIATES = "intermediates"
"""The collection that `sow` mostly fills."""
PERTURBATIONS = "perturbations"
"""The collection that `perturb` mostly makes. Without it `perturb` does nothing."""


SOWN = " (sown)"
"""Ends the name of a leaf that says that `sow` writes the leaf of the same name."""

_notes: Any = jax.make_user_context(False)
"""Whether `sow` leaves notes. It is a part of the keys under which JAX keeps its traces."""


@contextlib.contextmanager
def sown_noted() -> Iterator[None]:
    """Return a context in which `nn.Module.sow` leaves a note, and `nn.Module.perturb` does
    nothing.

    A note is a leaf beside the sown one, of the same value. What `sow` writes cannot be told by its
    type: a `reduce_fn` may make anything of it. A list of its calls would miss those in a trace
    that `nn.jit` has kept. A leaf takes the same way out of scans and traces as the sown one.
    """
    _answer_for_flax()
    with _notes(True):
        yield


@functools.cache
def _answer_for_flax() -> None:
    def sow(own: Any, module: Any, col: str, name: str, *args: Any, **kwargs: Any) -> bool:
        stored = own(module, col, name, *args, **kwargs)
        if stored and _notes.value:
            module.scope.put_variable(col, name + SOWN, module.scope.get_variable(col, name))
        return stored

    def perturb(own: Any, module: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return value if _notes.value else own(module, name, value, *args, **kwargs)

    redirect(nn.Module.sow, sow)
    redirect(nn.Module.perturb, perturb)


def sown_paths(variables: Mapping[str, Any]) -> frozenset[Path]:
    """Return the paths that the notes of `sow` name. Where it wrote a dict, this is the dict's."""
    found = set()
    for path in to_flat(unfreeze(dict(variables))):
        for i, name in enumerate(path):
            if name.endswith(SOWN):
                found.add((*path[:i], name.removesuffix(SOWN)))
    return frozenset(found)


@dataclasses.dataclass(slots=True)
class Extras:
    """What the collections of a module hold beside parameters and state.

    Attributes:
      sown: the paths that `sow` writes. They are outputs: each call begins without them.
      constants: leaves that hold no arrays, such as names and settings, by path. They stay as they
        were made.
    """

    sown: frozenset[Path]
    constants: dict[Path, Any]

    def variables(self, params: Tree, state: Tree) -> Tree:
        """Return the variables that the module is called with."""
        merged = to_nested({**to_flat(state), **self.constants})
        return {"params": params, **merged}

    def is_sown(self, path: Path) -> bool:
        """Return whether a leaf is an output of `sow`."""
        return any(path[:i] in self.sown for i in range(2, len(path) + 1))

    def state(self, changed: Mapping[str, Any]) -> Tree:
        """Return the state in the collections that a call has changed."""
        return to_nested(
            {
                path: leaf
                for path, leaf in to_flat(unfreeze(dict(changed))).items()
                if path[0] != INTERMEDIATES
                and not self.is_sown(path)
                and path not in self.constants
            }
        )


def sort_collections(variables: Mapping[str, Any]) -> tuple[Tree, Tree, Extras]:
    """Return the parameters of a module that was initialised, its state, and the rest.

    Args:
      variables: what a call within `sown_noted` has made.

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
    extras = Extras(sown=sown_paths(collections), constants={})
    state = {}
    for path, leaf in to_flat(collections).items():
        if any(name.endswith(SOWN) for name in path) or extras.is_sown(path):
            continue
        (state if holds_arrays(leaf) else extras.constants)[path] = leaf
    return params, to_nested(state), extras


def holds_arrays(leaf: Any) -> bool:
    """Return whether a leaf is an array or a number, or a pytree of such."""
    parts = jax.tree.leaves(leaf)
    return bool(parts) and all(hasattr(x, "dtype") or isinstance(x, (int, float)) for x in parts)
