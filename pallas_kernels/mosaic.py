"""The kernels on Pallas' Mosaic GPU backend: NVIDIA Hopper and later."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import program, shim
from pallas_kernels.arithmetic import Machine, round_to_even
from pallas_kernels.geometry import MosaicTile, mosaic_tile
from pallas_kernels.layout import Layout
from pallas_kernels.swizzle import Swizzle

MACHINE = Machine(
    nearest=round_to_even,
    largest=lambda keys: jnp.max(keys, axis=1),
    total=lambda terms: jnp.sum(terms, axis=1),
    keep=lambda grid: grid,
)


def quantize(
    x: jax.Array,
    layout: Layout,
    seed: jax.Array | None = None,
    swizzle: Swizzle | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Return the wires of the rows of x, but for the short last block of each.

    Args:
      x: [W, layout.size], float32, bfloat16 or float16.
      layout: of each wire; `geometry.mosaic_tile` must find a tile for it.
      seed: int32[2], for stochastic rounding.
      swizzle: where each wire goes; None: it stays.
      interpret: run on the CPU.

    Returns:
      uint8[W, layout.num_bytes]; what belongs to the last block is undefined.
    """
    num_wires = x.shape[0]
    tile = _tile(
        layout,
        items=max(x.size, num_wires * layout.num_bytes),
        item_bytes=x.dtype.itemsize,
        num_wires=num_wires,
    )

    def body(*refs: Any) -> None:
        x_ref, *seed_ref, out_ref = refs
        memory, wire, first = _Memory.of(tile, layout, interpret)
        pieces = program.read_floats(memory, x_ref, wire, first, layout)
        program.write_wire(
            memory,
            out_ref,
            wire if swizzle is None else swizzle.target(wire),
            first,
            pieces,
            layout,
            seed=(seed_ref[0][0], seed_ref[0][1]) if seed_ref else None,
            source=wire,
        )

    operands = [x.reshape(-1)] if seed is None else [x.reshape(-1), seed]
    out = _run(body, operands, (num_wires, layout.num_bytes), jnp.uint8, tile, layout, interpret)
    return out


def dequant_sum(
    data: jax.Array, layout: Layout, dtype: Any, *, interpret: bool = False
) -> jax.Array:
    """Return the sums of N wires each, but for the short last block.

    Args:
      data: uint8[N, W, layout.num_bytes].
      layout: of each wire.
      dtype: of the result, to which the float32 sum is rounded.
      interpret: run on the CPU.

    Returns:
      dtype[W, layout.size]; the elements of the last block are undefined.
    """
    num_sources, num_wires, _ = data.shape
    items = max(data.size, num_wires * layout.size)
    item_bytes = jnp.dtype(dtype).itemsize
    tile = _tile(layout, items=items, item_bytes=item_bytes, num_wires=num_wires)

    def body(in_ref: Any, out_ref: Any) -> None:
        memory, wire, first = _Memory.of(tile, layout, interpret)
        pieces = program.read_wires(memory, in_ref, wire, first, layout, num_sources, num_wires)
        program.write_floats(memory, out_ref, wire, first, pieces, layout)

    shape = (num_wires, layout.size)
    return _run(body, [data.reshape(-1)], shape, dtype, tile, layout, interpret)


