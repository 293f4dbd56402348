"""`DenseView`: a dense leaf with its adapter on the way through a program, before it is an array.

Shapes: C are the dims that a product contracts, O the others, r the rank. An adapter is A [*layers,
*C, r] and B [*layers, r, *O], with the leaf's own dims in order. W + scaling A . B is never made.
Instead, a product x . W becomes x . W + (scaling x . A) . B. With DoRA each output is then
multiplied by its m / |V|; see `magnitudes`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.config.wire_format import WireFormat
from zeroxla.frontend.lora.magnitudes import scales, squared_norms_with
from zeroxla.frontend.lora.uses import DenseLeaf
from zeroxla.wire.quantize_jit import dequantize
from zeroxla.wire.wire import Wire


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("weight", "a", "b", "m"),
    meta_fields=("leaf", "scaling", "format", "dtypes", "dims", "taken"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DenseView:
    """A leaf, a slice of it, or either one cast and transposed. Loops slice its arrays.

    Attributes:
      weight: the leaf's values, with its dims in order; or its wires, uint8[*layers, bytes].
      a, b: its adapter. None without one.
      m: its magnitudes [*layers, *O]. None without DoRA.
      leaf: its dims, from the trace.
      scaling: the factor of A . B.
      format: the format of the wires. None for values.
      dtypes: the casts in order; wires are dequantized to the first one.
      dims: the leaf's dims that are left, in the order of this view.
      taken: the leaf's dims that loops have sliced.
    """

    weight: jax.Array
    a: jax.Array | None
    b: jax.Array | None
    m: jax.Array | None
    leaf: DenseLeaf
    scaling: float
    format: WireFormat | None
    dtypes: tuple[jnp.dtype, ...]
    dims: tuple[int, ...]
    taken: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """The layer dims that are left: the leading dims of wires and adapters."""
        return tuple(d for d in self.leaf.layer_dims if d not in self.taken)

    def cast(self, dtype: jnp.dtype) -> DenseView:
        """Return the view cast to a dtype."""
        return dataclasses.replace(self, dtypes=(*self.dtypes, dtype))

    def transpose(self, permutation: Sequence[int]) -> DenseView:
        """Return the view transposed, as `jnp.transpose` does."""
        return dataclasses.replace(self, dims=tuple(self.dims[d] for d in permutation))

    def stacked(self) -> DenseView:
        """Return the view with its first dim, a layer dim, first in its arrays."""
        dim, layer = self.dims[0], self.layers.index(self.dims[0])
        at = layer if self.format else self._order().index(dim)
        a, b, m = (None if x is None else jnp.moveaxis(x, layer, 0) for x in self._adapter())
        return dataclasses.replace(self, weight=jnp.moveaxis(self.weight, at, 0), a=a, b=b, m=m)

    def layer(self) -> DenseView:
        """Return the view without its first dim, which a loop has sliced away from `stacked`."""
        return dataclasses.replace(self, dims=self.dims[1:], taken=(*self.taken, self.dims[0]))

    def values(self) -> jax.Array:
        """Return the view as an array, without its adapter."""
        x, dtypes = self.weight, self.dtypes
        if self.format is not None:
            shape = self.leaf.sizes([d for d in self._order() if d not in self.layers])
            wire = Wire(x, math.prod(shape), self.format)
            x = dequantize(wire, shape=shape, dtype=dtypes[0])
            dtypes = dtypes[1:]
        for dtype in dtypes:
            x = x.astype(dtype)
        return jnp.transpose(x, [self._order().index(d) for d in self.dims])

    def correction(
        self,
        x: jax.Array,
        contracting: tuple[Sequence[int], Sequence[int]],
        *,
        first: bool,
        precision: Any,
    ) -> jax.Array:
        """Return the adapter's addition to the product of x with the view.

        Args:
          x: the activation.
          contracting: the dims of x and of the view that are summed over.
          first: whether the view is the product's first operand, so that its dims come first.
          precision: the precision of the product.
        """
        assert self.a is not None, "a leaf without an adapter corrects nothing"
        assert self.b is not None, "A comes with B"
        assert not self.layers, "layers are sliced before"
        ours, theirs = self.leaf.contracted, contracting[0]
        a_dims = [ours.index(self.dims[d]) for d in contracting[1]]
        a, b = self.a.astype(x.dtype), self._in_order(self.b.astype(x.dtype))
        dot = functools.partial(lax.dot_general, precision=precision)
        low = dot(x, a, ((theirs, a_dims), ((), ()))) * self.scaling
        if first:
            return dot(b, low, (([0], [low.ndim - 1]), ((), ())))
        return dot(low, b, (([low.ndim - 1], [0]), ((), ())))

    def scaled(self, y: jax.Array, values: jax.Array, *, first: bool) -> jax.Array:
        """Return a product with the adapter's addition, its outputs scaled to their magnitudes.

        Args:
          y: the product and the addition.
          values: the view as an array, without its adapter; see `values`.
          first: whether the outputs are the first dims of the product, and not the last.
        """
        if self.m is None:
            return y
        assert self.a is not None, "magnitudes come with A"
        assert self.b is not None, "magnitudes come with B"
        inputs = [i for i, d in enumerate(self.dims) if d in self.leaf.contracted]
        ours = [self.leaf.contracted.index(self.dims[i]) for i in inputs]
        a = jnp.transpose(self.a, [*ours, self.a.ndim - 1])
        w, a, b = map(lax.stop_gradient, (values, a, self._in_order(self.b)))
        norms = squared_norms_with(w, a, b, inputs, self.scaling)
        scale = scales(self._in_order(self.m[None])[0], norms).astype(y.dtype)
        if first:
            scale = scale.reshape(*scale.shape, *[1] * (y.ndim - scale.ndim))
        return y * scale

    def _adapter(self) -> tuple[jax.Array | None, ...]:
        return self.a, self.b, self.m

    def _in_order(self, x: jax.Array) -> jax.Array:
        """Return an array [*, *O] with the outputs in the order that they have in the view."""
        left = [d for d in self.dims if d not in self.leaf.contracted]
        return jnp.transpose(x, [0, *(1 + self.leaf.others.index(d) for d in left)])

    def _order(self) -> tuple[int, ...]:
        """The leaf's dims that are left, in the order of its values."""
        left = [d for d in range(len(self.leaf.shape)) if d not in self.taken]
        if self.format is None:
            return tuple(left)
        return (*self.layers, *(d for d in left if d not in self.layers))
