"""Error feedback: the error that rounding makes in one step is added to the next step's gradient.

A quantized gradient loses something in every step. Each device keeps a moving average, in 8 bits,
of the error that the hop over `node` made, and adds it to the next gradient before quantizing it.
(LoCo, arXiv 2407.04480, algorithm 1.)
"""

from __future__ import annotations

import jax

from zeroxla.config.feedback import Feedback
from zeroxla.config.wire_format import WireFormat
from zeroxla.wire.quantize import Backend
from zeroxla.wire.quantize_jit import dequantize, quantize
from zeroxla.wire.wire import Wire


def quantize_with_error(
    feedback: Feedback,
    x_Rn: jax.Array,
    error: jax.Array,
    format: WireFormat,
    key: jax.Array | None = None,
    backend: Backend | None = None,
) -> tuple[Wire, jax.Array]:
    """Add the kept error to the rows of x, quantize them, and return the wires and the new error.

    Args:
      feedback: the options of error feedback.
      x_Rn: R rows of n elements, float32.
      error: the kept error of each row, uint8[R, bytes] in `feedback.format`.
      format: the format of the wires.
      key: a PRNG key; used only if the format rounds stochastically.
      backend: the quantizer's backend; see `quantize`.

    Returns:
      One wire for each row, and the new error, uint8[R, bytes].
    """
    size = x_Rn.shape[1]
    old = dequantize(Wire(error, size, feedback.format), shape=(size,), backend=backend)
    x_Rn = x_Rn + old
    wires = quantize(x_Rn, format=format, lead=1, key=key, backend=backend)
    lost = x_Rn - dequantize(wires, shape=(size,), backend=backend)
    new = feedback.momentum * old + (1 - feedback.momentum) * lost
    kept = quantize(new, format=feedback.format, lead=1, backend=backend)
    return wires, kept.buffer
