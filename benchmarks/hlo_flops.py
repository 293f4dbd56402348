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
        dims = scope[instruction.operands[0]].shapes[0].dims
        summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        contracted = [int(d) for d in summed[1].split(",") if d] if summed else []
        return 2.0 * instruction.shapes[0].num_elements * math.prod(dims[d] for d in contracted)
    if instruction.opcode == "convolution":
        kernel = scope[instruction.operands[1]].shapes[0].dims
        labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
        assert labels is not None, instruction.rest
        size = instruction.shapes[0].num_elements
        return 2.0 * size * math.prod(kernel) / kernel[labels[1].index("o")]
    if instruction.opcode == "custom-call":
        for name, kind in LAPACK.items():
            if re.search(rf'custom_call_target="[^"]*{name}', instruction.attributes):
                *batch, m, n = instruction.shapes[0].dims
                return FACTORIZATION_FLOPS[kind] * math.prod(batch) * m * n * min(m, n)
    return 0.0
