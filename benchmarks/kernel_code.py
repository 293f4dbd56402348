"""Predicted speed of the kernels on an A100, H100 and H200, from machine code. Nothing runs.

Every kernel is compiled and disassembled, with Mosaic for the H100 and H200 and with Triton for the
A100: instructions an element by pipe, registers, blocks a multiprocessor, bytes, the busiest
resource, and the predicted share of the bandwidth of a copy (multiprocessor.py says what is
assumed; expect 15 % of error). It does not know that memory writes whole sectors of 32 bytes:
kernels that filled half of one at a time ran on an H100 up to four times slower than predicted.

    python benchmarks/kernel_code.py [--only q4]

Exits with 1 if a target is missed; writes results/kernel_code.json and results/kernel_code.md.
Takes 5 minutes on 2 cores. It needs the extras plan-gpu and triton, and nvdisasm, which a machine
without a GPU can have:

    pip install -e ".[dev,plan-gpu,triton]" nvidia-cuda-nvdisasm

Without them it says so and exits with 0.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
from common import Check, report, table
from kernel_code_cases import Case, cases
from multiprocessor import WARPS, Access, blocks_at_once, bounds, simulated_cycles
from rich.progress import track
from sass import Code, Instruction, Span, of_mosaic, of_triton

from zeroxla.pallas_kernels import mosaic, shim, triton
from zeroxla.pallas_kernels.geometry import MosaicTile, TritonTile
from zeroxla.planning.gpu_topology import WheelsMissingError

HOPPER, AMPERE = ("H100", "H200"), ("A100",)
# The share of a copy's bandwidth that is due, by kind of kernel.
DUE = {
    "plain": {"A100": 0.85, "H100": 0.95, "H200": 0.85},
    "rotated": {"A100": 0.85, "H100": 0.90, "H200": 0.70},
    "stochastic": {"A100": 0.85, "H100": 0.85, "H200": 0.60},
    "sum": {"A100": 0.85, "H100": 0.95, "H200": 0.80},
    "sum, 8 to 4 bits": {"A100": 0.85, "H100": 0.95, "H200": 0.60},
}


def accesses(case: Case, code: Code, tile: MosaicTile | TritonTile) -> list[Access | None]:
    """Return what each instruction moves; None for those that move nothing."""
    elements = tile.rows * tile.cut.block / WARPS
    found: list[Access | None] = [None] * len(code.instructions)
    for pipe, moved, item, span in zip(
        ("load", "store"), (case.read, case.written), case.element_bytes, code.spans, strict=True
    ):
        lanes = [(lane // span.lanes, lane % span.lanes) for lane in range(32)]
        places = [
            i
            for i, instruction in enumerate(code.instructions)
            # Mosaic loads the seed with LDG, and all else with LD.
            if instruction.pipe == pipe
            and (isinstance(tile, TritonTile) or instruction.name[:3] != "LDG")
        ]
        total = sum(code.instructions[i].width for i in places)
        for i in places:
            width = code.instructions[i].width
            starts = [
                int(row * tile.cut.block * item + lane * span.run * item) for row, lane in lanes
            ]
            lines = {byte // 128 for start in starts for byte in (start, start + width - 1)}
            share = moved * elements * width / total
            found[i] = Access(lines=max(len(lines), 32 * width / 128), bytes_=share)
    for i, instruction in enumerate(code.instructions):
        if instruction.pipe == "shared":
            found[i] = Access(lines=32 * instruction.width / 128, bytes_=0)
        elif instruction.pipe in ("load", "store") and found[i] is None:
            found[i] = Access(lines=1, bytes_=0)
    return found


def row_of(
    case: Case, code: Code, tile: MosaicTile | TritonTile, gpus: Sequence[str]
) -> dict[str, Any]:
    """Return the figures of one kernel on the GPUs that run this code."""
    moved = accesses(case, code, tile)
    per_lane = tile.rows * tile.cut.block / WARPS / 32
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
    for gpu in gpus:
        cycles = bounds(code.instructions, moved, gpu)
        busiest = max(cycles, key=lambda name: cycles[name])
        simulated = simulated_cycles(code.instructions, moved, blocks, gpu)
        row[f"{gpu} bound"] = min(1.0, cycles["memory"] / cycles[busiest])
        row[f"{gpu} busiest"] = busiest
        row[f"{gpu} share"] = min(1.0, cycles["memory"] / simulated)
    return row


def on_hopper(case: Case) -> dict[str, Any]:
    """Return the figures of a Mosaic kernel."""
    span = Span(lanes=case.mosaic.lanes, run=case.mosaic.vector)
    code = of_mosaic(functools.partial(case.function, mosaic), case.shapes, span)
    return row_of(case, code, case.mosaic, HOPPER)


def on_ampere(case: Case) -> dict[str, Any]:
    """Return the figures of a Triton kernel."""
    assert case.triton is not None
    code = of_triton(functools.partial(case.function, triton), case.shapes)
    return row_of(case, code, case.triton, AMPERE)


def _group(instruction: Instruction) -> str:
    pipes = {"half": "fma", "load": "memory", "store": "memory"}
    pipes |= {"shuffle": "memory", "shared": "memory"}
    return pipes.get(instruction.pipe, instruction.pipe)


def tables(rows: list[dict[str, Any]], gpus: Sequence[str]) -> str:
    """Return the figures in markdown."""
    header = ["kernel", "instr.", "ALU", "FMA", "IMAD", "XU", "memory", "regs", "blocks", "B"]
    header += [f"{gpu}: busiest, bound, predicted" for gpu in gpus]
    body = []
    for row in rows:
        cells = [row["kernel"]]
        cells += [
            f"{row[key]:.1f}" for key in ("instructions", "alu", "fma", "imad", "xu", "memory")
        ]
        cells += [str(row["registers"]), str(row["blocks"]), f"{row['bytes']:.2f}"]
        for gpu in gpus:
            bound, share = (f"{100 * row[f'{gpu} {key}']:.0f}" for key in ("bound", "share"))
            cells.append(f"{row[f'{gpu} busiest']}, {bound}, {share} %")
        body.append(cells)
    return table(header, body)


def short(rows: list[dict[str, Any]], gpus: Sequence[str]) -> list[str]:
    """Return a line for each kernel that does not reach what is due."""
    return [
        f"- {row['kernel']}: {100 * row[f'{gpu} share']:.0f} % of {100 * DUE[row['kind']][gpu]:.0f}"
        f" on an {gpu}, by {row[f'{gpu} busiest']} (bound {100 * row[f'{gpu} bound']:.0f} %), "
        f"{row['blocks']} blocks"
        for row in rows
        for gpu in gpus
        if row[f"{gpu} share"] < DUE[row["kind"]][gpu]
    ]


def checks(rows: list[dict[str, Any]], gpus: Sequence[str]) -> list[Check]:
    """Return a target for each kind of kernel and GPU: its slowest kernel's time over a copy's."""
    found = []
    for gpu in gpus:
        for kind, due in DUE.items():
            of_kind = [row for row in rows if row["kind"] == kind]
            if of_kind:
                slowest = min(of_kind, key=lambda row: row[f"{gpu} share"])
                name = f"{gpu}, {kind}, slowest ({slowest['kernel']}): time over a copy's"
                value = 1 / slowest[f"{gpu} share"]
                found.append(Check(name=name, value=value, limit=1 / due[gpu]))
    return found


def main() -> int:
    """Compile, count, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="kernels whose name holds this text")
    arguments = parser.parse_args()
    if not (shim.has_mosaic() and shim.has_triton()):
        print(f"JAX {jax.__version__} lacks Mosaic's kernels, or jax-triton is not installed")
        return 0
    chosen = [case for case in cases() if arguments.only in case.name]
    try:
        hopper = [on_hopper(case) for case in track(chosen, description="Mosaic")]
        taken = [case for case in chosen if case.triton is not None]
        ampere = [on_ampere(case) for case in track(taken, description="Triton")]
    except WheelsMissingError as error:
        print(f"nothing was compiled: {error}")
        return 0
    if arguments.only:
        print(tables(hopper, HOPPER), tables(ampere, AMPERE), sep="\n\n")
        return 0
    body = (
        "A prediction from machine code: no GPU ran. Instructions of a lane for each element, by "
        "pipe; registers of a thread; blocks of 128 threads on a multiprocessor; bytes of an "
        "element, read and written. For each GPU: its busiest resource, the share of a copy's "
        "bandwidth if only that one took time, and the share that the model of a multiprocessor "
        "gives (`benchmarks/multiprocessor.py`; expect 15 % of error).\n\n"
        f"## Hopper: Mosaic's kernels\n\n{tables(hopper, HOPPER)}\n\n"
        f"## A100: Triton's kernels\n\n{tables(ampere, AMPERE)}\n\n"
        "## What falls short\n\n"
        + ("\n".join(short(hopper, HOPPER) + short(ampere, AMPERE)) or "Nothing.")
    )
    figures = {"kernels": hopper, "triton": ampere}
    targets = checks(hopper, HOPPER) + checks(ampere, AMPERE)
    return report("kernel_code", "Machine code of the kernels", body, figures, targets)


if __name__ == "__main__":
    sys.exit(main())