def dequant_reduce(
    data: jax.Array,
    layout: Layout,
    out: Layout,
    seed: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Return the wires of the sums of N wires each, but for the short last block.

    Args:
      data: uint8[N, W, layout.num_bytes].
      layout: of the sources; not rotated.
      out: of the result, likewise; the same size and block.
      seed: int32[2], for stochastic rounding.
      interpret: run on the CPU.

    Returns:
      uint8[W, out.num_bytes]; what belongs to the last block is undefined.
    """
    num_sources, num_wires, _ = data.shape
    tile = _tile(layout, out, items=data.size, item_bytes=1, num_wires=num_wires)

    def body(*refs: Any) -> None:
        in_ref, *seed_ref, out_ref = refs
        memory, wire, first = _Memory.of(tile, layout, interpret)
        pieces = program.read_wires(memory, in_ref, wire, first, layout, num_sources, num_wires)
        program.write_wire(
            memory,
            out_ref,
            wire,
            first,
            pieces,
            out,
            seed=(seed_ref[0][0], seed_ref[0][1]) if seed_ref else None,
            source=wire,
        )

    operands = [data.reshape(-1)] if seed is None else [data.reshape(-1), seed]
    return _run(body, operands, (num_wires, out.num_bytes), jnp.uint8, tile, layout, interpret)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    """A tile in global memory, loaded into and stored from registers (program.Tile)."""

    tile: MosaicTile
    registers: Any
    interpret: bool
    machine: Machine = MACHINE

    @classmethod
    def of(cls, tile: MosaicTile, layout: Layout, interpret: bool) -> tuple[_Memory, Any, Any]:
        """Return (memory, wire, first block) of the program that runs this."""
        below = 32 // tile.lanes
        across = tile.lanes * tile.vector
        registers = shim.tiled(
            ((4 * below, across), (below, across), (tile.vector,)),
            warps=-5,
            lanes=(-3, -2),
            vector=-1,
        )
        first = jnp.minimum(lax.axis_index("tile") * tile.rows, layout.full - tile.rows)
        return (
            cls(tile=tile, registers=registers, interpret=interpret),
            lax.axis_index("wire"),
            first,
        )

    @property
    def cut(self) -> program.Cut:
        return self.tile.cut

    def load(self, ref: Any, at: Any, width: int, column: int, step: int) -> jax.Array:
        assert step == 1
        if self.interpret:
            runs = self._flat(ref, at, width)[...].reshape(-1, width)
            return runs[:, column : column + self.cut.columns]
        columns = pl.ds(column, self.cut.columns)
        return shim.mosaic_load(self._runs(ref, at, width).at[:, columns], self.registers)

    def store(self, ref: Any, at: Any, width: int, column: int, step: int, x: jax.Array) -> None:
        assert step == 1
        if self.interpret:  # which follows no reshaped reference
            flat = self._flat(ref, at, width)
            runs = flat[...].reshape(-1, width)
            flat[...] = lax.dynamic_update_slice(runs, x, (0, column)).reshape(-1)
        else:
            columns = pl.ds(column, self.cut.columns)
            shim.mosaic_store(self._runs(ref, at, width).at[:, columns], x)

    def load_row(self, ref: Any, at: Any) -> jax.Array:
        ref = ref.at[pl.ds(at, self.tile.rows)]
        return ref[...] if self.interpret else shim.mosaic_load(ref, self.registers.reduce(1))

    def store_row(self, ref: Any, at: Any, row: jax.Array) -> None:
        shim.mosaic_store(ref.at[pl.ds(at, self.tile.rows)], row)

    def columns(self) -> jax.Array:
        return self._iota(1)

    def places(self, column: int, step: int) -> jax.Array:
        assert step == 1
        return self._iota(0) * self.cut.block + (self._iota(1) + column)

    def valid(self, column: int, step: int) -> None:
        return None  # tiles of whole blocks, without padding

    def _iota(self, dim: int) -> jax.Array:
        shape = (self.tile.rows, self.cut.columns)
        return plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=self.registers)

    def _flat(self, ref: Any, at: Any, width: int) -> Any:
        return ref.at[pl.ds(at, self.tile.rows * width)]

    def _runs(self, ref: Any, at: Any, width: int) -> Any:
        return self._flat(ref, at, width).reshape(self.tile.rows, width)


def _tile(*layouts: Layout, **sizes: int) -> MosaicTile:
    tile = mosaic_tile(*layouts, **sizes)
    assert tile is not None, "dispatch asks geometry first"
    return tile


def _run(
    body: Any,
    operands: list[jax.Array],
    shape: tuple[int, int],
    dtype: Any,
    tile: MosaicTile,
    layout: Layout,
    interpret: bool,
) -> jax.Array:
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((shape[0] * shape[1],), dtype),
        grid=(shape[0], pl.cdiv(layout.full, tile.rows)),
        grid_names=("wire", "tile"),
        interpret=shim.mosaic_interpreter() if interpret else None,
    )
    return kernel(*operands).reshape(shape)
