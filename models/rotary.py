"""Rotary positions.

Shape letters: B batch, L positions, N heads, H head width, R numbers of a head that are rotated,
h = R / 2 frequencies.
Source: Su et al., arXiv 2104.09864; neighbours as pairs, as there and in GPT-J; halves, GPT-NeoX.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from .rope_scaling import RopeScaling

Pairs = Literal["halves", "neighbours"]
Rotation = tuple[jax.Array, jax.Array]
"""cos and sin, float32[B, L, 1, h]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
    """How heads are rotated.

    Attributes:
      theta: the base of the wavelengths.
      scaling: how they are lengthened; None for not at all.
      width: R, the numbers of a head, from the first on, that are rotated; the others stay.
      pairs: which two numbers are rotated together: i and i + R / 2, or 2 i and 2 i + 1.
    """

    theta: float
    scaling: RopeScaling | None = None
    width: int
    pairs: Pairs = "halves"

    def tables(self, positions_BL: jax.Array) -> Rotation:
        """Return the cos and sin of these positions."""
        return rotary_tables(positions_BL, self.width, self.theta, self.scaling)

    def rotate(self, x_BLNH: jax.Array, rotation: Rotation) -> jax.Array:
        """Rotate queries or keys, in float32; return their dtype."""
        if self.width == x_BLNH.shape[-1]:
            return rotate(x_BLNH, rotation, self.pairs)
        turned, rest = jnp.split(x_BLNH, [self.width], axis=-1)
        return jnp.concatenate([rotate(turned, rotation, self.pairs), rest], axis=-1)


def rotary_tables(
    positions_BL: jax.Array, width: int, theta: float, scaling: RopeScaling | None = None
) -> Rotation:
    """Return cos and sin, float32[B, L, 1, h], of the scaled angles position / theta^(2 i / R)."""
    frequency = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    if scaling is not None:
        frequency = scaling.scale(frequency, theta, positions_BL)
    angle_BLh = positions_BL[..., None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle_BLh)[:, :, None, :], jnp.sin(angle_BLh)[:, :, None, :]
    if scaling is None or scaling.amplitude == 1:
        return cos, sin
    return cos * scaling.amplitude, sin * scaling.amplitude


def rotate(x_BLNR: jax.Array, rotation: Rotation, pairs: Pairs = "halves") -> jax.Array:
    """Rotate each pair of numbers by its angle, in float32; return x's dtype."""
    cos, sin = rotation
    x = x_BLNR.astype(jnp.float32)
    if pairs == "neighbours":
        first, second = x[..., 0::2], x[..., 1::2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.reshape(x.shape).astype(x_BLNR.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BLNR.dtype)
