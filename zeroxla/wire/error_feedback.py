"""Error feedback: what rounding lost in one step is added in the next.

A gradient that is quantized step after step loses something each time. Here each device remembers
the loss on the hop over `node`, as a moving average in 8 bit, and adds it to the next gradient
before that is quantized. (LoCo, arXiv 2407.04480, algorithm 1.)
"""

from __future__ import annotations

import jax

from zeroxla.config.feedback import Feedback
from zeroxla.config.wire_format import WireFormat
from zeroxla.wire.quantize import Backend, Wire
from zeroxla.wire.quantize_jit import dequantize, quantize


def quantize_with_error(
    feedback: Feedback,
    x_Rn: jax.Array,
    error: jax.Array,
    format: WireFormat,
    key: jax.Array | None = None,
    backend: Backend | None = None,
) -> tuple[Wire, jax.Array]:
    """Quantize the rows of x with their error added; return the wires and the new error.

    Args:
      feedback: how the error is carried.
      x_Rn: float32.
      error: uint8[R, bytes], in `feedback.format`.
      format: of the wires.
      key: a PRNG key, where the format rounds stochastically.
      backend: of the quantizer.
    """
    size = x_Rn.shape[1]
    old = dequantize(Wire(error, size, feedback.format), shape=(size,), backend=backend)
    x_Rn = x_Rn + old
    wires = quantize(x_Rn, format=format, lead=1, key=key, backend=backend)
    lost = x_Rn - dequantize(wires, shape=(size,), backend=backend)
    new = feedback.momentum * old + (1 - feedback.momentum) * lost
    kept = quantize(new, format=feedback.format, lead=1, backend=backend)
    return wires, kept.buffer
