"""DeepSpeed's quantizer in PyTorch: its CUDA kernels' functions, for hosts that have CPUs only.

It is a stand-in. The wire is theirs: symmetric blocks, a float32 step each, codes of 8 bit or, two
a byte, of 4, in the same order, so the bytes between hosts are DeepSpeed's. The time is not: how
long these functions take says nothing of the kernels. They take and give float32 where the kernels
have float16, and steps are [G] where theirs are [G, 1]: Gloo gathers into as many dims only.

Names and signatures are those of DeepSpeed's csrc/quantization/pt_binding.cpp. Shape letters: G
groups (DeepSpeed's word for blocks), E elements of a group. DeepSpeed's own version in PyTorch, for
NPUs, truncates where the kernels round to nearest, and takes several times as long on a CPU.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

Symmetric = 0


def install() -> None:
    """Make DeepSpeed load this module in place of its kernels."""
    import deepspeed.ops.op_builder

    class Builder:
        def load(self) -> object:
            return sys.modules[__name__]

    deepspeed.ops.op_builder.QuantizerBuilder = Builder


def quantize(input_vals: Tensor, groups: int, num_bits: int, quant_type: int) -> list[Tensor]:
    """Return [codes int8, of the input's shape with the last dim packed; steps float32[G]]."""
    assert quant_type == Symmetric
    codes_GE, steps_G = _quantize(input_vals.reshape(groups, -1), num_bits)
    return [_pack(codes_GE, num_bits).view(*input_vals.shape[:-1], -1), steps_G]


def dequantize(
    quantized_data: Tensor, params: Tensor, groups: int, num_bits: int, quant_type: int
) -> Tensor:
    """Return float32 values, of the codes' shape with the last dim unpacked."""
    assert quant_type == Symmetric
    values_GE = _unpack(quantized_data, num_bits).view(groups, -1).mul_(params.view(groups, 1))
    return values_GE.view(*quantized_data.shape[:-1], -1)


def swizzle_quant(
    input_vals: Tensor,
    groups: int,
    num_bits: int,
    quant_type: int,
    pipeline_size: int,
    nodes: int,
    devices_per_node: int,
) -> list[Tensor]:
    """Quantize; partition p = node * devices_per_node + device goes to device * nodes + node.

    Returns:
      [codes int8, flat; steps float32[G]].
    """
    assert quant_type == Symmetric
    assert pipeline_size == 1
    values = input_vals.reshape(nodes, devices_per_node, groups // (nodes * devices_per_node), -1)
    codes_GE, steps_G = _quantize(values.transpose(0, 1).reshape(groups, -1), num_bits)
    return [_pack(codes_GE, num_bits).view(-1), steps_G]


def quantized_reduction(
    input_vals: Tensor,
    input_scales: Tensor,
    in_groups: int,
    out_groups: int,
    num_bits: int,
    quant_type: int,
    devices_per_node: int,
) -> list[Tensor]:
    """Dequantize what `devices_per_node` sources sent, one after the other, sum, quantize the sum.

    Returns:
      [codes int8, flat, as many as one source sent; steps float32[out_groups]].
    """
    values = dequantize(input_vals, input_scales, in_groups, num_bits, quant_type)
    total = values.view(devices_per_node, -1).sum(0)
    return quantize(total, out_groups, num_bits, quant_type)


def _quantize(values_GE: Tensor, num_bits: int) -> tuple[Tensor, Tensor]:
    values_GE = values_GE.float()
    half_range = 2 ** (num_bits - 1)
    steps_G1 = values_GE.abs().amax(dim=1, keepdim=True) / half_range
    steps_G1.masked_fill_(steps_G1 == 0, 1)
    codes_GE = (values_GE / steps_G1).round_().clamp_(-half_range, half_range - 1)
    return codes_GE.to(torch.int8), steps_G1.view(-1)


def _pack(codes_GE: Tensor, num_bits: int) -> Tensor:
    if num_bits == 8:
        return codes_GE
    low, high = codes_GE[:, 0::2], codes_GE[:, 1::2]
    return (low & 15) | (high << 4)


def _unpack(packed: Tensor, num_bits: int) -> Tensor:
    if num_bits == 8:
        return packed.float()
    # Much faster than to mix int8 with float32 in one operation.
    pairs = torch.empty(*packed.shape, 2)
    pairs[..., 0] = (packed << 4) >> 4  # a shift to the right repeats the sign
    pairs[..., 1] = packed >> 4
    return pairs
