"""The FLOPs and bytes of single instructions of compiled programs."""

from __future__ import annotations

import pytest

from zeroxla.program import hlo
from zeroxla.program.hlo.cost import cost_of

TEXT = """HloModule step

%sliced {
  %stack = f32[6,32,64] parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,32,64] dynamic-slice(%stack, %i, %zero, %zero), dynamic_slice_sizes={1,32,64}
  ROOT %row = f32[32,64] bitcast(%slice)
}

%renamed {
  %stack = f32[6,32,64] parameter(0)
  %i = s32[] parameter(1)
  %flat = f32[6,2048] bitcast(%stack)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,2048] dynamic-slice(%flat, %i, %zero), dynamic_slice_sizes={1,2048}
}

%written {
  %stack = f32[6,32,64] parameter(0)
  %row = f32[1,32,64] parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f32[6,32,64] dynamic-update-slice(%stack, %row, %i, %zero, %zero)
}

%product {
  %a = bf16[32,64] parameter(0)
  %b = bf16[64,16] parameter(1)
  ROOT %made = f32[32,16] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main {
  %stack = f32[6,32,64] parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,32,64] parameter(2)
  %a = bf16[32,64] parameter(3)
  %b = bf16[64,16] parameter(4)
  %image = f32[2,8,8,3] parameter(5)
  %kernel = f32[3,3,3,16] parameter(6)
  %q = bf16[2,128,4,64] parameter(7)
  %one = f32[32,64] fusion(%stack, %i), kind=kLoop, calls=%sliced
  %two = f32[6,32,64] fusion(%stack, %row, %i), kind=kLoop, calls=%written
  %three = f32[32,16] fusion(%a, %b), kind=kCustom, calls=%product
  %four = (bf16[32,16], s8[4194304]) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":\
["1"],"rhs_contracting_dimensions":["0"]}}}
  %five = (f32[2,8,8,16], u8[0]) custom-call(%image, %kernel), window={size=3x3 pad=1_1x1_1}, \
dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convForward"
  %six = (bf16[2,128,4,64], u8[16]) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":{\
"mask_type":"CAUSAL","intermediate_tensor_shape":{"element_type":"BF16","dimensions":\
["2","4","128","128"]}}}
  %nine = f32[1,2048] fusion(%stack, %i), kind=kLoop, calls=%renamed
  %seven = f32[32,64] bitcast(%row)
  %eight = f32[32,64] add(%one, %one)
  ROOT %out = (f32[32,64]) tuple(%eight)
}
"""
MODULE = hlo.parse(TEXT)
SCOPE = MODULE.computations["main"]


def cost(name):
    found = cost_of(SCOPE[name], SCOPE, MODULE)
    return found.flops, found.dtype, found.num_bytes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Of what is sliced the slice is read, and a number; the result is written.
        ("one", (0, "f32", 32 * 64 * 4 + 4 + 32 * 64 * 4)),
        # Of what is written in place the row is read and written.
        ("two", (0, "f32", 32 * 64 * 4 + 4 + 32 * 64 * 4)),
        ("nine", (0, "f32", 2048 * 4 + 4 + 2048 * 4)),
        ("three", (2 * 32 * 64 * 16, "bf16", 2 * (32 * 64 + 64 * 16) + 4 * 32 * 16)),
        # The workspace is no result.
        ("four", (2 * 32 * 64 * 16, "bf16", 2 * (32 * 64 + 64 * 16 + 32 * 16))),
        (
            "five",
            (2 * 2 * 64 * 16 * 27, "f32", 4 * (2 * 64 * 3 + 27 * 16 + 2 * 64 * 16)),
        ),
        # Two products, of which a causal mask leaves half.
        ("six", (2 * 2 * 0.5 * 2 * 4 * 128**2 * 64, "bf16", 2 * 4 * 2 * 128 * 4 * 64)),
        ("seven", (0, "f32", 0)),
        ("eight", (0, "f32", 3 * 32 * 64 * 4)),
    ],
)
def test_the_cost_of_an_instruction(name, expected):
    assert cost(name) == expected
