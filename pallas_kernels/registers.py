"""Operations on the registers of Mosaic kernels that Pallas cannot express.

A lane holds V neighbouring elements of an array in one vector. Bytes are loaded four to a word, and
the compiler would take them apart one by one, with two instructions for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

_WHOLE = 0x4B000000  # the bits of 2^23, after which a unit of the last place is 1


def codes_of_bytes(data: jax.Array, bits: int, layout: Any) -> list[jax.Array]:
    """Return the codes that bytes hold: uint8[T, C] -> float32[T, C] for each code of a byte.

    A permutation puts a byte behind the upper bytes of 2^23, and 2^23 is subtracted.

    Args:
      data: the bytes. A lane holds a multiple of 4 neighbours.
      bits: of a code, 8 or 4.
      layout: the layout of the array.
    """
    result = array_type(data.shape, jnp.float32, layout)
    count = 8 // bits

    def unpack(data: mgpu.FragmentedArray) -> list[mgpu.FragmentedArray]:
        f32 = ir.F32Type.get()
        bias = constant(2.0**23 + (1 << (bits - 1)), f32)
        found: list[list[ir.Value]] = [[] for _ in range(count)]
        for register in data.registers.flat:
            words = [_offset_binary(word, bits) for word in _words(register)]
            for k in range(count):
                wholes = [_behind_whole(word[k], byte) for word in words for byte in range(4)]
                values = [arith.subf(arith.bitcast(f32, whole), bias) for whole in wholes]
                found[k].append(vector_of(values))
        return [array_of(x, data.layout, data.shape, is_signed=None) for x in found]

    return list(inline(unpack, data, layout, [result] * count))


def floats_of(x: jax.Array, layout: Any) -> jax.Array:
    """Return bfloat16[T, C] in float32. A lane holds an even number of neighbours."""
    result = array_type(x.shape, jnp.float32, layout)

    def widen(x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        upper = integer(0xFFFF0000)
        found = []
        for register in x.registers.flat:
            halves = []
            for word in _words(register):
                halves += [arith.shli(word, integer(16)), arith.andi(word, upper)]
            found.append(vector_of([arith.bitcast(ir.F32Type.get(), half) for half in halves]))
        return array_of(found, x.layout, x.shape, is_signed=None)

    return inline(widen, x, layout, result)


def row_of_bytes(data: jax.Array, split: Any, layout: Any) -> jax.Array:
    """Return the numbers whose bytes a lane holds: uint8[T, 4 or 2] -> float32[T].

    Args:
      data: the bytes of a float32, or the upper two of them.
      split: the layout of the bytes, shim.row_registers.
      layout: the layout of the result.
    """
    result = array_type(data.shape[:1], jnp.float32, layout)

    def join(data: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        size = ir.VectorType(data.registers.flat[0].type).shape[0]
        found = []
        for register in data.registers.flat:
            word = utils.bitcast(register, ir.IntegerType.get_signless(8 * size))
            if size == 2:
                word = arith.shli(arith.extui(i32, word), integer(16))
            number = arith.bitcast(f32, word)
            found.append(vector_of([number]))
        return array_of(found, layout.to_mgpu(), (data.shape[0],), is_signed=None)

    return inline(join, data, split, result)


def bytes_of_row(row: jax.Array, layout: Any, split: Any) -> jax.Array:
    """Undo `row_of_bytes`: float32[T] -> uint8[T, 4 or 2]."""
    size = split.to_mgpu().vector_length
    result = array_type((row.shape[0], size), jnp.uint8, split)

    def cut(row: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        found = []
        for register in row.registers.flat:
            word = utils.bitcast(vector.extract(register, [], [0]), i32)
            if size == 2:
                word = arith.shrui(word, integer(16))
                word = arith.trunci(ir.IntegerType.get_signless(16), word)
            kind = ir.VectorType.get((size,), ir.IntegerType.get_signless(8))
            found.append(utils.bitcast(word, kind))
        return array_of(found, split.to_mgpu(), (row.shape[0], size), is_signed=False)

    return inline(cut, row, layout, result)


def inline(body: Callable[..., Any], x: jax.Array, layout: Any, result: Any) -> Any:
    """Return what `body` makes of the registers of x."""
    with_registers: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    return with_registers(lambda ctx, x: body(x))(x)


def array_type(shape: tuple[int, ...], dtype: Any, layout: Any) -> Any:
    """Return what `inline` is told of a result."""
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=layout)


def array_of(
    found: list[ir.Value], layout: Any, shape: tuple[int, ...], is_signed: bool | None
) -> mgpu.FragmentedArray:
    """Return the array of this shape whose registers are `found`, in their order."""
    parts = np.empty(len(found), dtype=object)
    parts[:] = found
    parts = parts.reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=parts, _layout=layout, _is_signed=is_signed)


def _words(register: ir.Value) -> list[ir.Value]:
    """Return the 32-bit words of a vector of smaller elements."""
    i32 = ir.IntegerType.get_signless(32)
    count = utils.bitwidth(register.type) // 32
    words = vector.bitcast(ir.VectorType.get((count,), i32), register)
    return [vector.extract(words, [], [i]) for i in range(count)]


def _offset_binary(word: ir.Value, bits: int) -> list[ir.Value]:
    """Return words that hold one code in each byte, counted from the lowest code."""
    if bits == 8:
        return [arith.xori(word, integer(0x80808080))]
    low, lowest = integer(0x0F0F0F0F), integer(0x08080808)
    high = arith.shrui(word, integer(4))
    return [arith.xori(arith.andi(part, low), lowest) for part in (word, high)]


def _behind_whole(word: ir.Value, byte: int) -> ir.Value:
    """Return a byte of a word, with the upper bytes of 2^23 before it."""
    code = f"prmt.b32 $0, $1, $2, 0x765{byte};"
    return llvm.inline_asm(word.type, [word, integer(_WHOLE)], code, "=r,r,r")


def vector_of(values: list[ir.Value]) -> ir.Value:
    """Return a vector of these scalars, which have one type."""
    return vector.from_elements(ir.VectorType.get((len(values),), values[0].type), values)


def integer(value: int) -> ir.Value:
    """Return a constant word of 32 bits."""
    kind = ir.IntegerType.get_signless(32)
    return arith.constant(kind, ir.IntegerAttr.get(kind, int(np.uint32(value).view(np.int32))))


def constant(value: float, kind: ir.Type) -> ir.Value:
    """Return a constant float."""
    return arith.constant(kind, ir.FloatAttr.get(kind, float(value)))
