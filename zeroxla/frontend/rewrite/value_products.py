"""Products of probabilities and values, block by block, as attention that was found has its dims.

The equation that multiplies probabilities and values says in which order the dims of both and of
the result are. A number for each query, such as a sum of weights, has the dims of scores and is
brought into those of the result.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.frontend.rewrite.attention_site import KEY, QUERY, AttentionSite
from zeroxla.frontend.rewrite.cut_dims import Cut, Cuts, Window, shape_of
from zeroxla.frontend.rewrite.cuts import compute, dot_dims, operand_cuts
from zeroxla.program.primitives import ARRANGEMENTS


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ValueProducts:
    """The products of a site.

    Attributes:
      site: the attention.
      on_cpu: whether they run on CPUs, for which XLA cannot compile all products of 16-bit arrays
        that are added up in float32.
    """

    site: AttentionSite
    on_cpu: bool

    def in_result(self, rows: jax.Array) -> jax.Array:
        """Bring numbers of queries, in the scores' dims, into the result's dims."""
        site, cuts = self.site, self.site.own_cuts
        num = rows.shape[cuts.index(Cut(QUERY))]
        window: Window = {QUERY: (0, num), KEY: (0, 1)}
        for eq, _ in site.chain:
            if eq.name in ARRANGEMENTS:
                after = self._cuts_after(eq)
                of_operands = operand_cuts(eq, after)
                assert of_operands is not None, eq
                rows = compute(eq, after, of_operands, window, [rows])
        probs, _, result = _letters(site)
        key = site.cuts.index(Cut(KEY))
        rows = jnp.squeeze(rows, key)
        own = [x for d, x in enumerate(probs) if d != key]
        rows = jnp.transpose(rows, [own.index(x) for x in result if x in own])
        return jnp.expand_dims(rows, [d for d, x in enumerate(result) if x not in own])

    def _cuts_after(self, eq: Any) -> Cuts:
        """Return the cuts of the result of an equation of the chain."""
        cuts = self.site.cuts
        for made, i in reversed(self.site.chain):
            if made is eq:
                return cuts
            found = operand_cuts(made, cuts)
            assert found is not None, made
            cuts = found[i]
        raise AssertionError(eq)

    def rows_shape(self) -> tuple[int, ...]:
        """Return the shape that `in_result` gives."""
        probs, _, result = _letters(self.site)
        shape = self.site.eq.outputs[0].aval.shape
        return tuple(n if x in probs else 1 for n, x in zip(shape, result, strict=True))

    def product(self, probs: jax.Array, values: jax.Array) -> jax.Array:
        """Return a block of the product."""
        of_probs, of_values, result = _letters(self.site)
        return self._einsum(f"{of_probs},{of_values}->{result}", probs, values)

    def probs_cotangent(self, d_out: jax.Array, values: jax.Array) -> jax.Array:
        """Return the cotangent of probabilities from that of the product."""
        of_probs, of_values, result = _letters(self.site)
        return self._einsum(f"{result},{of_values}->{of_probs}", d_out, values)

    def values_cotangent(self, probs: jax.Array, d_out: jax.Array) -> jax.Array:
        """Return the cotangent of values from that of the product."""
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


def _letters(site: AttentionSite) -> tuple[str, str, str]:
    """Return letters for the dims of the probabilities, of the values and of the result."""
    letters = iter(string.ascii_letters)
    result = [next(letters) for _ in site.eq.outputs[0].aval.shape]
    key = next(letters)
    both = [[key if d is None else result[d] for d in dims] for dims in dot_dims(site.eq)]
    probs, values = "".join(both[site.side]), "".join(both[1 - site.side])
    assert len(probs) == len(shape_of(site.eq.inputs[site.side]))
    return probs, values, "".join(result)


def unbroadcast(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Sum over the dims that are of size 1 in a shape."""
    dims = [d for d, (n, one) in enumerate(zip(x.shape, shape, strict=True)) if one == 1 < n]
    return x.sum(axis=dims, keepdims=True)
