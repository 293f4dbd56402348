"""The code of Triton kernels for GPUs that are not there.

A process whose Triton interprets cannot compile (TRITON_INTERPRET, conftest.py of the kernels'
tests). So tests compile in another one:

    python -m tools.triton_code FOLDER      # from tests/

writes FOLDER/NAME.CAPABILITY.ptx for each variant of tools.kernels and each of CAPABILITIES. With
the CUDA plugin it also writes FOLDER/KERNEL.mlir: a program for an A100 that jax-triton lowered.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

CAPABILITIES = (80, 90)  # Triton compiles for sm_90a if it is told 90
KERNELS = ("quantize", "dequant_sum", "dequant_reduce")


def compile_elsewhere(folder: Path) -> None:
    """Write the code of every Triton kernel into a folder, by another process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    command = [sys.executable, "-m", "tools.triton_code", str(folder)]
    tests = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def main(folder: str) -> None:
    import jax

    from tools.kernels import on, variants
    from zeroxla.pallas_kernels.shim import triton_compiled

    found = dict(variants("triton"))
    for name, (function, shapes) in found.items():
        for capability in CAPABILITIES:
            code = triton_compiled(function, shapes, capability).asm["ptx"]
            Path(folder, f"{name}.{capability}.ptx").write_text(code)
    if find_spec("jax_cuda13_plugin") is None or not hasattr(jax.sharding, "AbstractDevice"):
        return
    for kernel in KERNELS:
        name = next(name for name in found if name.startswith(f"triton-{kernel}-"))
        function, shapes = found[name]
        with jax.sharding.use_abstract_mesh(on("NVIDIA A100")):
            lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
        Path(folder, f"{kernel}.mlir").write_text(lowered.as_text())


if __name__ == "__main__":
    main(sys.argv[1])
