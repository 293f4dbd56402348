"""Runs the kernels on Pallas' Triton backend: on NVIDIA GPUs before Hopper, and for blocks that
Mosaic does not take. JAX will drop this backend; `shim.has_triton` tells whether it is still
there."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from . import shim
from .arithmetic import Machine, kernel_machine
from .geometry import TritonTile, triton_tile
from .kernels import Backend
from .layout import Layout, row_from_bytes, row_to_bytes
from .program import Cut


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    """A tile in global memory, read and written through pointers and masks (program.Tile)."""

    tile: TritonTile
    rows_left: Any
    machine: Machine

    @classmethod
    def of(cls, tile: TritonTile, layout: Layout, interpret: bool) -> tuple[_Memory, Any, Any]:
        """Return (memory, wire, first block) of the running program."""
        first = pl.program_id(1) * tile.rows
        machine = kernel_machine(interpret=interpret)
        memory = cls(tile=tile, rows_left=layout.full - first, machine=machine)
        return memory, pl.program_id(0), first

    @property
    def cut(self) -> Cut:
        return self.tile.cut

    def load(self, ref: Any, at: Any, width: int, column: int, step: int) -> jax.Array:
        items, mask = self._items(at, width, column, step)
        return shim.triton_load(ref, items, mask)

    def store(self, ref: Any, at: Any, width: int, column: int, step: int, x: jax.Array) -> None:
        items, mask = self._items(at, width, column, step)
        shim.triton_store(ref, items, mask, x)

    def load_row(self, ref: Any, at: Any, layout: Layout) -> jax.Array:
        rows, size = self._rows(), layout.row_bytes
        mask = rows < self.rows_left
        data = [shim.triton_load(ref, at + rows * size + i, mask) for i in range(size)]
        return row_from_bytes(data, layout)

    def store_row(self, ref: Any, at: Any, row: jax.Array, layout: Layout) -> None:
        rows, size = self._rows(), layout.row_bytes
        for i, byte in enumerate(row_to_bytes(row, layout)):
            shim.triton_store(ref, at + rows * size + i, rows < self.rows_left, byte)

    def places(self, column: int, step: int) -> jax.Array:
        return self._rows()[:, None] * self.cut.block + (column + self._columns() * step)[None, :]

    def valid(self, column: int, step: int) -> jax.Array | None:
        if self.tile.columns * self.cut.count == self.cut.block:
            return None
        inside = self._inside(self.cut.block, column, step)
        return jnp.broadcast_to(inside[None, :], (self.tile.rows, self.tile.columns))

    def _items(self, at: Any, width: int, column: int, step: int) -> tuple[jax.Array, jax.Array]:
        """Return the items that `load` reads, and the mask of those that exist."""
        rows = self._rows()
        items = at + rows[:, None] * width + (column + self._columns() * step)[None, :]
        inside = self._inside(width, column, step)
        return items, (rows < self.rows_left)[:, None] & inside[None, :]

    def _inside(self, width: int, column: int, step: int) -> jax.Array:
        """Return which columns of a piece lie inside a run of `width` items."""
        columns = self._columns()
        return (columns < self.cut.columns) & (column + columns * step < width)

    def _rows(self) -> jax.Array:
        return jnp.arange(self.tile.rows, dtype=jnp.int32)

    def _columns(self) -> jax.Array:
        return jnp.arange(self.tile.columns, dtype=jnp.int32)


BACKEND = Backend(triton_tile, _Memory.of, shim.triton_call)
