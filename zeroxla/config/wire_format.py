"""`WireFormat`: the options of a quantized array, and which of them exclude each other."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

from zeroxla.pallas_kernels.arithmetic import Rule
from zeroxla.pallas_kernels.layout import Layout
from zeroxla.pallas_kernels.rotation import SIZE

Scale = Literal["bound", "mse", "deepspeed"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WireFormat:
    """How an array is quantized, block by block.

    Raises:
      ValueError: a field has a value that is not listed below, or two fields exclude each other.
    """

    bits: int = 8
    """Bits of a code: 8, or 4 (two codes in a byte)."""

    block: int = 256
    """Number of consecutive elements that share a step. Any number will do; the last block ends
    with the data. (DeepSpeed's group.)"""

    symmetric: bool = True
    """True: value = code x step. False: value = code x step + offset, for data far from zero."""

    scale: Scale | None = None
    """Rule that chooses the step. "bound": no error exceeds step / 2, not even at the largest
    magnitude, but for 2^-15 of a step by which a code's roundings may be off. "mse": a small
    squared error over many blocks, by a step that is computed from a block's peak and, at 4 bits,
    from sums of its magnitudes. "deepspeed": DeepSpeed's rule, which clips a positive peak by one
    step. None means "bound" at 8 bits or with stochastic rounding, and "mse" at 4 bits."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rule of rounding. "stochastic" draws one of the two nearest codes, with chances that make the
    mean exact to 2^-14 of a step. It needs scale="bound", whose step is then
    peak / (2^(bits-1) - 1)."""

    scale_dtype: str | None = None
    """Dtype of steps and offsets on the wire: float32 or bfloat16. None means bfloat16 for blocks
    below 256 (unless the scale is DeepSpeed's), where a float32 would take more than 1.6 % of the
    bytes at 8 bits. Otherwise it means float32."""

    hadamard: int = 0
    """32 rotates neighbours by a Hadamard matrix, 32 at a time, before they are quantized, and back
    afterwards. An outlier then costs all 32 a little precision instead of costing its block much. 0
    rotates nothing. (SDP4Bit, arXiv 2410.15526, section 3.2.)"""

    def __post_init__(self) -> None:
        if self.bits not in (8, 4) or not isinstance(self.bits, int):
            raise ValueError(f"WireFormat(bits={self.bits!r}): a code has 8 or 4 bits")
        if not isinstance(self.block, int) or isinstance(self.block, bool) or self.block < 1:
            raise ValueError(
                f"WireFormat(block={self.block!r}): a block has a whole number of elements, at "
                "least 1; 256 is usual"
            )
        if self.scale not in (None, "bound", "mse", "deepspeed"):
            raise ValueError(
                f'WireFormat(scale={self.scale!r}): take "bound", "mse" or "deepspeed", or '
                "None for the default of the width"
            )
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f'WireFormat(rounding={self.rounding!r}): take "nearest" or "stochastic"'
            )
        if self.rounding == "stochastic" and self.scale not in (None, "bound"):
            raise ValueError(
                f'WireFormat(rounding="stochastic", scale={self.scale!r}): that scale clips the '
                'peak, so the mean would be biased; take scale="bound"'
            )
        if self.scale_dtype not in (None, "float32", "bfloat16"):
            raise ValueError(
                f"WireFormat(scale_dtype={self.scale_dtype!r}): take float32 or bfloat16 (a "
                "float16 ends at 65504 and at 6e-8, which gradients pass)"
            )
        if self.hadamard not in (0, SIZE):
            raise ValueError(
                f"WireFormat(hadamard={self.hadamard!r}): take {SIZE}, or 0 for no rotation"
            )
        if self.hadamard and self.block % SIZE:
            raise ValueError(
                f"WireFormat(hadamard={SIZE}, block={self.block}): a rotated block is a multiple "
                f"of {SIZE}; take block={-(-self.block // SIZE) * SIZE}, or hadamard=0"
            )
        if self.hadamard and self.scale == "deepspeed":
            raise ValueError(
                'WireFormat(hadamard=32, scale="deepspeed"): that scale is for parity with '
                'DeepSpeed, which has no rotation; take scale="bound" or "mse"'
            )
        default = "bound" if self.bits == 8 or self.rounding == "stochastic" else "mse"
        object.__setattr__(self, "scale", self.scale or default)
        short = self.block < 256 and self.scale != "deepspeed"
        object.__setattr__(
            self, "scale_dtype", self.scale_dtype or ("bfloat16" if short else "float32")
        )

    @property
    def words(self) -> str:
        """Width and block as tables show them, such as "int4/128 rotated"."""
        return f"int{self.bits}/{self.block}{' rotated' if self.hadamard else ''}"

    def layout(self, size: int) -> Layout:
        """Return the layout of a wire of `size` elements."""
        assert self.scale is not None
        rule = Rule(
            bits=self.bits,
            symmetric=self.symmetric,
            scale=self.scale,
            stochastic=self.rounding == "stochastic",
            short=self.scale_dtype == "bfloat16",
        )
        return Layout(size=size, block=self.block, rule=rule, rotated=bool(self.hadamard))

    def num_bytes(self, size: int) -> int:
        """Return the bytes of a wire of `size` elements: payload, steps, offsets, and zeros that
        fill it up to a multiple of 16."""
        return self.layout(size).num_bytes


def key_for(format: WireFormat, key: jax.Array | None) -> jax.Array | None:
    """Return the key if the format rounds stochastically, and None otherwise."""
    return key if format.rounding == "stochastic" else None
