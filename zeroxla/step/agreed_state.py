"""Makes the model's state equal on all devices, after each has computed with its own rows.

It runs inside `shard_map`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.program.trace import is_float
from zeroxla.wire.collectives import Collectives
from zeroxla.wire.vectors import as_vector, as_words, from_vector, from_words


def agree(model_state: Any, overwritten: Collection[int], collectives: Collectives) -> Any:
    """Return the model state that all devices share: floats are averaged, the rest is rank 0's.

    A leaf that is overwritten with its gradient becomes the largest of all. Histories of largest
    values are then those of the whole batch, and scales, which follow from earlier histories, are
    equal anyway.

    Args:
      model_state: this device's state, whole.
      overwritten: the numbers of the leaves that are overwritten with their gradients.
      collectives: of the mesh.
    """
    leaves, tree = jax.tree.flatten(model_state)
    maxima = {i: leaves[i] for i in overwritten}
    floats = {
        i: (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
        for i, x in enumerate(leaves)
        if is_float(x.dtype) and i not in maxima
    }
    others = {i: x for i, x in enumerate(leaves) if i not in {*floats, *maxima}}
    largest = from_vector(collectives.max(as_vector(maxima)), maxima)
    sums = from_vector(collectives.sum(as_vector(floats)), floats)
    means = {i: [x / collectives.world for x in parts] for i, parts in sums.items()}
    agreed = {
        i: (lax.complex(*x) if len(x) == 2 else x[0]).astype(leaves[i].dtype)
        for i, x in means.items()
    }
    first = collectives.rank() == 0
    words = jax.tree.map(lambda x: jnp.where(first, as_words(x), 0), others)
    words = from_vector(collectives.sum(as_vector(words, jnp.uint32)), words)
    agreed.update({i: x.astype(maxima[i].dtype) for i, x in largest.items()})
    agreed.update({i: from_words(w, others[i]) for i, w in words.items()})
    return tree.unflatten([agreed[i] for i in range(len(leaves))])
