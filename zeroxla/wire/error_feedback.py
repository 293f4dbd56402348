"""Error feedback: what rounding lost in one step is added in the next.

A gradient that is quantized step after step loses something each time. Here each device remembers
the loss on the hop over `node`, as a moving average in 8 bit, and adds it to the next gradient
before that is quantized. (LoCo, arXiv 2407.04480, algorithm 1.)
"""

from __future__ import annotations

import dataclasses

import jax

from zeroxla.wire.quantize import Backend, Wire
from zeroxla.wire.quantize_jit import dequantize, quantize
from zeroxla.config.wire_format import WireFormat


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Feedback:
    """How the error of a hop is carried from step to step.

    error' = momentum x error + (1 - momentum) x (gradient + error - what was sent)

    Raises:
      ValueError: a value is out of range.
    """

    momentum: float = 0.0
    """Share of the old error that is kept; 0 carries the whole loss of the last step."""

    reset_every: int = 512
    """Steps after which the error is dropped: it is of older weights than the gradient."""

    format: WireFormat = dataclasses.field(default_factory=lambda: WireFormat(bits=8))
    """In which the error is kept."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"Feedback(momentum={self.momentum!r}): take a number in [0, 1)")
        if not isinstance(self.reset_every, int) or self.reset_every < 1:
            raise ValueError(
                f"Feedback(reset_every={self.reset_every!r}): take a number of steps, 1 or more"
            )
        if self.format.rounding == "stochastic":
            raise ValueError(
                "Feedback(format=...) rounds stochastically; the error is kept rounded to nearest"
            )

    def quantize(
        self,
        x_Rn: jax.Array,
        error: jax.Array,
        format: WireFormat,
        key: jax.Array | None = None,
        backend: Backend | None = None,
    ) -> tuple[Wire, jax.Array]:
        """Quantize the rows of x with their error added; return the wires and the new error.

        Args:
          x_Rn: float32.
          error: uint8[R, bytes], in `self.format`.
          format: of the wires.
          key: where the format rounds stochastically.
          backend: of the quantizer.
        """
        size = x_Rn.shape[1]
        old = dequantize(Wire(error, size, self.format), shape=(size,), backend=backend)
        x_Rn = x_Rn + old
        wires = quantize(x_Rn, format=format, lead=1, key=key, backend=backend)
        lost = x_Rn - dequantize(wires, shape=(size,), backend=backend)
        new = self.momentum * old + (1 - self.momentum) * lost
        kept = quantize(new, format=self.format, lead=1, backend=backend)
        return wires, kept.buffer

    def num_bytes(self, size: int) -> int:
        """Return the bytes of the error of one row of `size` elements."""
        return self.format.num_bytes(size)
