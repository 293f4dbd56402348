"""The quantizer under `jit`, so that it is traced once for each shape and format.

A model has many leaves with few shapes. Each call would trace the XLA reference and a kernel, which
takes half a second for the rules that compare steps.
"""

from __future__ import annotations

import jax

from zeroxla.wire import quantize as quantizer

quantize = jax.jit(quantizer.quantize, static_argnames=("format", "lead", "backend"))
dequantize = jax.jit(quantizer.dequantize, static_argnames=("shape", "dtype", "backend"))
dequant_sum = jax.jit(quantizer.dequant_sum, static_argnames=("shape", "dtype", "backend"))
dequant_reduce = jax.jit(quantizer.dequant_reduce, static_argnames=("format", "backend"))
