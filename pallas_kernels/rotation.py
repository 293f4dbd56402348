"""The Hadamard rotation of a block's elements, 32 at a time."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

SIZE = 32
# H H = 32: there and back is the identity, and both products are exact.
THERE, BACK = 1 / 4, 1 / 8


def rotate(pieces: Sequence[jax.Array], factor: float) -> list[jax.Array]:
    """Return `factor` times the Hadamard matrix, applied across pieces.

    Args:
      pieces: SIZE arrays of one shape; element i of a rotated group lies in piece i.
      factor: THERE or BACK.

    Returns:
      As many arrays. Cost: 5 additions an element.
    """
    pieces = list(pieces)
    stride = len(pieces) // 2
    while stride:
        for i in range(len(pieces)):
            if not i & stride:
                a, b = pieces[i], pieces[i + stride]
                pieces[i], pieces[i + stride] = a + b, a - b
        stride //= 2
    return [piece * np.float32(factor) for piece in pieces]
