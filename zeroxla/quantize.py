"""Wire formats as functions: any array as 8-bit or 4-bit codes with a step for every block."""

from zeroxla.wire.quantize import (
    Wire,
    WireFormat,
    dequant_reduce,
    dequant_sum,
    dequantize,
    quantize,
    swizzled_quantize,
)

__all__ = [
    "Wire",
    "WireFormat",
    "dequant_reduce",
    "dequant_sum",
    "dequantize",
    "quantize",
    "swizzled_quantize",
]
