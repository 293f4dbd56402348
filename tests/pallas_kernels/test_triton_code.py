"""The code of every Triton kernel for an A100 and a Hopper GPU, compiled on a machine without one.

That the kernels give the right bits is tested in Triton's interpreter (test_kernels.py).
"""

from __future__ import annotations

import re

import pytest
from tools.kernels import variants
from tools.triton_code import CAPABILITIES, KERNELS, compile_elsewhere

from zeroxla.pallas_kernels import shim

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not shim.has_triton(), reason="jax-triton is not installed; the extra triton brings it"
    ),
]
TARGETS = {80: "sm_80", 90: "sm_90a"}


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """The folder with the code of all kernels."""
    folder = tmp_path_factory.mktemp("code")
    compile_elsewhere(folder)
    return folder


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", [name for name, _ in variants("triton")])
def test_every_kernel_compiles_and_fuses_nothing(name, capability, code):
    text = (code / f"{name}.{capability}.ptx").read_text()
    assert re.findall(r"^\.target (\w+)", text, re.MULTILINE) == [TARGETS[capability]]
    arithmetic = set(re.findall(r"\b((?:mul|add|sub|fma|mad)\.(?:\w+\.)*f32)\b", text))
    assert "mul.rn.f32" in arithmetic
    # ".rn" keeps the assembler from fusing a product and a sum.
    assert arithmetic <= {"mul.rn.f32", "add.rn.f32", "sub.rn.f32"}


@pytest.mark.parametrize("kernel", KERNELS)
def test_jax_triton_launches_a_kernel(kernel, code):
    path = code / f"{kernel}.mlir"
    if not path.exists():
        pytest.skip("jax-triton lowers with the CUDA plugin (extra plan-gpu) and JAX from 0.11 on")
    assert path.read_text().count("@triton_kernel_call") == 1
