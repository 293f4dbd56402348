"""Computes what follows from logits chunk by chunk of positions, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zeroxla.frontend.rewrite.cut_dims import Cuts, Window, labels_of, placed, sliced
from zeroxla.frontend.rewrite.head_site import POSITION, WORD, HeadSite
from zeroxla.program.trace import is_float

Arrays = list[jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkedHead:
    """Computes the results of a site.

    Attributes:
      site: the logits, and what is computed from them.
      chunk: the number of positions whose logits exist at a time.
    """

    site: HeadSite
    chunk: int

    def __call__(self, roots: Sequence[jax.Array]) -> Arrays:
        """Return the results.

        It has a first derivative in reverse mode, and no other.

        Args:
          roots: the whole arrays of the recipe's roots.

        Cost: one more product with the head. Memory: the logits of a chunk, and in backward float32
        for the gradient of the head.
        """

        @jax.custom_vjp
        def chunked_head(roots: Arrays) -> Arrays:
            return self._forward(roots)

        def forward(roots: Arrays) -> tuple[Arrays, Arrays]:
            return self._forward(roots), roots

        chunked_head.defvjp(forward, self._backward)
        return chunked_head(list(roots))

    def _forward(self, roots: Arrays) -> Arrays:
        results = [v.aval for v, _ in self.site.results]

        def turn(totals: Arrays, first: Any, size: int) -> Arrays:
            window = self._window(first, size)
            parts = self._chunk(self._blocks(roots, window), window)
            return [
                _updated(total, part.astype(total.dtype), cuts, first)
                for total, part, (_, cuts) in zip(totals, parts, self.site.results, strict=True)
            ]

        totals = [jnp.zeros(x.shape, _wide(x.dtype)) for x in results]
        totals = self._over_chunks(turn, totals)
        return [x.astype(like.dtype) for x, like in zip(totals, results, strict=True)]

    def _backward(self, roots: Arrays, cts: Arrays) -> tuple[list[jax.Array | None]]:
        items = [root for _, root in self.site.recipe.roots()]
        floats = [k for k, x in enumerate(roots) if is_float(x.dtype)]
        targets = [r for r, (v, _) in enumerate(self.site.results) if v.is_float]

        def turn(totals: Arrays, first: Any, size: int) -> Arrays:
            window = self._window(first, size)
            blocks = self._blocks(roots, window)

            def of_floats(some: Arrays) -> Arrays:
                filled = list(blocks)
                for k, x in zip(floats, some, strict=True):
                    filled[k] = x
                found = self._chunk(filled, window)
                return [found[r] for r in targets]

            found, pullback = jax.vjp(of_floats, [blocks[k] for k in floats])
            own = [sliced(cts[r], self.site.results[r][1], window) for r in targets]
            (grads,) = pullback([x.astype(y.dtype) for x, y in zip(own, found, strict=True)])
            return [
                _updated(total, grad.astype(total.dtype), items[k].cuts, first)
                for total, grad, k in zip(totals, grads, floats, strict=True)
            ]

        totals = [jnp.zeros(roots[k].shape, _wide(roots[k].dtype)) for k in floats]
        totals = self._over_chunks(turn, totals)
        by_root = dict(zip(floats, totals, strict=True))
        found: list[jax.Array | None] = [None] * len(roots)
        for k, x in by_root.items():
            found[k] = x.astype(roots[k].dtype)
        return (found,)

    def _window(self, first: Any, size: int) -> Window:
        return {POSITION: (first, size), WORD: (0, self.site.lengths[WORD])}

    def _blocks(self, roots: Arrays, window: Window) -> Arrays:
        items = [root for _, root in self.site.recipe.roots()]
        return [sliced(x, item.cuts, window) for x, item in zip(roots, items, strict=True)]

    def _chunk(self, blocks: Arrays, window: Window) -> Arrays:
        numbers = [i for i, _ in self.site.recipe.roots()]
        given = dict(zip(numbers, blocks, strict=True))
        return self.site.recipe.run(self.site.items, given, window)

    def _over_chunks(self, turn: Any, totals: Arrays) -> Arrays:
        """Run `turn` over chunks, in order. What does not fill a chunk is one more turn."""
        begin, length = self.site.begin, self.site.lengths[POSITION]
        whole = length // self.chunk
        firsts = begin + np.arange(whole, dtype=np.int32) * self.chunk

        def add(totals: Arrays, first: jax.Array) -> tuple[Arrays, None]:
            return turn(totals, first, self.chunk), None

        if whole:
            totals, _ = lax.scan(add, totals, jnp.asarray(firsts))
        rest = length - whole * self.chunk
        return turn(totals, begin + whole * self.chunk, rest) if rest else totals


def _wide(dtype: Any) -> Any:
    """Return the dtype in which numbers of chunks are added up."""
    return jnp.promote_types(dtype, jnp.float32) if is_float(dtype) else dtype


def _updated(total: jax.Array, part: jax.Array, cuts: Cuts, first: Any) -> jax.Array:
    """Return an array with a chunk's part in its place; with the part added, if it is a sum."""
    if POSITION not in labels_of(cuts):
        return total + part
    (found,) = ((d, cut) for d, cut in enumerate(cuts) if cut is not None and cut.label == POSITION)
    return placed(total, part, *found, first)
