"""The layouts that a model asks for itself, which a training step ignores.

A step splits every parameter over the whole mesh, and every batch by rows. Sharding annotations in
a model wish for something else, and mostly name axes of another mesh. JAX refuses them here, as it
refuses any layout over axes that `shard_map` has taken. So while a model is traced they have no
effect.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import sharding_impls

from zeroxla.program.compat.redirect import redirect

_ignores: Any = jax.make_user_context(False)
"""Whether layouts are ignored. It is a part of the keys under which JAX keeps its traces."""

_found: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("layouts", default=None)


@contextlib.contextmanager
def layouts_ignored() -> Iterator[set[str]]:
    """Return a context in which the layouts of a traced program have no effect.

    These are `with_sharding_constraint`, `reshard`, and the argument `out_sharding` of JAX's
    functions.

    Yields:
      The names of the axes in the layouts that were ignored so far. A layout in a trace that JAX
      has kept is not seen again.
    """
    _answer_for_layouts()
    outer, found = _found.get(), set()
    token = _found.set(found)
    try:
        with _ignores(True):
            yield found
    finally:
        _found.reset(token)
        if outer is not None:
            outer.update(found)


def note_layout(layout: Any) -> None:
    """Add the axes of a layout, or of a pytree of layouts, to those that `layouts_ignored`
    yields."""
    found = _found.get()
    if found is None:
        return
    for leaf in jax.tree.leaves(layout, is_leaf=lambda x: isinstance(x, jax.P)):
        spec = getattr(leaf, "spec", leaf)
        if isinstance(spec, jax.P):
            names = jax.tree.leaves(tuple(spec))
            found.update(name for name in names if isinstance(name, str))


def with_layout(x: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """Give an array a layout of zeroxla's own, which is not ignored."""
    with _ignores(False):
        return jax.lax.with_sharding_constraint(x, sharding)


@functools.cache
def _answer_for_layouts() -> None:
    """Let JAX's functions that give an array a layout do nothing where layouts are ignored."""

    def constraint(own: Any, x: Any, shardings: Any) -> Any:
        if not _ignores.value:
            return own(x, shardings)
        note_layout(shardings)
        return x

    def argument(own: Any, sharding: Any, *args: Any, **kwargs: Any) -> Any:
        if not _ignores.value:
            return own(sharding, *args, **kwargs)
        note_layout(sharding)
        return None

    redirect(jax.lax.with_sharding_constraint, constraint)
    redirect(jax.sharding.reshard, constraint)
    # Every function with an argument out_sharding reads it through this one.
    redirect(sharding_impls.canonicalize_sharding, argument)
