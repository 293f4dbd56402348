"""Cotangents that arrive from several readers of one value, summed."""

from __future__ import annotations

from typing import Any

import jax


class Sums(dict[Any, jax.Array]):
    """Cotangents by what they belong to; absent is zero."""

    def add(self, key: Any, ct: jax.Array) -> None:
        """Add a cotangent to what is there."""
        self[key] = self[key] + ct if key in self else ct

    def pop(self, key: Any) -> jax.Array | None:  # type: ignore[override]
        """Take out what is there, or None."""
        return super().pop(key, None)
