"""ZeRO++ compiled for 8 H200 on any machine: wires and kernels of the program that would run.

Nightly, where JAX's CUDA wheels are installed (the extra plan-gpu).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.inspect import comms
from zeroxla.models import GPT
from zeroxla.planning.gpu_topology import H200, WheelsMissingError, target_mesh

pytestmark = pytest.mark.nightly


@functools.cache
def compiled(preset: str, scan: bool):
    try:
        mesh = target_mesh(H200, {"node": 2, "device": 4})
    except WheelsMissingError as error:
        pytest.skip(str(error))
    model = GPT.tiny(layers=2, width=512, heads=8, length=128, vocab=256, scan=scan)
    config = getattr(ZeroConfig, preset)(compute_dtype="bfloat16")
    step = zeroxla.make_step(model, mesh, optax.adamw(1e-3), config=config)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 129), jnp.int32)}
    program = step.lower(step.abstract_state(batch), batch).compile()
    return program.as_text(), mesh


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("preset", ["zeropp", "zeropp_hq", "zeropp_min"])
def test_a_step_compiles_with_kernels_and_quantized_wires(preset, scan):
    text, mesh = compiled(preset, scan)
    found = comms(text, mesh)
    wires = found.select(dtype="u8")
    assert {row.kind for row in wires} == {"all-gather", "all-to-all"}
    assert found.count(phase="backward gather", axis="node") == 0
    assert not found.flat(min_elements=1024)
    # One Mosaic kernel at least for each of: quantize weights, dequantize them, quantize gradients,
    # and what stands between the hops.
    kernels = [line for line in text.splitlines() if "custom-call" in line and "mosaic" in line]
    assert len(kernels) >= 4
