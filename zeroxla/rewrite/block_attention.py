"""Attention by blocks of queries and keys, with scores that any recipe computes.

Forward keeps, for each query, the largest score so far, the sum of exponentials, and the sum of
values weighted by them. Backward computes scores again, block by block, and differentiates the
recipe. Nothing has an element for each pair of a query and a key but what the model is given so.

Source: Dao et al., FlashAttention, arXiv 2205.14135; Milakov and Gimelshein, arXiv 1805.02867.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from zeroxla.program.primitives import ARRANGEMENTS
from zeroxla.program.trace import is_float
from zeroxla.rewrite.attention_site import KEY, QUERY, AttentionSite
from zeroxla.rewrite.cuts import (
    Cuts,
    Window,
    compute,
    dot_dims,
    operand_cuts,
    shape_of,
    sliced,
)

Blocks = list[jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockAttention:
    """Computes the attention of a site.

    Attributes:
      site: the attention.
      block: the most queries, and the most keys, of a block.
      pairs: the pairs of a block of queries and a block of keys that are computed, int32[pairs, 2].
      on_cpu: whether it runs on CPUs, for which XLA cannot compile all products of 16-bit arrays
        that are added up in float32.
    """

    site: AttentionSite
    block: int
    pairs: np.ndarray
    on_cpu: bool

    @property
    def roots(self) -> list[int]:
        """The numbers of the recipe's roots, in the order in which arrays are given."""
        return [i for i, _ in self.site.recipe.roots()]

    def __call__(self, roots: Sequence[jax.Array]) -> jax.Array:
        """Return the attention's result.

        It has a first derivative in reverse mode, and no other.

        Args:
          roots: the whole arrays of `roots`.

        Cost: a block's scores are computed once forward and once backward, besides the products
        with values: two products for each pair forward, five backward. Memory: those of a block.
        """

        @jax.custom_vjp
        def blockwise_attention(roots: Blocks) -> jax.Array:
            return self._forward(roots)[0]

        blockwise_attention.defvjp(self._forward, self._backward)
        return blockwise_attention(list(roots))

    def _forward(self, roots: Blocks) -> tuple[jax.Array, Any]:
        site = self.site
        result = site.eq.outputs[0].aval
        wide = jnp.promote_types(result.dtype, jnp.float32)
        rows = self._rows_shape()
        carry = (
            jnp.zeros(result.shape, wide),
            jnp.full(rows, -jnp.inf, wide),
            jnp.zeros(rows, wide),
        )

        def add(carry: tuple[jax.Array, ...], pair: jax.Array) -> tuple[Any, None]:
            at = _Pair(self, pair, roots)
            total, largest, total_weight = (
                at.queries(x, cuts) for x, cuts in zip(carry, self._carried_cuts(), strict=True)
            )
            scores = at.scores()
            new_largest = jnp.maximum(largest, scores.max(axis=self._key_dim, keepdims=True))
            base = jnp.where(new_largest == -jnp.inf, 0, new_largest)
            weights, scale = jnp.exp(scores - base), jnp.exp(largest - base)
            new_weight = total_weight * scale + weights.sum(axis=self._key_dim, keepdims=True)
            probs = at.probs(weights.astype(site.softmax.result.aval.dtype))
            mixed = self._product(probs, at.values)
            new = (total * self._in_result(scale) + mixed, new_largest, new_weight)
            old = (total, largest, total_weight)
            new = tuple(
                at.fresh_queries(x, before, cuts)
                for x, before, cuts in zip(new, old, self._carried_cuts(), strict=True)
            )
            return tuple(
                at.with_queries(x, part, cuts)
                for x, part, cuts in zip(carry, new, self._carried_cuts(), strict=True)
            ), None

        (total, largest, weight), _ = lax.scan(add, carry, self._pairs(roots))
        if site.softmax.empty_is_zero:
            weight = jnp.where(weight == 0, 1, weight)
        out = (total / self._in_result(weight)).astype(result.dtype)
        out, largest, weight = (checkpoint_name(x, "attention") for x in (out, largest, weight))
        return out, (roots, out, largest, weight)

    def _backward(self, kept: Any, d_out: jax.Array) -> tuple[list[jax.Array | None]]:
        roots, out, largest, weight = kept
        wide = largest.dtype
        recipe, cuts_of_rows = self.site.recipe, self._carried_cuts()[1]
        floats = [k for k, x in enumerate(roots) if is_float(x.dtype)]
        # The part of a score's derivative that all keys of a query have in common.
        (common,) = jax.linear_transpose(self._in_result, largest)(
            _unbroadcast(d_out.astype(wide) * out, self._in_result_shape())
        )
        carry = [jnp.zeros(roots[k].shape, wide) for k in floats]

        def add(carry: list[jax.Array], pair: jax.Array) -> tuple[list[jax.Array], None]:
            at = _Pair(self, pair, roots)
            d_block = at.queries(d_out, self._carried_cuts()[0])
            base = at.queries(largest, cuts_of_rows)
            base = jnp.where(base == -jnp.inf, 0, base)
            row_weight = at.queries(weight, cuts_of_rows)
            row_common = at.queries(common, cuts_of_rows)
            if at.is_ragged(QUERY):
                nothing = jnp.zeros_like(d_block)
                d_block = at.fresh_queries(d_block, nothing, self._carried_cuts()[0])
                row_common = at.fresh_queries(row_common, jnp.zeros_like(row_common), cuts_of_rows)
            given = [at.blocks[self.roots[k]] for k in floats]

            def scores_of(given: Blocks) -> jax.Array:
                return at.with_roots(floats, given).scores()

            scores, of_scores = jax.vjp(scores_of, given)
            probs = jnp.exp(scores - base) / row_weight

            def probs_of(probs: jax.Array, given: Blocks) -> jax.Array:
                return at.with_roots(floats, given).probs(probs)

            dtype = self.site.softmax.result.aval.dtype
            mixed, of_probs = jax.vjp(probs_of, probs.astype(dtype), given)
            d_values = self._values_cotangent(mixed, d_block)
            d_mixed = self._probs_cotangent(d_block, at.values).astype(mixed.dtype)
            d_probs, d_given = of_probs(d_mixed)
            d_scores = probs * (d_probs.astype(wide) - row_common)
            (d_more,) = of_scores(d_scores)
            found = []
            for total, k, one, other in zip(carry, floats, d_given, d_more, strict=True):
                more = one.astype(wide) + other.astype(wide)
                item = recipe.items[self.roots[k]]
                if self.roots[k] == self.site.values:
                    more = more + d_values
                found.append(at.added(total, more, item.cuts))
            return found, None

        found, _ = lax.scan(add, carry, self._pairs(roots))
        by_root = dict(zip(floats, found, strict=True))
        return ([x.astype(roots[k].dtype) if (x := by_root.get(k)) is not None else None
                 for k in range(len(roots))],)  # fmt: skip

    def _pairs(self, roots: Blocks) -> jax.Array:
        """Return the pairs, as if they followed from the values, or from another root.

        What follows from constants alone, such as masks, JAX would compute for all pairs at once,
        and keep, where it differentiates a loop or a `jax.checkpoint` body around.
        """
        pairs = jnp.asarray(self.pairs)
        by_number = dict(zip(self.roots, roots, strict=True))
        others = (x for x in roots if is_float(x.dtype) and x.ndim)
        of = by_number.get(self.site.values, next(others, None))
        return pairs if of is None else lax.optimization_barrier((pairs, of))[0]

    @property
    def _key_dim(self) -> int:
        return next(d for d, cut in enumerate(self.site.own_cuts) if cut == (KEY, 0))

    def _rows_shape(self) -> tuple[int, ...]:
        shape = list(self.site.softmax.scores.aval.shape)
        shape[self._key_dim] = 1
        return tuple(shape)

    def _carried_cuts(self) -> tuple[Cuts, Cuts, Cuts]:
        """Return the cuts of the result, of the largest scores and of the sums of weights."""
        rows = tuple(None if cut == (KEY, 0) else cut for cut in self.site.own_cuts)
        dims = dot_dims(self.site.eq)[self.site.side]
        found: list[Any] = [None] * len(self.site.eq.outputs[0].aval.shape)
        for cut, d in zip(self.site.cuts, dims, strict=True):
            if d is not None:
                found[d] = cut
        return tuple(found), rows, rows

    def _in_result(self, rows: jax.Array) -> jax.Array:
        """Bring numbers of queries, in the scores' dims, into the result's dims."""
        site, cuts = self.site, self.site.own_cuts
        num = rows.shape[next(d for d, cut in enumerate(cuts) if cut == (QUERY, 0))]
        window: Window = {QUERY: (0, num), KEY: (0, 1)}
        for eq, i in site.chain:
            if eq.name in ARRANGEMENTS:
                after = self._cuts_after(eq, i)
                of_operands = operand_cuts(eq, after)
                assert of_operands is not None, eq
                rows = compute(eq, after, of_operands, window, [rows])
        probs, _, result = _letters(site)
        key = next(d for d, cut in enumerate(site.cuts) if cut == (KEY, 0))
        rows = jnp.squeeze(rows, key)
        own = [x for d, x in enumerate(probs) if d != key]
        rows = jnp.transpose(rows, [own.index(x) for x in result if x in own])
        return jnp.expand_dims(rows, [d for d, x in enumerate(result) if x not in own])

    def _cuts_after(self, eq: Any, place: int) -> Cuts:
        """Return the cuts of the result of an equation of the chain."""
        cuts = self.site.cuts
        for made, i in reversed(self.site.chain):
            if made is eq:
                return cuts
            found = operand_cuts(made, cuts)
            assert found is not None, made
            cuts = found[i]
        raise AssertionError((eq, place))

    def _in_result_shape(self) -> tuple[int, ...]:
        probs, _, result = _letters(self.site)
        shape = self.site.eq.outputs[0].aval.shape
        return tuple(n if x in probs else 1 for n, x in zip(shape, result, strict=True))

    def _product(self, probs: jax.Array, values: jax.Array) -> jax.Array:
        of_probs, of_values, result = _letters(self.site)
        return self._einsum(f"{of_probs},{of_values}->{result}", probs, values)

    def _probs_cotangent(self, d_out: jax.Array, values: jax.Array) -> jax.Array:
        of_probs, of_values, result = _letters(self.site)
        return self._einsum(f"{result},{of_values}->{of_probs}", d_out, values)

    def _values_cotangent(self, probs: jax.Array, d_out: jax.Array) -> jax.Array:
        of_probs, of_values, result = _letters(self.site)
        return self._einsum(f"{of_probs},{result}->{of_values}", probs, d_out)

    def _einsum(self, subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        params, result = self.site.eq.params, self.site.eq.outputs[0].aval
        wide = jnp.promote_types(result.dtype, jnp.float32)
        if self.on_cpu:
            a, b = a.astype(wide), b.astype(wide)
        return jnp.einsum(
            subscripts, a, b, precision=params["precision"], preferred_element_type=wide
        )


class _Pair:
    """A block of queries and a block of keys.

    Attributes:
      blocks: by the number of a root, its block.
    """

    def __init__(self, of: BlockAttention, pair: jax.Array, roots: Blocks) -> None:
        self.of, lengths = of, of.site.lengths
        self.sizes = {label: min(of.block, n) for label, n in lengths.items()}
        places = dict(zip((QUERY, KEY), (pair[0], pair[1]), strict=True))
        # The last block begins so early that it is whole; it then has positions of the one before.
        self._own = {label: places[label] * size for label, size in self.sizes.items()}
        self.window: dict[str, tuple[Any, int]] = {}
        for label, size in self.sizes.items():
            first = self._own[label]
            if self.is_ragged(label):
                first = jnp.minimum(first, lengths[label] - size)
            self.window[label] = first, size
        items = of.site.recipe.items
        self.blocks: dict[int, jax.Array] = {
            i: sliced(x, items[i].cuts, self.window) for i, x in zip(of.roots, roots, strict=True)
        }

    def with_roots(self, places: Sequence[int], blocks: Blocks) -> _Pair:
        """Return the pair with other blocks of some roots."""
        made = object.__new__(_Pair)
        made.__dict__.update(self.__dict__)
        numbers = (self.of.roots[k] for k in places)
        made.blocks = {**self.blocks, **dict(zip(numbers, blocks, strict=True))}
        return made

    def is_ragged(self, label: str) -> bool:
        """Return whether the last block has positions of the one before."""
        return self.of.site.lengths[label] % self.sizes[label] != 0

    def scores(self) -> jax.Array:
        """Return the scores, float32 or wider; minus infinity for what is not kept."""
        site = self.of.site
        wanted = [site.scores] if site.keep is None else [site.scores, site.keep]
        scores, *keep = site.recipe.run(wanted, self.blocks, self.window)
        wide = jnp.promote_types(site.eq.outputs[0].aval.dtype, jnp.float32)
        scores = scores.astype(wide)
        if site.softmax.keep is not None:
            scores = jnp.where(keep[0] == site.softmax.keep[1], scores, -jnp.inf)
        if self.is_ragged(KEY):
            dim = self.of._key_dim
            first, _ = self.window[KEY]
            places = lax.broadcasted_iota(jnp.int32, scores.shape, dim) + first
            scores = jnp.where(places >= self._own[KEY], scores, -jnp.inf)
        return scores

    def probs(self, given: jax.Array) -> jax.Array:
        """Return what becomes of probabilities before the product with values."""
        site = self.of.site
        blocks = {**self.blocks, site.given: given}
        return site.recipe.run([site.probs], blocks, self.window)[0]

    @property
    def values(self) -> jax.Array:
        """The values."""
        site = self.of.site
        return site.recipe.run([site.values], self.blocks, self.window)[0]

    def queries(self, x: jax.Array, cuts: Cuts) -> jax.Array:
        """Return the block's part of an array."""
        return sliced(x, cuts, self.window)

    def with_queries(self, x: jax.Array, part: jax.Array, cuts: Cuts) -> jax.Array:
        """Return an array with another part for the block."""
        for d, cut in enumerate(cuts):
            if cut is not None:
                return lax.dynamic_update_slice_in_dim(x, part, self.window[cut[0]][0], axis=d)
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
        starts = [0 if cut is None else self.window[cut[0]][0] + cut[1] for cut in cuts]
        starts = [jnp.asarray(x, jnp.int32) for x in starts]
        if all(cut is None for cut in cuts):
            return total + more
        before = lax.dynamic_slice(total, starts, more.shape)
        return lax.dynamic_update_slice(total, before + more, starts)


def _letters(site: AttentionSite) -> tuple[str, str, str]:
    """Return letters for the dims of the probabilities, of the values and of the result."""
    letters = iter(string.ascii_letters)
    result = [next(letters) for _ in site.eq.outputs[0].aval.shape]
    key = next(letters)
    both = [[key if d is None else result[d] for d in dims] for dims in dot_dims(site.eq)]
    probs, values = "".join(both[site.side]), "".join(both[1 - site.side])
    assert len(probs) == len(shape_of(site.eq.inputs[site.side]))
    return probs, values, "".join(result)


def _unbroadcast(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Sum over the dims that are of size 1 in a shape."""
    dims = [d for d, (n, one) in enumerate(zip(x.shape, shape, strict=True)) if one == 1 < n]
    return x.sum(axis=dims, keepdims=True)
