"""What of the scores of attention is masked, as far as it follows from positions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.frontend.rewrite.attention_site import KEY, QUERY, AttentionSite
from zeroxla.frontend.rewrite.cut_dims import Window
from zeroxla.frontend.rewrite.extents import extent
from zeroxla.frontend.rewrite.recipe import BlockRoot, BlockStep
from zeroxla.program.primitives import ARRANGEMENTS, PASSED
from zeroxla.program.trace import Constant

MASKED = -1e4
"""Scores that are filled with this or less, or to which it is added, count as masked: beside a
score that is not, their exponential is 0 in float32, unless scores are thousands apart."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Masks:
    """The masks of a site's scores.

    Attributes:
      site: the attention.
      conditions: bool items, each with the value that it has where scores are kept.
      biases: items that are added to scores.
      scale: what products are multiplied by before.
      products: the item that is masked.
      places: the dim of the masked item that each dim of the scores is; None if it has others.
    """

    site: AttentionSite
    conditions: tuple[tuple[int, bool], ...]
    biases: tuple[int, ...]
    scale: float
    products: int
    places: tuple[int, ...] | None

    @staticmethod
    def of(site: AttentionSite) -> Masks:
        """Read the masks from how the scores are computed."""
        items = site.recipe.items
        whole = {label: (0, n) for label, n in site.lengths.items()}
        conditions: list[tuple[int, bool]] = []
        if site.keep is not None and site.softmax.keep is not None:
            conditions.append((site.keep, site.softmax.keep[1]))
        biases: list[int] = []
        scale, number = 1.0, site.scores
        places: list[int] | None = list(range(len(site.own_cuts)))
        while isinstance(item := items[number], BlockStep):
            name, args = item.eq.name, item.args
            fixed = [extent(site.recipe, i, whole) for i in args]
            if name == "select_n" and len(args) == 3:
                filled = [f is not None and f[0] == f[1] and f[1] <= MASKED for f in fixed[1:]]
                if filled[0] == filled[1]:
                    break
                conditions.append((args[0], filled[0]))
                number = args[2 if filled[0] else 1]
            elif name == "add" and scale == 1 and sum(map(site.has_products, args)) == 1:
                number, bias = args if site.has_products(args[0]) else args[::-1]
                biases.append(bias)
            elif name in ("mul", "div") and any(f is not None and f[0] == f[1] for f in fixed):
                at = 1 if name == "div" or fixed[1] is not None else 0
                factor = fixed[at]
                if factor is None or factor[0] != factor[1] or not float(factor[0]) > 0:
                    break
                scale *= float(factor[0]) if name == "mul" else 1 / float(factor[0])
                number = args[1 - at]
            elif name in PASSED:
                number = args[0]
            elif name == "transpose":
                order = item.eq.params["permutation"]
                places = None if places is None else [order[d] for d in places]
                number = args[0]
            elif name in ARRANGEMENTS:
                places, number = None, args[0]
            else:
                break
        return Masks(
            site=site,
            conditions=tuple(conditions),
            biases=tuple(biases),
            scale=scale,
            products=number,
            places=None if places is None else tuple(places),
        )

    @property
    def follow_from_positions(self) -> bool:
        """Whether all masks do."""
        recipe = self.site.recipe
        needed = recipe.needs([*(i for i, _ in self.conditions), *self.biases])
        return not any(
            isinstance(x := recipe.items[i], BlockRoot) and not isinstance(x.operand, Constant)
            for i in needed
        )

    def kept(self, window: Window) -> bool | None:
        """Return whether all scores of a block are kept (True), none (False), or neither."""
        recipe, every = self.site.recipe, True
        for number, value in self.conditions:
            found = extent(recipe, number, window)
            if found is not None and bool(found[0]) == bool(found[1]) != value:
                return False
            every &= found is not None and bool(found[0]) == bool(found[1]) == value
        for number in self.biases:
            found = extent(recipe, number, window)
            if found is not None and found[1] <= MASKED:
                return False
            every &= found is not None and found[0] > MASKED
        return True if every else None

    def bias_is_none(self, window: Window) -> bool:
        """Return whether nothing but zeros is added to a block."""
        found = [extent(self.site.recipe, i, window) for i in self.biases]
        return all(x is not None and x[0] == 0 == x[1] for x in found)

    def rows_see(self, first: int, size: int) -> bool:
        """Return whether each of these queries keeps a key, by positions."""
        num_keys = self.site.lengths[KEY]
        for key in dict.fromkeys((0, first, first + size - 1, num_keys - 1)):
            if 0 <= key < num_keys and self.kept({QUERY: (first, size), KEY: (key, 1)}):
                return True
        if size == 1:
            return False
        half = size // 2
        return self.rows_see(first, half) and self.rows_see(first + half, size - half)

    def is_causal(self, block: int) -> bool:
        """Return whether each query keeps the keys up to its own place, and nothing is added."""
        length = self.site.lengths[QUERY]
        if length != self.site.lengths[KEY] or not self.follow_from_positions:
            return False
        if not self.conditions and not self.biases:
            return False
        blocks = list(_blocks(length, block))
        for (i, query), (j, key) in itertools.product(enumerate(blocks), repeat=2):
            window = {QUERY: query, KEY: key}
            if i != j and self.kept(window) is not (j < i):
                return False
            if j < i and not self.bias_is_none(window):
                return False
        return self._diagonal_is_causal(blocks)

    def _diagonal_is_causal(self, blocks: list[tuple[int, int]]) -> bool:
        """Compute the masks of the blocks on the diagonal, and compare them."""
        recipe = self.site.recipe
        numbers = [*(i for i, _ in self.conditions), *self.biases]

        def right(first: jax.Array, size: int) -> jax.Array:
            window = {QUERY: (first, size), KEY: (first, size)}
            found = recipe.run(numbers, {}, window)
            lower = np.tril(np.ones((size, size), bool))
            keep, zero = jnp.ones((), bool), jnp.ones((), bool)
            for number, x in zip(numbers, found, strict=True):
                x = _by_positions(x, recipe.items[number], size)
                values = dict(self.conditions)
                if number in values:
                    keep = keep & (x == values[number])
                else:
                    keep, zero = keep & (x > MASKED), zero & ((x == 0) | ~lower)
            return jnp.all(keep == lower) & jnp.all(zero)

        def all_right() -> bool:
            compiled = jax.jit(right, static_argnums=1)
            return all(bool(compiled(first, size)) for first, size in blocks)

        with ThreadPoolExecutor(1) as apart:  # this thread is tracing
            return apart.submit(all_right).result()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockPairs:
    """Pairs of a block of queries and a block of keys, by their numbers.

    Attributes:
      kept: the pairs that are computed always, int32[pairs, 2].
      masked: those that are masked for all their queries, by positions, and that count only if some
        query keeps no key at all: it has equal probabilities for all keys then, or NaN.
      num_left_out: the number of those that never count.
    """

    kept: np.ndarray
    masked: np.ndarray
    num_left_out: int

    def without_branch(self) -> BlockPairs:
        """Return the pairs without asking whether the masked ones count: all that may are kept."""
        kept = np.concatenate([self.kept, self.masked])
        return dataclasses.replace(self, kept=kept, masked=self.masked[:0])

    def note(self) -> str:
        """Return in words what becomes of masked pairs; empty if there are none."""
        every = len(self.kept) + len(self.masked) + self.num_left_out
        if self.num_left_out:
            return f"{self.num_left_out} of {every} blocks are masked, and left out"
        if len(self.masked):
            return f"{len(self.masked)} of {every} blocks run only if a query keeps no key"
        return ""


