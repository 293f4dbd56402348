"""`CotangentSums`: adds up the cotangents that several readers of a value send."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


class CotangentSums(dict[Any, jax.Array]):
    """Cotangents by the value that they belong to. A missing one is zero."""

    def add(self, key: Any, ct: jax.Array) -> None:
        """Add a cotangent to the sum."""
        self[key] = self[key] + ct if key in self else ct

    def add_at_once(self, key: Any, ct: jax.Array) -> None:
        """Add a cotangent to the sum, which XLA makes as it is written here.

        It makes one kernel of several sums otherwise, before which all their terms are alive.
        """
        self[key] = lax.optimization_barrier(self[key] + ct) if key in self else ct

    def pop(self, key: Any) -> jax.Array | None:  # type: ignore[override]
        """Remove and return a sum; None if there is none."""
        return super().pop(key, None)
