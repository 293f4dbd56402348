"""Weights of the tiny checkpoints of model families, drawn by the names of their tensors.

The program that records references (`tests/fixtures/families/record.py`, in an environment with
PyTorch) and the tests draw the same, so that no weights need be stored. It needs NumPy alone.
"""

from __future__ import annotations

import hashlib
import re

import numpy as np


def weights(shapes: dict[str, tuple[int, ...]], *, plus_one: bool = False) -> dict[str, np.ndarray]:
    """Return the tensors, float32: scales of norms around 1, or around 0 if the model adds 1 to
    them; others around 0."""
    return {name: _draw(name, tuple(shape), plus_one) for name, shape in shapes.items()}


def _draw(name: str, shape: tuple[int, ...], plus_one: bool) -> np.ndarray:
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    values = np.random.Generator(np.random.Philox(key=key)).normal(size=shape)
    is_scale = re.search(r"(norm|ln_[1f]|ln|LayerNorm|layernorm_?\w*)\.weight$", name) is not None
    if is_scale:
        return (0.1 * values + (0 if plus_one else 1)).astype(np.float32)
    # Embeddings and products of this size let a tiny model's logits differ clearly.
    return ((0.2 if len(shape) > 1 else 0.1) * values).astype(np.float32)
