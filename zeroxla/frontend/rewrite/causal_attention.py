"""Causal attention that was found in a program, as the attention that `models/` have.

That is one kernel of cuDNN on GPUs that take it, and on a mesh with the axis `context` it runs
around a ring.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from zeroxla.frontend.rewrite.attention_site import KEY, QUERY, AttentionSite
from zeroxla.frontend.rewrite.cut_dims import Cut, shape_of
from zeroxla.frontend.rewrite.cuts import dot_dims
from zeroxla.frontend.rewrite.masks import Masks
from zeroxla.frontend.rewrite.recipe import BlockRoot, BlockStep
from zeroxla.program.primitives import PASSED
from zeroxla.program.trace import Operand


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CausalAttention:
    """Computes the attention of a site.

    A dim is one of the scores by its number; the summed dim of queries and keys, and the values'
    own, are -1.

    Attributes:
      site: the attention.
      inputs: the queries, the keys and the values.
      dims: the dims of each of the three, and of the result.
      shared: the dims that queries and keys share, in order.
      grouped: the other dims of queries, in order.
      factor: what queries are multiplied by.
      block: the number of queries, and of keys, of a block.
    """

    site: AttentionSite
    inputs: tuple[Operand, Operand, Operand]
    dims: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    shared: tuple[int, ...]
    grouped: tuple[int, ...]
    factor: float
    block: int

    @staticmethod
    def of(site: AttentionSite, masks: Masks, block: int) -> CausalAttention | None:
        """Return the attention in this form; None if it has another mask, something else is done
        to its scores or probabilities, or its dims are arranged otherwise."""
        items, products = site.recipe.items, site.recipe.items[masks.products]
        casts = all(eq.name in PASSED for eq, _ in site.chain)
        if not isinstance(products, BlockStep) or products.eq.name != "dot_general":
            return None
        if not casts or masks.places is None:
            return None
        operands = [items[i] for i in products.args]
        query = next((i for i, x in enumerate(operands) if Cut(QUERY) in x.cuts), None)
        values = items[site.values]
        if query is None or not all(isinstance(x, BlockRoot) for x in (*operands, values)):
            return None
        key = 1 - query
        eqs = products.eq, site.eq
        if any(eq.params["precision"] is not None for eq in eqs):
            return None
        of_scores = [
            tuple(-1 if d is None else masks.places.index(d) for d in dims)
            for dims in dot_dims(products.eq)
        ]
        in_probs = dot_dims(site.eq)
        num_shared = len(products.eq.params["dimension_numbers"][1][0])
        shared = tuple(masks.places.index(d) for d in range(num_shared))
        at_query, at_key = (site.own_cuts.index(Cut(label)) for label in (QUERY, KEY))
        grouped = tuple(d for d in of_scores[query] if d not in (*shared, at_query, -1))
        ones = [x.count(-1) for x in of_scores]
        if ones != [1, 1] or set(of_scores[key]) != {*shared, at_key, -1}:
            return None
        # The values and the result, whose dims are found through the probabilities.
        by_result = {r: d for d, r in enumerate(in_probs[site.side]) if r is not None}
        of_result = tuple(by_result.get(r, -1) for r in range(len(site.eq.outputs[0].aval.shape)))
        of_values = tuple(
            at_key if r is None else by_result.get(r, -1) for r in in_probs[1 - site.side]
        )
        if of_values.count(-1) != 1 or set(of_values) != {*shared, at_key, -1}:
            return None
        if not masks.is_causal(block):
            return None
        roots = (operands[query], operands[key], values)
        visible = tuple(site.scope.visible(x.operand) for x in roots if isinstance(x, BlockRoot))
        if any(x is None for x in visible):
            return None
        width = shape_of(roots[0].operand)[of_scores[query].index(-1)]  # pyright: ignore
        factor = masks.scale * math.sqrt(width)
        return CausalAttention(
            site=site,
            inputs=visible,  # pyright: ignore
            dims=(of_scores[query], of_scores[key], of_values, of_result),
            shared=shared,
            grouped=grouped,
            factor=1.0 if abs(factor - 1) < 1e-6 else factor,
            block=block,
        )

    @property
    def may_be_one_kernel(self) -> bool:
        """Whether cuDNN's attention may take it."""
        from zeroxla.models.attention import CUDNN_HEAD  # here, since models import flax.nnx

        shape = shape_of(self.inputs[0])
        width = shape[self.dims[0].index(-1)]
        dtype = self.site.eq.outputs[0].aval.dtype
        return dtype in (jnp.bfloat16, jnp.float16) and width % 8 == 0 and width <= CUDNN_HEAD

    def __call__(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Return the attention's result.

        Args:
          arrays: the queries, the keys and the values.
        """
        from zeroxla.models.attention import causal_attention

        query = self.site.own_cuts.index(Cut(QUERY))
        key = self.site.own_cuts.index(Cut(KEY))
        rows, heads = self.shared[:1], self.shared[1:]
        q, k, v = arrays
        if self.factor != 1:
            q = (q * jnp.asarray(self.factor, q.dtype)).astype(q.dtype)
        q = _arranged(q, self.dims[0], (rows, (query,), heads, self.grouped, (-1,)))
        k = _arranged(k, self.dims[1], (rows, (key,), heads, (-1,)))
        v = _arranged(v, self.dims[2], (rows, (key,), heads, (-1,)))
        out = causal_attention(q, k, v, block=self.block)
        order = (*rows, query, *heads, *self.grouped, -1)
        result = self.site.eq.outputs[0].aval
        shape = dict(zip(self.dims[3], result.shape, strict=True))
        out = out.reshape([shape[d] for d in order])
        return jnp.transpose(out, [order.index(d) for d in self.dims[3]]).astype(result.dtype)


def _arranged(x: jax.Array, dims: Sequence[int], groups: Sequence[Sequence[int]]) -> jax.Array:
    """Return an array with one dim for each group of its dims."""
    x = jnp.transpose(x, [dims.index(d) for group in groups for d in group])
    sizes, at = [], 0
    for group in groups:
        sizes.append(math.prod(x.shape[at : at + len(group)]))
        at += len(group)
    return x.reshape(sizes)
