"""Attention by blocks of queries and keys, with scores that any recipe computes.

Forward keeps, for each query, the largest score so far, the sum of exponentials, and the sum of
values weighted by them. Backward computes scores again, block by block, and differentiates the
recipe. Nothing has an element for each pair of a query and a key but what the model is given so.

Source: Dao et al., FlashAttention, arXiv 2205.14135; Milakov and Gimelshein, arXiv 1805.02867.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from zeroxla.frontend.rewrite.attention_site import KEY, QUERY, AttentionSite
from zeroxla.frontend.rewrite.block_pair import BlockPair
from zeroxla.frontend.rewrite.cut_dims import Cut, Cuts
from zeroxla.frontend.rewrite.masks import MASKED, BlockPairs
from zeroxla.frontend.rewrite.value_products import ValueProducts, unbroadcast
from zeroxla.program.trace import is_float

Blocks = list[jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockAttention:
    """Computes the attention of a site.

    Attributes:
      site: the attention.
      block: the most queries, and the most keys, of a block.
      pairs: the pairs of a block of queries and a block of keys that are computed.
      on_cpu: see `ValueProducts`.
    """

    site: AttentionSite
    block: int
    pairs: BlockPairs
    on_cpu: bool

    def __call__(self, roots: Sequence[jax.Array]) -> jax.Array:
        """Return the result of the product with values, of normalised probabilities.

        It has a first derivative in reverse mode, and no other.

        Args:
          roots: the whole arrays of the site's roots.

        Cost: a block's scores are computed once forward and once backward, besides the products
        with values: two products for each pair forward, five backward. Memory: those of a block.
        """

        @jax.custom_vjp
        def blockwise_attention(roots: Blocks) -> jax.Array:
            return self._forward(roots)[0]

        blockwise_attention.defvjp(self._forward, self._backward)
        return blockwise_attention(list(roots))

    def _forward(self, roots: Blocks) -> tuple[jax.Array, Any]:
        site, products = self.site, self._products
        result = site.eq.outputs[0].aval
        wide = jnp.promote_types(result.dtype, jnp.float32)
        rows = list(site.softmax.scores.aval.shape)
        rows[site.key_dim] = 1
        carry = (
            jnp.zeros(result.shape, wide),
            jnp.full(rows, -jnp.inf, wide),
            jnp.zeros(rows, wide),
        )

        def add(carry: tuple[jax.Array, ...], pair: jax.Array) -> tuple[Any, None]:
            at = BlockPair(site, self.block, pair, roots)
            total, largest, total_weight = (
                at.queries(x, cuts) for x, cuts in zip(carry, self._carried_cuts(), strict=True)
            )
            scores = at.scores()
            new_largest = jnp.maximum(largest, scores.max(axis=site.key_dim, keepdims=True))
            base = jnp.where(new_largest == -jnp.inf, 0, new_largest)
            weights, scale = jnp.exp(scores - base), jnp.exp(largest - base)
            new_weight = total_weight * scale + weights.sum(axis=site.key_dim, keepdims=True)
            probs = at.probs(weights.astype(site.softmax.result.aval.dtype))
            mixed = products.product(probs, at.values)
            new = (total * products.in_result(scale) + mixed, new_largest, new_weight)
            old = (total, largest, total_weight)
            new = tuple(
                at.fresh_queries(x, before, cuts)
                for x, before, cuts in zip(new, old, self._carried_cuts(), strict=True)
            )
            return tuple(
                at.with_queries(x, part, cuts)
                for x, part, cuts in zip(carry, new, self._carried_cuts(), strict=True)
            ), None

        total, largest, weight = self._over_pairs(add, carry, roots, lambda carry: carry[1])
        if site.softmax.empty_is_zero:
            weight = jnp.where(weight == 0, 1, weight)
        out = (total / products.in_result(weight)).astype(result.dtype)
        out, largest, weight = (checkpoint_name(x, "attention") for x in (out, largest, weight))
        return out, (roots, out, largest, weight)

    def _backward(self, kept: Any, d_out: jax.Array) -> tuple[list[jax.Array | None]]:
        site, products = self.site, self._products
        roots, out, largest, weight = kept
        wide = largest.dtype
        recipe, cuts_of_rows = site.recipe, self._carried_cuts()[1]
        floats = [k for k, x in enumerate(roots) if is_float(x.dtype)]
        # The part of a score's derivative that all keys of a query have in common.
        (common,) = jax.linear_transpose(products.in_result, largest)(
            unbroadcast(d_out.astype(wide) * out, products.rows_shape())
        )
        carry = [jnp.zeros(roots[k].shape, wide) for k in floats]

        def add(carry: list[jax.Array], pair: jax.Array) -> tuple[list[jax.Array], None]:
            at = BlockPair(site, self.block, pair, roots)
            d_block = at.queries(d_out, self._carried_cuts()[0])
            base = at.queries(largest, cuts_of_rows)
            base = jnp.where(base == -jnp.inf, 0, base)
            row_weight = at.queries(weight, cuts_of_rows)
            row_common = at.queries(common, cuts_of_rows)
            if at.is_ragged(QUERY):
                nothing = jnp.zeros_like(d_block)
                d_block = at.fresh_queries(d_block, nothing, self._carried_cuts()[0])
                row_common = at.fresh_queries(row_common, jnp.zeros_like(row_common), cuts_of_rows)
            given = [at.blocks[site.roots[k]] for k in floats]

            def scores_of(given: Blocks) -> jax.Array:
                return at.with_roots(floats, given).scores()

            scores, of_scores = jax.vjp(scores_of, given)
            probs = jnp.exp(scores - base) / row_weight

            def probs_of(probs: jax.Array, given: Blocks) -> jax.Array:
                return at.with_roots(floats, given).probs(probs)

            dtype = site.softmax.result.aval.dtype
            mixed, of_probs = jax.vjp(probs_of, probs.astype(dtype), given)
            d_values = products.values_cotangent(mixed, d_block)
            d_mixed = products.probs_cotangent(d_block, at.values).astype(mixed.dtype)
            d_probs, d_given = of_probs(d_mixed)
            d_scores = probs * (d_probs.astype(wide) - row_common)
            (d_more,) = of_scores(d_scores)
            found = []
            for total, k, one, other in zip(carry, floats, d_given, d_more, strict=True):
                more = one.astype(wide) + other.astype(wide)
                item = recipe.items[site.roots[k]]
                if site.roots[k] == site.values:
                    more = more + d_values
                found.append(at.added(total, more, item.cuts))
            return found, None

        found = self._over_pairs(add, carry, roots, lambda _: largest)
        by_root = dict(zip(floats, found, strict=True))
        return ([x.astype(roots[k].dtype) if (x := by_root.get(k)) is not None else None
                 for k in range(len(roots))],)  # fmt: skip

    def _over_pairs(
        self, add: Any, carry: Any, roots: Blocks, largest_of: Callable[[Any], jax.Array]
    ) -> Any:
        """Run `add` over the pairs, and over the masked ones if some query keeps no key."""
        carry, _ = lax.scan(add, carry, self._tied(self.pairs.kept, roots))
        if not len(self.pairs.masked):
            return carry
        every_query_keeps_some = jnp.all(largest_of(carry) > MASKED / 2)

        def with_masked(carry: Any) -> Any:
            return lax.scan(add, carry, self._tied(self.pairs.masked, roots))[0]

        return lax.cond(every_query_keeps_some, lambda carry: carry, with_masked, carry)

    def _tied(self, numbers: np.ndarray, roots: Blocks) -> jax.Array:
        """Return numbers of pairs, as if they followed from the values, or from another root.

        What follows from constants alone, such as masks, JAX would compute for all pairs at once,
        and keep, where it differentiates a loop or a `jax.checkpoint` body around.
        """
        pairs = jnp.asarray(numbers)
        by_number = dict(zip(self.site.roots, roots, strict=True))
        others = (x for x in roots if is_float(x.dtype) and x.ndim)
        of = by_number.get(self.site.values, next(others, None))
        return pairs if of is None else lax.optimization_barrier((pairs, of))[0]

    @property
    def _products(self) -> ValueProducts:
        return ValueProducts(site=self.site, on_cpu=self.on_cpu)

    def _carried_cuts(self) -> tuple[Cuts, Cuts, Cuts]:
        """Return the cuts of the result, of the largest scores and of the sums of weights."""
        rows = tuple(None if cut == Cut(KEY) else cut for cut in self.site.own_cuts)
        return self.site.result_cuts, rows, rows
