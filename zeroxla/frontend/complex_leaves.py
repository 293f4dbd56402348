"""Complex parameters, stored and trained as their real and imaginary parts.

A complex leaf becomes a dict `{"complex": {"real": x, "imaginary": y}}` in the parameters of a
state. Every part of zeroxla sees two real leaves; the model sees the complex one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.frontend.base import Adapted, Caching, Tree, with_axes_of_one

COMPLEX, PARTS = "complex", ("real", "imaginary")


def split_complex(tree: Any) -> Any:
    """Return nested dicts in which each complex array is a dict of its real and imaginary part."""
    if isinstance(tree, dict):
        return {name: split_complex(part) for name, part in tree.items()}
    if not hasattr(tree, "dtype") or not jnp.issubdtype(tree.dtype, jnp.complexfloating):
        return tree
    return {COMPLEX: dict(zip(PARTS, (tree.real, tree.imag), strict=True))}


def join_complex(tree: Any) -> Any:
    """Return nested dicts in which `split_complex` is undone.

    Parts in 16 bits become float32 first, as there is no complex number of 16-bit parts. NumPy
    arrays give NumPy arrays.
    """
    if not isinstance(tree, dict):
        return tree
    if tree.keys() != {COMPLEX} or not _is_pair(tree[COMPLEX]):
        return {name: join_complex(part) for name, part in tree.items()}
    real, imaginary = (tree[COMPLEX][name] for name in PARTS)
    if isinstance(real, np.ndarray):
        return real + 1j * imaginary
    dtype = jnp.promote_types(real.dtype, jnp.float32)
    return jax.lax.complex(real.astype(dtype), imaginary.astype(dtype))


def _is_pair(tree: Any) -> bool:
    return isinstance(tree, dict) and tree.keys() == set(PARTS)


def with_real_parameters(adapted: Adapted) -> Adapted:
    """Return the model as functions of real parameters."""

    def init(key: jax.Array, batch: Any) -> tuple[Tree, Tree]:
        params, model_state = with_axes_of_one(adapted.init)(key, batch)
        return split_complex(params), model_state

    def joined(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, *args, **kwargs: function(join_complex(params), *args, **kwargs)

    caching = adapted.caching
    return dataclasses.replace(
        adapted,
        init=init,
        loss=joined(adapted.loss),
        apply=None if adapted.apply is None else joined(adapted.apply),
        bound=None if adapted.bound is None else joined(adapted.bound),
        caching=caching and Caching(empty=caching.empty, apply=joined(caching.apply)),
    )
