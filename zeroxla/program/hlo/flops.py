"""FLOPs of instructions of compiled programs."""

from __future__ import annotations

import math
import re

from zeroxla.program.hlo.text import Instruction
from zeroxla.program.primitives import FACTORIZATION_FLOPS

LAPACK = {"potrf": "cholesky", "syevd": "eigh", "geqrf": "qr", "orgqr": "qr"}


def product_flops(instruction: Instruction, scope: dict[str, Instruction]) -> float:
    """Return the FLOPs of a product, a convolution or a factorization; 0 for other instructions.

    Args:
      instruction: the instruction.
      scope: the instructions of its computation, by name.
    """
    if instruction.opcode == "dot":
        summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        dims = [int(d) for d in summed[1].split(",") if d] if summed else []
        return _dot_flops(instruction, scope, dims)
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, scope, out=-1, kernel=1)
    if instruction.opcode != "custom-call":
        return 0.0
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    name = target[1] if target else ""
    if name.startswith("__cublas"):
        summed = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
        return _dot_flops(instruction, scope, _ints(summed[1]) if summed else [])
    for kind, (out, kernel) in _CONVOLUTIONS.items():
        if name.startswith(f"__cudnn$conv{kind}"):
            return _convolution_flops(instruction, scope, out=out, kernel=kernel)
    if name.startswith("__cudnn$fmha"):
        return _attention_flops(instruction, scope, backward="Backward" in name)
    for part, kind in LAPACK.items():
        if part in name:
            *batch, m, n = instruction.shapes[0].dims
            return FACTORIZATION_FLOPS[kind] * math.prod(batch) * m * n * min(m, n)
    return 0.0


_CONVOLUTIONS = {"BackwardInput": (0, 1), "BackwardFilter": (1, -1), "": (-1, 1)}
"""Of cuDNN's convolutions the operand that is forward's result, and the one that is the kernel; -1
is the instruction's own result. The last one is forward."""


def _dot_flops(
    instruction: Instruction, scope: dict[str, Instruction], contracted: list[int]
) -> float:
    dims = scope[instruction.operands[0]].shapes[0].dims
    return 2.0 * instruction.shapes[0].num_elements * math.prod(dims[d] for d in contracted)


def _convolution_flops(
    instruction: Instruction, scope: dict[str, Instruction], *, out: int, kernel: int
) -> float:
    def shape(which: int) -> tuple[int, ...]:
        made = instruction if which < 0 else scope[instruction.operands[which]]
        return made.shapes[0].dims

    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
    if labels is None:
        raise ValueError(f"the convolution {instruction.name!r} has no dim_labels")
    of_kernel = shape(kernel)
    features = of_kernel[labels[1].index("o")]
    return 2.0 * math.prod(shape(out)) * math.prod(of_kernel) / features


def _attention_flops(
    instruction: Instruction, scope: dict[str, Instruction], *, backward: bool
) -> float:
    """Return the FLOPs of cuDNN's attention, from the shape of the scores that it does not keep."""
    scores = re.search(
        r'"intermediate_tensor_shape":\{[^}]*?"dimensions":\[([^\]]*)\]', instruction.attributes
    )
    if scores is None:
        return 0.0
    width = scope[instruction.operands[0]].shapes[0].dims[-1]
    seen = 0.5 if '"mask_type":"CAUSAL' in instruction.attributes else 1.0
    # Two products; backward computes the scores again, and the derivatives of three operands.
    return 2.0 * (5 if backward else 2) * seen * math.prod(_ints(scores[1])) * width


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
