"""A block of queries and a block of keys: their part of arrays, their scores and probabilities.

All blocks have the same size. Where the last one would reach beyond the end, it begins earlier, and
what the block before has already counted is left out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.frontend.rewrite.attention_site import KEY, QUERY, AttentionSite
from zeroxla.frontend.rewrite.cut_dims import Cuts, sliced


class BlockPair:
    """A block of queries and a block of keys.

    Attributes:
      blocks: by the number of a root, its block.
    """

    def __init__(
        self, site: AttentionSite, block: int, pair: jax.Array, roots: Sequence[jax.Array]
    ) -> None:
        """Take the parts of arrays.

        Args:
          site: the attention.
          block: the most queries, and the most keys, of a block.
          pair: the numbers of the two blocks, int32[2]; they may be traced.
          roots: the whole arrays of `site.roots`.
        """
        self.site, lengths = site, site.lengths
        self.sizes = {label: min(block, n) for label, n in lengths.items()}
        places = dict(zip((QUERY, KEY), (pair[0], pair[1]), strict=True))
        # The last block begins so early that it is whole; it then has positions of the one before.
        self._own = {label: places[label] * size for label, size in self.sizes.items()}
        self.window: dict[str, tuple[Any, int]] = {}
        for label, size in self.sizes.items():
            first = self._own[label]
            if self.is_ragged(label):
                first = jnp.minimum(first, lengths[label] - size)
            self.window[label] = first, size
        items = site.recipe.items
        self.blocks: dict[int, jax.Array] = {
            i: sliced(x, items[i].cuts, self.window) for i, x in zip(site.roots, roots, strict=True)
        }

    def with_roots(self, places: Sequence[int], blocks: Sequence[jax.Array]) -> BlockPair:
        """Return the pair with other blocks of some roots."""
        made = object.__new__(BlockPair)
        made.__dict__.update(self.__dict__)
        numbers = (self.site.roots[k] for k in places)
        made.blocks = {**self.blocks, **dict(zip(numbers, blocks, strict=True))}
        return made

    def is_ragged(self, label: str) -> bool:
        """Return whether the last block has positions of the one before."""
        return self.site.lengths[label] % self.sizes[label] != 0

    def scores(self) -> jax.Array:
        """Return the scores, float32 or wider; minus infinity for what is not kept."""
        site = self.site
        wanted = [site.scores] if site.keep is None else [site.scores, site.keep]
        scores, *keep = site.recipe.run(wanted, self.blocks, self.window)
        wide = jnp.promote_types(site.eq.outputs[0].aval.dtype, jnp.float32)
        scores = scores.astype(wide)
        if site.softmax.keep is not None:
            scores = jnp.where(keep[0] == site.softmax.keep[1], scores, -jnp.inf)
        if self.is_ragged(KEY):
            dim = self.site.key_dim
            first, _ = self.window[KEY]
            places = lax.broadcasted_iota(jnp.int32, scores.shape, dim) + first
            scores = jnp.where(places >= self._own[KEY], scores, -jnp.inf)
        return scores

    def probs(self, given: jax.Array) -> jax.Array:
        """Return what becomes of probabilities before the product with values."""
        site = self.site
        blocks = {**self.blocks, site.given: given}
        return site.recipe.run([site.probs], blocks, self.window)[0]

    @property
    def values(self) -> jax.Array:
        """The values."""
        site = self.site
        return site.recipe.run([site.values], self.blocks, self.window)[0]

    def queries(self, x: jax.Array, cuts: Cuts) -> jax.Array:
        """Return the block's part of an array."""
        return sliced(x, cuts, self.window)

    def with_queries(self, x: jax.Array, part: jax.Array, cuts: Cuts) -> jax.Array:
        """Return an array with another part for the block."""
        for d, cut in enumerate(cuts):
            if cut is not None:
                return lax.dynamic_update_slice_in_dim(x, part, self.window[cut.label][0], axis=d)
        return part

    def fresh_queries(self, x: jax.Array, old: jax.Array, cuts: Cuts) -> jax.Array:
        """Return x for the queries that no block before has, and `old` for the others."""
        if not self.is_ragged(QUERY):
            return x
        d = next(d for d, cut in enumerate(cuts) if cut is not None)
        places = lax.broadcasted_iota(jnp.int32, x.shape, d) + self.window[QUERY][0]
        return jnp.where(places >= self._own[QUERY], x, old)

    def added(self, total: jax.Array, more: jax.Array, cuts: Cuts) -> jax.Array:
        """Return an array with something added to its block."""
        starts = [0 if cut is None else self.window[cut.label][0] + cut.first for cut in cuts]
        starts = [jnp.asarray(x, jnp.int32) for x in starts]
        if all(cut is None for cut in cuts):
            return total + more
        before = lax.dynamic_slice(total, starts, more.shape)
        return lax.dynamic_update_slice(total, before + more, starts)