def pairs_of(masks: Masks, block: int) -> BlockPairs:
    """Return the pairs of blocks of a site.

    What is masked is left out for good if all masks follow from positions and each query keeps some
    key.
    """
    lengths = masks.site.lengths
    queries, keys = (list(_blocks(lengths[label], block)) for label in (QUERY, KEY))
    kept, masked = list[tuple[int, int]](), list[tuple[int, int]]()
    for i, j in itertools.product(range(len(queries)), range(len(keys))):
        is_masked = masks.kept({QUERY: queries[i], KEY: keys[j]}) is False
        (masked if is_masked else kept).append((i, j))
    num_left_out = 0
    if masks.follow_from_positions and all(masks.rows_see(*query) for query in queries):
        num_left_out, masked = len(masked), []
    elif not kept:
        kept, masked = masked, []
    shape = -1, 2
    return BlockPairs(
        kept=np.asarray(kept, np.int32).reshape(shape),
        masked=np.asarray(masked, np.int32).reshape(shape),
        num_left_out=num_left_out,
    )


def _blocks(length: int, block: int) -> Iterator[tuple[int, int]]:
    for first in range(0, length, block):
        yield first, min(block, length - first)


def _by_positions(x: jax.Array, item: object, size: int) -> jax.Array:
    """Return a block as [..., queries, keys]."""
    assert isinstance(item, BlockStep | BlockRoot)
    dims = {cut.label: d for d, cut in enumerate(item.cuts) if cut is not None}
    for label in (KEY, QUERY):
        if label not in dims:
            x, dims = x[..., None], {**dims, label: x.ndim}
    return jnp.moveaxis(x, (dims[QUERY], dims[KEY]), (-2, -1))
