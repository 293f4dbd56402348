"""The rotation of neighbours in Mosaic's registers: the lines of rotation.py once more.

A register of a lane holds V neighbours, and L lanes lie side by side. The next L x V elements of a
row are in the next register. So a group is spread over several lanes. Side by side, lanes read and
write memory in whole sectors, which they would not if each held a whole group.

A stage adds and subtracts elements that are some distance apart:

    distance            where the two elements are
    below V             in one register
    from V to L x V     in two lanes, which exchange them
    from L x V on       in two registers of a lane
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

from .registers import array_of, array_type, constant, inline, integer, vector_of
from .rotation import BACK, SIZE, STRIDES, change_sign

_WARP = 32
_SIGN = 31  # the place of a float's sign


def rotate(x: jax.Array, layout: Any, lanes: int) -> jax.Array:
    """Rotate float32[T, C] as `rotation.rotate` does.

    Args:
      x: the elements.
      layout: their layout, shim.registers.
      lanes: L of that layout.
    """
    return _rotated(x, layout, lanes, back=False)


def rotate_back(x: jax.Array, layout: Any, lanes: int) -> jax.Array:
    """Undo `rotate`, up to the rounding of sums."""
    return _rotated(x, layout, lanes, back=True)


def _rotated(x: jax.Array, layout: Any, lanes: int, *, back: bool) -> jax.Array:
    def hadamard(x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        length = ir.VectorType(x.registers.flat[0].type).shape[0]
        group = _Group(lanes=lanes, length=length)
        found = []
        for parts in x.registers.reshape(-1, group.registers):
            values = [vector.extract(part, [], [i]) for part in parts for i in range(length)]
            if not back:
                values = group.with_signs(values)
            for stride in STRIDES:
                values = group.added(values, stride)
            if back:
                values = group.times_back(values)
            found += [vector_of(values[i : i + length]) for i in range(0, len(values), length)]
        return array_of(found, x.layout, x.shape, is_signed=None)

    return inline(hadamard, x, layout, array_type(x.shape, jnp.float32, layout))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Group:
    """The part of a group that is in one lane.

    Attributes:
      lanes: L, the number of lanes side by side.
      length: V, the number of elements in a register.
    """

    lanes: int
    length: int

    @property
    def across(self) -> int:
        """Number of elements from a register of a lane to its next one."""
        return self.lanes * self.length

    @property
    def registers(self) -> int:
        """Number of registers in which a lane has a part of a group."""
        return max(1, SIZE // self.across)

    @functools.cached_property
    def _lane(self) -> ir.Value:
        thread = gpu.thread_id(gpu.Dimension.x)
        thread = arith.index_cast(ir.IntegerType.get_signless(32), thread)
        return arith.andi(thread, integer(_WARP - 1))

    @functools.cached_property
    def _known(self) -> dict[int, ir.Value]:
        return {}

    def _sign(self, minus: list[int]) -> ir.Value:
        """Return the sign of a float as a word, by lane.

        Args:
          minus: for each of the L lanes, 1 where the sign is minus.
        """
        if len(set(minus)) == 1:
            return integer(minus[0] << _SIGN)
        mask = sum(bit << lane for lane, bit in enumerate(minus * (_WARP // self.lanes)))
        if mask not in self._known:
            self._known[mask] = arith.shli(arith.shrui(integer(mask), self._lane), integer(_SIGN))
        return self._known[mask]

    def _factor(self, minus: list[int], size: float) -> ir.Value:
        """Return +-size, by lane; see `_sign`."""
        sign, f32 = self._sign(minus), ir.F32Type.get()
        bits = arith.bitcast(sign.type, constant(size, f32))
        return arith.bitcast(f32, arith.ori(sign, bits))

    def _minus(self, i: int) -> list[int]:
        """Return for each lane whether the element that its i-th value is changes its sign."""
        first = i // self.length * self.across + i % self.length
        places = [first + lane * self.length for lane in range(self.lanes)]
        return [change_sign(place % SIZE) for place in places]

    def with_signs(self, values: list[ir.Value]) -> list[ir.Value]:
        """Return values with the signs of a group.

        The sum of a word and a sign flips that bit, too. A bfloat16 in the lower half of a word
        becomes a float32 by a shift, which takes a sum along in one instruction; one in the upper
        half by a mask, which takes along the bits that differ.
        """
        found = []
        for i, value in enumerate(values):
            sign = self._sign(self._minus(i))
            change = arith.xori if i % 2 else arith.addi
            bits = change(arith.bitcast(sign.type, value), sign)
            found.append(arith.bitcast(value.type, bits))
        return found

    def times_back(self, values: list[ir.Value]) -> list[ir.Value]:
        """Return products with BACK and the signs of a group."""
        factors = [self._factor(self._minus(i), BACK) for i in range(len(values))]
        return [arith.mulf(value, factor) for value, factor in zip(values, factors, strict=True)]

    def added(self, values: list[ir.Value], stride: int) -> list[ir.Value]:
        """Return the sums and differences of elements that are `stride` apart."""
        if self.length <= stride < self.across:
            distance = stride // self.length
            minus = [int(lane & distance != 0) for lane in range(self.lanes)]
            sign = self._factor(minus, 1.0)
            # The other one's element, plus or minus its own: a product with 1 rounds nothing.
            return [llvm.intr_fma(x, sign, utils.shfl_bfly(x, distance)) for x in values]
        if stride >= self.across:
            stride = stride // self.across * self.length
        found = list(values)
        for i, a in enumerate(values):
            if not i & stride:
                b = values[i + stride]
                found[i], found[i + stride] = arith.addf(a, b), arith.subf(a, b)
        return found
