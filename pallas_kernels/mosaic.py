"""Runs the kernels on Pallas' Mosaic GPU backend, for NVIDIA Hopper and later."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import kernels, registers, shim
from .arithmetic import Machine, kernel_machine, largest, smallest
from .geometry import MosaicTile, mosaic_tile
from .kernels import Backend
from .layout import Layout, row_from_bytes, row_to_bytes
from .mosaic_rotation import rotate, rotate_back
from .program import Cut


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    """A tile in global memory, loaded into registers and stored from them (program.Tile)."""

    tile: MosaicTile
    interpret: bool

    @property
    def registers(self) -> Any:
        return shim.registers(self.tile.lanes, self.tile.vector)

    @property
    def machine(self) -> Machine:
        machine, layout = kernel_machine(interpret=self.interpret), self.registers
        if self.interpret:
            return machine
        if self.tile.vector % 2 == 0:
            machine = machine._replace(
                floats=lambda x: _floats(x, layout),
                compares_pairs=True,
                largest=lambda pieces: _widened(largest(pieces)),
                smallest=lambda pieces: _widened(smallest(pieces)),
            )
        if self.tile.vector % 4 == 0:
            codes = functools.partial(registers.codes_of_bytes, layout=layout)
            machine = machine._replace(codes=codes)
        return machine._replace(
            rotate=functools.partial(rotate, layout=layout, lanes=self.tile.lanes),
            rotate_back=functools.partial(rotate_back, layout=layout, lanes=self.tile.lanes),
        )

    @classmethod
    def of(cls, tile: MosaicTile, layout: Layout, interpret: bool) -> tuple[_Memory, Any, Any]:
        """Return (memory, wire, first block) of the running program."""
        first = jnp.minimum(lax.axis_index("tile") * tile.rows, layout.full - tile.rows)
        return (
            cls(tile=tile, interpret=interpret),
            lax.axis_index("wire"),
            first,
        )

    @property
    def cut(self) -> Cut:
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
        if self.interpret:  # the interpreter follows no reshaped reference
            flat = self._flat(ref, at, width)
            runs = flat[...].reshape(-1, width)
            flat[...] = lax.dynamic_update_slice(runs, x, (0, column)).reshape(-1)
        else:
            columns = pl.ds(column, self.cut.columns)
            shim.mosaic_store(self._runs(ref, at, width).at[:, columns], x)

    def load_row(self, ref: Any, at: Any, layout: Layout) -> jax.Array:
        if self.interpret:
            data = self._flat(ref, at, layout.row_bytes)[...].reshape(-1, layout.row_bytes)
            return row_from_bytes([data[:, i] for i in range(layout.row_bytes)], layout)
        split = shim.row_registers(self.tile.lanes, layout.row_bytes)
        data = shim.mosaic_load(self._runs(ref, at, layout.row_bytes), split)
        return registers.row_of_bytes(data, split, self.registers.reduce(1))

    def store_row(self, ref: Any, at: Any, row: jax.Array, layout: Layout) -> None:
        if self.interpret:
            data = jnp.stack(row_to_bytes(row, layout), axis=1)
            self._flat(ref, at, layout.row_bytes)[...] = data.reshape(-1)
            return
        split = shim.row_registers(self.tile.lanes, layout.row_bytes)
        data = registers.bytes_of_row(row, self.registers.reduce(1), split)
        shim.mosaic_store(self._runs(ref, at, layout.row_bytes), data)

    def places(self, column: int, step: int) -> jax.Array:
        assert step == 1
        return self._iota(0) * self.cut.block + (self._iota(1) + column)

    def valid(self, column: int, step: int) -> None:
        return None  # a tile is whole blocks, without padding

    def _iota(self, dim: int) -> jax.Array:
        shape = (self.tile.rows, self.cut.columns)
        return plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=self.registers)

    def _flat(self, ref: Any, at: Any, width: int) -> Any:
        return ref.at[pl.ds(at, self.tile.rows * width)]

    def _runs(self, ref: Any, at: Any, width: int) -> Any:
        return self._flat(ref, at, width).reshape(self.tile.rows, width)


def _floats(x: jax.Array, layout: Any) -> jax.Array:
    return registers.floats_of(x, layout) if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)


def _widened(row: jax.Array) -> jax.Array:
    return row if row.dtype == jnp.int32 else row.astype(jnp.float32)


def _launch(
    body: Any,
    operands: list[jax.Array],
    result: jax.ShapeDtypeStruct,
    grid: tuple[int, int],
    interpret: bool,
) -> jax.Array:
    # A kernel reads some arrays and writes others, so no thread waits for another's reads.
    return plgpu.kernel(
        body,
        out_type=result,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        grid=grid,
        grid_names=("wire", "tile"),
        interpret=shim.mosaic_interpreter() if interpret else None,
    )(*operands)


BACKEND = Backend(mosaic_tile, _Memory.of, _launch)
quantize = functools.partial(kernels.quantize, BACKEND)
dequant_sum = functools.partial(kernels.dequant_sum, BACKEND)
dequant_reduce = functools.partial(kernels.dequant_reduce, BACKEND)
