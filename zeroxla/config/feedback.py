"""`Feedback`: how the quantization error of a gradient is carried into the next step."""

from __future__ import annotations

import dataclasses

from zeroxla.config.wire_format import WireFormat


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Feedback:
    """How the quantization error of the hop over `node` is carried from step to step.

    error' = momentum x error + (1 - momentum) x (gradient + error - what was sent)

    Raises:
      ValueError: a value is out of range.
    """

    momentum: float = 0.0
    """Share of the old error that is kept, in [0, 1). With 0 the error is what the last step
    lost."""

    reset_every: int = 512
    """Steps after which the error is dropped, because it stems from older weights than the
    gradient."""

    format: WireFormat = dataclasses.field(default_factory=lambda: WireFormat(bits=8))
    """Format in which the error is kept."""

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

    def num_bytes(self, size: int) -> int:
        """Return the bytes that the error of one row of `size` elements takes."""
        return self.format.num_bytes(size)
