"""DoRA: the norms of an adapted leaf's columns, by which its trained magnitudes are divided.

DoRA (arXiv 2402.09353) uses a leaf W as m * V / |V| with V = W + scaling A . B. A column of V is
what one output is multiplied by: |V| is taken over the inputs C, and m and |V| have one number for
each output O (and layer). The norm counts as a constant in the gradient (section 4.3 there).

Products are computed as (x . W + (scaling x . A) . B) * m / |V|, and V is never made: the squared
norm of a column is |W|^2 + b . (2 scaling A^T W + scaling^2 A^T A b), with b its column of B.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

SMALLEST = float(jnp.finfo(jnp.float32).tiny)
"""The least squared norm by which a magnitude is divided. A column of zeros stays one."""


def column_norms(values: jax.Array, inputs: Sequence[int]) -> jax.Array:
    """Return the norm of each column of a leaf, float32, of the dims that are no inputs.

    Args:
      values: the leaf.
      inputs: the dims that products sum over.
    """
    return jnp.sqrt(jnp.sum(jnp.square(values.astype(jnp.float32)), axis=tuple(inputs)))


def squared_norms_with(
    values: jax.Array, a: jax.Array, b: jax.Array, inputs: Sequence[int], scaling: float
) -> jax.Array:
    """Return the squared norms of the columns of W + scaling A . B, float32[outputs], at least
    `SMALLEST`.

    Args:
      values: W, one layer, with its dims in any order.
      a: A [*inputs, rank], with the inputs in the order that they have in W.
      b: B [rank, *outputs], with the outputs in the order that they have in W.
      inputs: the dims of W that products sum over.
      scaling: the factor of A . B.

    The error is a few roundings of (|W| + scaling |A . B|)^2, in float32.

    Cost: reads W once, and multiplies it by `rank` rows.
    """
    w, a, b = (x.astype(jnp.float32) for x in (values, a, b))
    inputs, of_a = tuple(inputs), tuple(range(a.ndim - 1))

    def dot(x: jax.Array, y: jax.Array, dims: tuple[Sequence[int], Sequence[int]]) -> jax.Array:
        return lax.dot_general(x, y, (dims, ((), ())), precision=lax.Precision.HIGHEST)

    own, crossed = jnp.sum(jnp.square(w), axis=inputs), dot(a, w, (of_a, inputs))
    squared = dot(dot(a, a, (of_a, of_a)), b, ((1,), (0,)))
    added = jnp.sum(b * (2 * scaling * crossed + scaling**2 * squared), axis=0)
    return jnp.maximum(own + added, SMALLEST)


def scales(magnitudes: jax.Array, squared_norms: jax.Array) -> jax.Array:
    """Return m / |V|, float32; the norms count as constants in the gradient."""
    return magnitudes.astype(jnp.float32) * lax.rsqrt(lax.stop_gradient(squared_norms))
