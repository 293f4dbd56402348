"""The scale "deepspeed" gives DeepSpeed's codes, steps and values, bit for bit.

tests/fixtures/e_quant_testref.npz was recorded from DeepSpeed's own PyTorch references, the
functions its tests compare its kernels with (tests/unit/ops/quantizer, version 0.19.6).
e_quant_kernel_emul.npz is from a PyTorch transliteration of its CUDA kernels
(csrc/includes/quantization_utils.h, swizzled_quantize.cu, version 0.19.8), which do not run on a
CPU. Rows of `x/<case>` are groups. The two agree on symmetric formats. They differ on formats with
offsets: the reference puts the lowest code at the minimum, and the kernel puts code 0 at the middle
of the range. Ours is the kernel's.
"""

from pathlib import Path

import jax
import numpy as np
import pytest
from tools import quantize_oracle
from tools.quantize_cases import options, quantized, restored
from tools.quick import thinned

from zeroxla.quantize import Wire, WireFormat, swizzled_quantize

FIXTURES = Path(__file__).parents[1] / "fixtures"
KERNEL = np.load(FIXTURES / "e_quant_kernel_emul.npz")
REFERENCE = np.load(FIXTURES / "e_quant_testref.npz")
CASES = [name[2:] for name in KERNEL.files if name.startswith("x/")]

swizzled = jax.jit(swizzled_quantize, static_argnames=("format", "nodes", "devices"))


def deepspeed(group, *, bits, symmetric=True):
    return WireFormat(
        bits=bits, block=group, symmetric=symmetric, scale="deepspeed", scale_dtype="float32"
    )


def parts_of(wire):
    return quantize_oracle.parts_of(
        np.asarray(wire.buffer), wire.size, quantize_oracle.Spec(**options(wire.format))
    )


def check_values(wire, shape, name):
    values = np.asarray(restored(wire, shape, "float32"))
    np.testing.assert_array_equal(values, KERNEL[f"dq32/{name}"])
    np.testing.assert_array_equal(values.astype(np.float16), KERNEL[f"dq16/{name}"])


ROWS = [(case, bits) for case in CASES for bits in (8, 4)]
# Each of these cases is quick with one number of bits of each kind of format.
SYMMETRIC = [("randn_8x256", 8), ("outliers_8x128", 4), ("zeros_4x64", 8)]
WITH_OFFSETS = [("randn_8x256", 4), ("outliers_8x128", 8), ("zeros_4x64", 4)]


def quick_first(rows):
    """Return all rows. Those that are not in `rows` are marked slow."""
    return thinned(rows, slow=[row for row in ROWS if row not in rows], rows=True)


@pytest.mark.parametrize(("case", "bits"), quick_first(SYMMETRIC))
def test_symmetric_wires_are_deepspeeds(case, bits):
    x, name = KERNEL[f"x/{case}"], f"{case}/b{bits}/sym"
    np.testing.assert_array_equal(x, REFERENCE[f"x/{case}"])
    wire = quantized(x, deepspeed(x.shape[1], bits=bits))
    parts = parts_of(wire)
    packed = np.concatenate(parts.payload, axis=None)
    np.testing.assert_array_equal(packed, KERNEL[f"packed/{name}"].view(np.uint8))
    codes = quantize_oracle.unpack(parts.payload[0], quantize_oracle.Spec(**options(wire.format)))
    np.testing.assert_array_equal(codes, REFERENCE[f"q/{name}"])
    np.testing.assert_array_equal(parts.steps, KERNEL[f"params/{name}"][:, 0])
    np.testing.assert_array_equal(parts.steps, REFERENCE[f"params/{name}"][:, 0])
    np.testing.assert_array_equal(restored(wire, x.shape, "float32"), REFERENCE[f"dq/{name}"])
    check_values(wire, x.shape, name)


@pytest.mark.parametrize(("case", "bits"), quick_first(WITH_OFFSETS))
def test_wires_with_offsets_are_those_of_deepspeeds_kernel(case, bits):
    x, name = KERNEL[f"x/{case}"], f"{case}/b{bits}/asym"
    wire = quantized(x, deepspeed(x.shape[1], bits=bits, symmetric=False))
    parts = parts_of(wire)
    packed = np.concatenate(parts.payload, axis=None)
    np.testing.assert_array_equal(packed, KERNEL[f"packed/{name}"].view(np.uint8))
    np.testing.assert_array_equal(parts.steps, KERNEL[f"params/{name}"][:, 0])
    np.testing.assert_array_equal(parts.offsets, KERNEL[f"params/{name}"][:, 1])
    check_values(wire, x.shape, name)


@pytest.mark.smoke
@pytest.mark.parametrize(("nodes", "devices"), thinned([(2, 4)], slow=[(2, 2), (4, 2)], rows=True))
def test_swizzled_wires_are_deepspeeds(nodes, devices):
    """DeepSpeed writes all codes and apart from them all steps; our wires are one per partition,
    each with its steps at its end."""
    name = f"qgz_n{nodes}_d{devices}"
    gradient = KERNEL[f"{name}/grads"][0]
    steps = KERNEL[f"{name}/swizzled_scales_rank0"][:, 0]
    format = deepspeed(gradient.size // steps.size, bits=4)
    wires = swizzled(gradient, format, nodes=nodes, devices=devices)
    (buffers,) = wires.buffer
    parts = [parts_of(Wire(buffer, wires.size, format)) for buffer in buffers]
    codes = np.concatenate([each.payload[0] for each in parts], axis=None)
    expected = KERNEL[f"{name}/swizzled_rank0"].view(np.uint8)
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(np.concatenate([each.steps for each in parts]), steps)
