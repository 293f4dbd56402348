"""Predicted speed of the Mosaic kernels on an H100 and an H200, from machine code. Nothing runs.

Every kernel is compiled for Hopper and disassembled: instructions an element by pipe, registers,
blocks a multiprocessor, bytes, the busiest resource, and the predicted share of the bandwidth of a
copy (multiprocessor.py says what is assumed; expect 15 % of error). An A100 runs other kernels.

    python benchmarks/kernel_code.py [--only q4]

Exits with 1 if a target is missed; writes results/kernel_code.json and results/kernel_code.md.
Takes 3 minutes on 2 cores. It needs the extra plan-gpu and nvdisasm, which a machine without a GPU
can have:

    pip install -e ".[dev,plan-gpu]" nvidia-cuda-nvdisasm

Without them it says so and exits with 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from common import Check, report, table
from multiprocessor import (
    COPY_BYTES_PER_S,
    WARPS,
    Access,
    blocks_at_once,
    bounds,
    simulated_cycles,
)
from rich.progress import track
from sass import Code, Instruction, compiled

from zeroxla.pallas_kernels import kernels, mosaic, shim
from zeroxla.pallas_kernels.geometry import MosaicTile, mosaic_tile
from zeroxla.pallas_kernels.layout import Layout
from zeroxla.pallas_kernels.swizzle import Swizzle
from zeroxla.planning.gpu_topology import WheelsMissingError
from zeroxla.quantize import WireFormat

SIZE = 1 << 26
NODES, DEVICES = 2, 4
SEED = jax.ShapeDtypeStruct((2,), jnp.int32)
GPUS = tuple(COPY_BYTES_PER_S)
# The share of a copy's bandwidth that is due, by kind of kernel, on an H100 and on an H200.
DUE = {
    "plain": (0.95, 0.85),
    "rotated": (0.90, 0.70),
    "stochastic": (0.85, 0.60),
    "sum": (0.95, 0.80),
    "sum, 8 to 4 bits": (0.95, 0.60),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel with its formats.

    Attributes:
      name: its name in tables.
      kind: a key of DUE.
      function, shapes: to compile.
      tile: the blocks of a wire that a block of threads takes.
      read, written: bytes of an element in memory: of floats, or of all sources' wires.
      element_bytes: of what a lane loads and stores, of one source: floats or codes.
    """

    name: str
    kind: str
    function: Callable[..., Any]
    shapes: list[jax.ShapeDtypeStruct]
    tile: MosaicTile
    read: float
    written: float
    element_bytes: tuple[float, float]


def cases() -> Iterator[Case]:
    """Yield every kernel that is compiled."""
    for dtype in ("float32", "bfloat16"):
        for bits in (8, 4):
            for block in (128, 256, 2048):
                yield from _with_floats(WireFormat(bits=bits, block=block), dtype)
            for block in (128, 256):
                yield from _with_floats(WireFormat(bits=bits, block=block, hadamard=32), dtype)
            yield from _with_floats(WireFormat(bits=bits, rounding="stochastic"), dtype)
    for num_sources in (4, 8):
        for bits in (8, 4):
            format = WireFormat(bits=bits)
            yield _sum(f"int{bits}, {num_sources} sources", "sum", format, format, num_sources)
        source, target = (WireFormat(bits=b, block=128, hadamard=32) for b in (8, 4))
        name = f"int8 to int4, block 128, rotated, {num_sources} sources"
        yield _sum(name, "sum, 8 to 4 bits", source, target, num_sources)


