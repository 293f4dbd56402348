"""The kernels on Pallas' Triton backend: NVIDIA GPUs before Hopper, and blocks that Mosaic does not
take. JAX will drop this backend; `shim.has_triton` says whether it is there."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import program, shim
from pallas_kernels.arithmetic import Machine, round_to_even
from pallas_kernels.geometry import TritonTile, triton_tile
from pallas_kernels.layout import Layout
from pallas_kernels.swizzle import Swizzle

# `jax.lax.round` has no Triton lowering.
_ROUND_TO_EVEN = "cvt.rni.f32.f32 $0, $1;"


def quantize(
    x: jax.Array,
    layout: Layout,
    seed: jax.Array | None = None,
    swizzle: Swizzle | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Return the wires of the rows of x, but for the short last block of each.

    Args, Returns: as `mosaic.quantize`; `geometry.triton_tile` must find a tile.
    """
    num_wires = x.shape[0]
    tile = _tile(layout, items=max(x.size, num_wires * layout.num_bytes))

    def body(*refs: Any) -> None:
        x_ref, *seed_ref, out_ref = refs
        memory, wire, first = _Memory.of(tile, layout, interpret)
        program.write_wire(
            memory,
            out_ref,
            wire if swizzle is None else swizzle.target(wire),
            first,
            program.read_floats(memory, x_ref, wire, first, layout),
            layout,
            seed=_seed(seed_ref),
            source=wire,
        )

    operands = [x.reshape(-1)] if seed is None else [x.reshape(-1), seed]
    return _run(body, operands, (num_wires, layout.num_bytes), jnp.uint8, tile, layout, interpret)


def dequant_sum(
    data: jax.Array, layout: Layout, dtype: Any, *, interpret: bool = False
) -> jax.Array:
    """Return the sums of N wires each, but for the short last block.

    Args, Returns: as `mosaic.dequant_sum`; `geometry.triton_tile` must find a tile.
    """
    num_sources, num_wires, _ = data.shape
    tile = _tile(layout, items=max(data.size, num_wires * layout.size))

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

    Args, Returns: as `mosaic.dequant_reduce`; `geometry.triton_tile` must find a tile.
    """
    num_sources, num_wires, _ = data.shape
    tile = _tile(layout, out, items=data.size)

    def body(*refs: Any) -> None:
        in_ref, *seed_ref, out_ref = refs
        memory, wire, first = _Memory.of(tile, layout, interpret)
        program.write_wire(
            memory,
            out_ref,
            wire,
            first,
            program.read_wires(memory, in_ref, wire, first, layout, num_sources, num_wires),
            out,
            seed=_seed(seed_ref),
            source=wire,
        )

    operands = [data.reshape(-1)] if seed is None else [data.reshape(-1), seed]
    return _run(body, operands, (num_wires, out.num_bytes), jnp.uint8, tile, layout, interpret)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    """A tile in global memory, by pointers and masks (program.Tile)."""

    tile: TritonTile
    rows_left: Any
    machine: Machine

    @classmethod
    def of(cls, tile: TritonTile, layout: Layout, interpret: bool) -> tuple[_Memory, Any, Any]:
        """Return (memory, wire, first block) of the program that runs this."""
        first = pl.program_id(1) * tile.rows
        machine = Machine(
            nearest=round_to_even if interpret else _round_by_instruction,
            largest=lambda keys: jnp.max(keys, axis=1),
            total=lambda terms: jnp.sum(terms, axis=1),
            keep=lambda grid: grid,
        )
        memory = cls(tile=tile, rows_left=layout.full - first, machine=machine)
        return memory, pl.program_id(0), first

    @property
    def cut(self) -> program.Cut:
        return self.tile.cut

    def load(self, ref: Any, at: Any, width: int, column: int, step: int) -> jax.Array:
        items, mask = self._items(at, width, column, step)
        return shim.triton_load(ref, items, mask)

    def store(self, ref: Any, at: Any, width: int, column: int, step: int, x: jax.Array) -> None:
        items, mask = self._items(at, width, column, step)
        shim.triton_store(ref, items, mask, x)

    def load_row(self, ref: Any, at: Any) -> jax.Array:
        rows = self._rows()
        return shim.triton_load(ref, at + rows, rows < self.rows_left)

    def store_row(self, ref: Any, at: Any, row: jax.Array) -> None:
        rows = self._rows()
        shim.triton_store(ref, at + rows, rows < self.rows_left, row)

    def columns(self) -> jax.Array:
        columns = self._columns()[None, :]
        return jnp.broadcast_to(columns, (self.tile.rows, self.tile.columns))

    def places(self, column: int, step: int) -> jax.Array:
        return self._rows()[:, None] * self.cut.block + (column + self._columns() * step)[None, :]

    def valid(self, column: int, step: int) -> jax.Array | None:
        if self.tile.columns * self.cut.count == self.cut.block:
            return None
        inside = self._inside(self.cut.block, column, step)
        return jnp.broadcast_to(inside[None, :], (self.tile.rows, self.tile.columns))

    def _items(self, at: Any, width: int, column: int, step: int) -> tuple[jax.Array, jax.Array]:
        rows = self._rows()
        items = at + rows[:, None] * width + (column + self._columns() * step)[None, :]
        inside = self._inside(width, column, step)
        return items, (rows < self.rows_left)[:, None] & inside[None, :]

    def _inside(self, width: int, column: int, step: int) -> jax.Array:
        columns = self._columns()
        return (columns < self.cut.columns) & (column + columns * step < width)

    def _rows(self) -> jax.Array:
        return jnp.arange(self.tile.rows, dtype=jnp.int32)

    def _columns(self) -> jax.Array:
        return jnp.arange(self.tile.columns, dtype=jnp.int32)


def _round_by_instruction(x: jax.Array) -> jax.Array:
    return shim.triton_assembly(_ROUND_TO_EVEN, x)


def _seed(refs: list[Any]) -> tuple[Any, Any] | None:
    return (refs[0][0], refs[0][1]) if refs else None


def _tile(*layouts: Layout, items: int) -> TritonTile:
    tile = triton_tile(*layouts, items=items)
    assert tile is not None, "dispatch asks geometry first"
    return tile


def _run(
    body: Any,
    operands: list[jax.Array],
    shape: tuple[int, int],
    dtype: Any,
    tile: TritonTile,
    layout: Layout,
    interpret: bool,
) -> jax.Array:
    return shim.triton_call(
        body,
        operands,
        jax.ShapeDtypeStruct((shape[0] * shape[1],), dtype),
        grid=(shape[0], pl.cdiv(layout.full, tile.rows)),
        interpret=interpret,
    ).reshape(shape)
