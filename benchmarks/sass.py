"""The machine code of the kernel in a function, for a GPU that need not be there.

XLA or Triton writes the kernel as PTX, `ptxas` turns it into a GPU's instructions (SASS), and
`nvdisasm` prints them with their control bits. Both programs come with wheels of NVIDIA, see
kernel_code.py.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from zeroxla.pallas_kernels.shim import triton_compiled
from zeroxla.planning.gpu_topology import H200, WheelsMissingError, target_mesh

# What does the work of an instruction, by the first part of its name. Sources: NVIDIA's CUDA
# programming guide (throughput of arithmetic instructions), and its list of SASS instructions.
PIPES = {
    "fma": "FFMA FMUL FADD",
    "half": "HFMA2 HADD2 HMUL2",
    "imad": "IMAD IDP",
    "xu": "MUFU FRND F2I I2F F2F POPC FLO REDUX",
    "load": "LD LDG",
    "store": "ST STG",
    "shuffle": "SHFL",
    "shared": "LDS STS",
    "constant": "LDC ULDC S2R S2UR LDCU",
    "control": "EXIT BRA BSSY BSYNC NOP BAR ELECT WARPSYNC MEMBAR FENCE ERRBAR CCTL DEPBAR RET",
}
_PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names.split()}
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/")
_CONTROL = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")


class Instruction(NamedTuple):
    """One instruction of SASS.

    Attributes:
      name: such as "LD.E.128".
      pipe: a key of PIPES, "uniform", or "alu".
      stall: cycles before the warp's next instruction may go.
      sets: the scoreboard that the result clears, 7 for none.
      frees: the scoreboard that is cleared once the operands are read, 7 for none.
      waits: the scoreboards that must be clear, as bits.
    """

    name: str
    pipe: str
    stall: int
    sets: int
    frees: int
    waits: int

    @property
    def width(self) -> int:
        """Bytes that a lane loads or stores."""
        widths = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}
        return next((bytes_ for mark, bytes_ in widths.items() if mark in self.name), 4)


class Span(NamedTuple):
    """How the lanes of a warp lie along the blocks of an array.

    Attributes:
      lanes: number of lanes side by side; the other ones lie below.
      run: number of neighbouring elements that a lane holds.
    """

    lanes: int
    run: int


class Code(NamedTuple):
    """A kernel's instructions, in the order in which a warp without branches runs them.

    `spans` are those of the arrays that it loads and stores.
    """

    instructions: list[Instruction]
    registers: int
    spilled_bytes: int
    spans: tuple[Span, Span]


def of_mosaic(
    function: Callable[..., Any], shapes: Sequence[jax.ShapeDtypeStruct], span: Span
) -> Code:
    """Return the code of the one Mosaic kernel in a function, for a Hopper GPU.

    Raises:
      WheelsMissingError: the compiler, `ptxas` or `nvdisasm` is not installed.
    """
    mesh = target_mesh(H200, {"node": 1, "device": 1})
    whole = NamedSharding(mesh, PartitionSpec())
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in shapes]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"], os.environ["MOSAIC_GPU_DUMP_PTX"] = folder, "1"
        jax.jit(function).lower(*shapes).compile()
        (ptx,) = Path(folder).glob("*.ptx")
        return _assembled(ptx.read_text(), "sm_90a", (span, span))


def of_triton(function: Callable[..., Any], shapes: Sequence[jax.ShapeDtypeStruct]) -> Code:
    """Return the code of the one Triton kernel in a function, for an A100.

    Raises:
      WheelsMissingError: as for `of_mosaic`.
    """
    asm = triton_compiled(function, shapes, 80).asm
    return _assembled(asm["ptx"], "sm_80", _spans(asm["ttgir"]))


def _spans(ttgir: str) -> tuple[Span, Span]:
    """Return how lanes lie in the first array that a Triton program loads, and the last that it
    stores. Steps and offsets have one dim and are left out."""
    layouts = {
        name: Span(lanes=int(lanes), run=int(run))
        for name, run, lanes in re.findall(
            r"^(#\w+) = #ttg.blocked<\{sizePerThread = \[1, (\d+)\], "
            r"threadsPerWarp = \[\d+, (\d+)\]",
            ttgir,
            re.MULTILINE,
        )
    }
    loaded, stored = (
        re.findall(rf"tt\.{what} .*tensor<\d+x\d+x!tt\.ptr<\w+>, (#\w+)>", ttgir)
        for what in ("load", "store")
    )
    return layouts[loaded[0]], layouts[stored[-1]]


def _assembled(ptx: str, architecture: str, spans: tuple[Span, Span]) -> Code:
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        arguments = [f"-arch={architecture}", "-O3", "-v", str(source), "-o", str(cubin)]
        said = _run(_tool("ptxas"), *arguments).stderr
        text = _run(_tool("nvdisasm"), "-c", "-hex", str(cubin)).stdout
    registers, spilled = (
        int(re.findall(pattern, said)[0])
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    return Code(_parse(text), registers, spilled, spans)


def _parse(text: str) -> list[Instruction]:
    found: list[Instruction] = []
    name = None
    for line in text.splitlines():
        if match := _LINE.match(line):
            words = match[1].split()
            predicated = words[0].startswith("@")
            name = words[1] if predicated else words[0]
            backwards = name == "BRA" and found and found[-1].name.startswith("EXIT")
            if backwards:  # what follows the end of a kernel is a trap
                break
            assert not (name == "BRA" and not predicated), "a kernel with a jump"
        elif name is not None and (match := _CONTROL.match(line)):
            bits = int(match[1], 16)
            found.append(
                Instruction(
                    name=name,
                    pipe=_pipe(name),
                    stall=bits >> 41 & 15,
                    sets=bits >> 46 & 7,
                    frees=bits >> 49 & 7,
                    waits=bits >> 52 & 63,
                )
            )
            name = None
    return found


def _pipe(name: str) -> str:
    first = name.split(".")[0]
    if first in _PIPE_OF:
        return _PIPE_OF[first]
    return "uniform" if first.startswith("U") or first == "R2UR" else "alu"


def _tool(name: str) -> str:
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in Path(folder).glob(f"*/bin/{name}"):
            return str(path)
    raise WheelsMissingError(
        f"there is no {name}; install nvidia-cuda-nvcc and nvidia-cuda-nvdisasm, which have ptxas "
        "and nvdisasm"
    )


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True)