def _with_floats(format: WireFormat, dtype: str) -> Iterator[Case]:
    stochastic = format.rounding == "stochastic"
    words = [f"int{format.bits}", dtype, f"block {format.block}"]
    words += ["rotated"] * bool(format.hadamard) + ["stochastic"] * stochastic
    kind = "rotated" if format.hadamard else "stochastic" if stochastic else "plain"
    item = jnp.dtype(dtype).itemsize
    wire = format.num_bytes(SIZE) / SIZE
    for kernel, num_wires in (("quantize", 1), ("swizzled_quantize", NODES * DEVICES)):
        layout = format.layout(SIZE // num_wires)
        swizzle = Swizzle(nodes=NODES, devices=DEVICES, chunks=1) if num_wires > 1 else None
        if swizzle is not None and stochastic:
            continue
        x = jax.ShapeDtypeStruct((num_wires, layout.size), dtype)
        yield Case(
            name=f"{kernel}, {', '.join(words)}",
            kind=kind,
            function=_quantize(layout, swizzle),
            shapes=[x, SEED] if stochastic else [x],
            tile=_tile(layout, **kernels.sizes_of_floats(layout, num_wires, 1, x.dtype)),
            read=item,
            written=wire,
            element_bytes=(item, format.bits / 8),
        )
    if stochastic:
        return
    layout = format.layout(SIZE)
    yield Case(
        name=f"dequantize, {', '.join(words)}",
        kind=kind,
        function=lambda data: kernels.dequant_sum(mosaic.BACKEND, data, layout, dtype),
        shapes=[jax.ShapeDtypeStruct((1, 1, layout.num_bytes), jnp.uint8)],
        tile=_tile(layout, **kernels.sizes_of_floats(layout, 1, 1, dtype)),
        read=wire,
        written=item,
        element_bytes=(format.bits / 8, item),
    )


def _quantize(layout: Layout, swizzle: Swizzle | None) -> Callable[..., Any]:
    return lambda x, seed=None: kernels.quantize(mosaic.BACKEND, x, layout, seed, swizzle)


def _sum(name: str, kind: str, source: WireFormat, target: WireFormat, num_sources: int) -> Case:
    layout, out = source.layout(SIZE), target.layout(SIZE)
    if source.hadamard:  # the rotated numbers are summed
        layout, out = layout.as_rotated_data(), out.as_rotated_data()
    return Case(
        name=f"dequant_reduce, {name}",
        kind=kind,
        function=lambda data: kernels.dequant_reduce(mosaic.BACKEND, data, layout, out),
        shapes=[jax.ShapeDtypeStruct((num_sources, 1, layout.num_bytes), jnp.uint8)],
        tile=_tile(layout, out, **kernels.sizes_of_wires(layout, out, 1, num_sources)),
        read=num_sources * source.num_bytes(SIZE) / SIZE,
        written=target.num_bytes(SIZE) / SIZE,
        element_bytes=(source.bits / 8, target.bits / 8),
    )


def _tile(*layouts: Layout, **sizes: int) -> MosaicTile:
    tile = mosaic_tile(*layouts, **sizes)
    assert tile is not None
    return tile


def accesses(case: Case, code: Code) -> list[Access | None]:
    """Return what each instruction moves; None for those that move nothing."""
    tile = case.tile
    elements = tile.rows * tile.cut.block / WARPS
    lanes = [(lane // tile.lanes, lane % tile.lanes) for lane in range(32)]
    found: list[Access | None] = [None] * len(code.instructions)
    for pipe, moved, item in zip(
        ("load", "store"), (case.read, case.written), case.element_bytes, strict=True
    ):
        places = [
            i
            for i, instruction in enumerate(code.instructions)
            if instruction.pipe == pipe and instruction.name[:3] != "LDG"  # the seed
        ]
        total = sum(code.instructions[i].width for i in places)
        for i in places:
            width = code.instructions[i].width
            starts = [
                int(row * tile.cut.block * item + lane * tile.run * item) for row, lane in lanes
            ]
            lines = {byte // 128 for start in starts for byte in (start, start + width - 1)}
            share = moved * elements * width / total
            found[i] = Access(lines=max(len(lines), 32 * width / 128), bytes_=share)
    for i, instruction in enumerate(code.instructions):
        if instruction.pipe in ("load", "store") and found[i] is None:
            found[i] = Access(lines=1, bytes_=0)
    return found


def row_of(case: Case, code: Code) -> dict[str, Any]:
    """Return the figures of one kernel."""
    moved = accesses(case, code)
    per_lane = case.tile.rows * case.tile.cut.block / WARPS / 32
    count = Counter(_group(instruction) for instruction in code.instructions)
    blocks = blocks_at_once(code.registers)
    row: dict[str, Any] = {
        "kernel": case.name,
        "kind": case.kind,
        "instructions": len(code.instructions) / per_lane,
        **{pipe: count[pipe] / per_lane for pipe in ("alu", "fma", "imad", "xu", "memory")},
        "registers": code.registers,
        "spilled": code.spilled_bytes,
        "blocks": blocks,
        "bytes": case.read + case.written,
    }
    for gpu in GPUS:
        cycles = bounds(code.instructions, moved, gpu)
        busiest = max(cycles, key=lambda name: cycles[name])
        simulated = simulated_cycles(code.instructions, moved, blocks, gpu)
        row[f"{gpu} bound"] = min(1.0, cycles["memory"] / cycles[busiest])
        row[f"{gpu} busiest"] = busiest
        row[f"{gpu} share"] = min(1.0, cycles["memory"] / simulated)
    return row


def _group(instruction: Instruction) -> str:
    pipes = {"half": "fma", "load": "memory", "store": "memory", "shuffle": "memory"}
    return pipes.get(instruction.pipe, instruction.pipe)


def tables(rows: list[dict[str, Any]]) -> str:
    """Return the figures in markdown."""
    header = ["kernel", "instr.", "ALU", "FMA", "IMAD", "XU", "memory", "regs", "blocks", "B"]
    header += [f"{gpu}: busiest, bound, predicted" for gpu in GPUS]
    body = []
    for row in rows:
        cells = [row["kernel"]]
        cells += [
            f"{row[key]:.1f}" for key in ("instructions", "alu", "fma", "imad", "xu", "memory")
        ]
        cells += [str(row["registers"]), str(row["blocks"]), f"{row['bytes']:.2f}"]
        for gpu in GPUS:
            bound, share = (f"{100 * row[f'{gpu} {key}']:.0f}" for key in ("bound", "share"))
            cells.append(f"{row[f'{gpu} busiest']}, {bound}, {share} %")
        body.append(cells)
    return table(header, body)


def checks(rows: list[dict[str, Any]]) -> list[Check]:
    """Return a target for each kind of kernel and GPU: its slowest kernel's time over a copy's."""
    found = []
    for i, gpu in enumerate(GPUS):
        for kind, due in DUE.items():
            of_kind = [row for row in rows if row["kind"] == kind]
            if of_kind:
                slowest = min(of_kind, key=lambda row: row[f"{gpu} share"])
                name = f"{gpu}, {kind}, slowest ({slowest['kernel']}): time over a copy's"
                found.append(Check(name=name, value=1 / slowest[f"{gpu} share"], limit=1 / due[i]))
    return found


def main() -> int:
    """Compile, count, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="kernels whose name holds this text")
    arguments = parser.parse_args()
    if not shim.has_mosaic():
        print(f"JAX {jax.__version__} has no Mosaic kernels; nothing was compiled")
        return 0
    chosen = [case for case in cases() if arguments.only in case.name]
    rows = []
    try:
        for case in track(chosen, description="kernels"):
            rows.append(row_of(case, compiled(case.function, case.shapes)))
    except WheelsMissingError as error:
        print(f"nothing was compiled: {error}")
        return 0
    if arguments.only:
        print(tables(rows))
        return 0
    short = [
        f"- {row['kernel']}: {100 * row[f'{gpu} share']:.0f} % of {100 * DUE[row['kind']][i]:.0f} "
        f"on an {gpu}, by {row[f'{gpu} busiest']} (bound {100 * row[f'{gpu} bound']:.0f} %), "
        f"{row['blocks']} blocks"
        for row in rows
        for i, gpu in enumerate(GPUS)
        if row[f"{gpu} share"] < DUE[row["kind"]][i]
    ]
    body = (
        "A prediction from machine code: no GPU ran. Instructions of a lane for each element, by "
        "pipe; registers of a thread; blocks of 128 threads on a multiprocessor; bytes of an "
        "element, read and written. For each GPU: its busiest resource, the share of a copy's "
        "bandwidth if only that one took time, and the share that the model of a multiprocessor "
        "gives (`benchmarks/multiprocessor.py`; expect 15 % of error).\n\n"
        f"{tables(rows)}\n\n## What falls short\n\n" + ("\n".join(short) or "Nothing.")
    )
    return report(
        "kernel_code", "Machine code of the kernels", body, {"kernels": rows}, checks(rows)
    )


if __name__ == "__main__":
    sys.exit(main())
