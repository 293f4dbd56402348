"""`AnyEquation`: cuts an equation along places, each kind in its own way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from zeroxla.hybrid.from_trace.equations import AtPlace, ByRule, Window, places_behind
from zeroxla.hybrid.from_trace.loops import cut_loop, places_behind_loop
from zeroxla.hybrid.from_trace.places import Along, ForbiddenError
from zeroxla.hybrid.from_trace.plan import Places
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Value


@dataclasses.dataclass(frozen=True, slots=True)
class AnyEquation:
    """A `Cutter`; its methods are explained there.

    Attributes:
      num_places: the number of places.
      dtype: the dtype in which floating arrays are kept; None keeps their own.
    """

    num_places: int
    dtype: Any = None

    def keep(self, value: Value) -> jax.ShapeDtypeStruct:
        """Return the array that keeps a value from place to place."""
        dtype = self.dtype if value.is_float and self.dtype is not None else value.aval.dtype
        return jax.ShapeDtypeStruct(value.aval.shape, dtype)

    def behind(
        self, eq: Equation, found: Sequence[frozenset[Along] | None]
    ) -> Sequence[frozenset[Along] | None]:
        """Return the dims that hold places in each result of an equation."""
        if eq.name == "scan":
            return places_behind_loop(Scan(eq), found, self)
        return places_behind(eq, found)

    def cut(self, eq: Equation, places: Places, wanted: Mapping[int, Along]) -> AtPlace:
        """Return an equation as it is computed at one place."""
        if eq.name == "scan":
            found = [places.get(x) if isinstance(x, Value) else None for x in eq.inputs]
            return cut_loop(Scan(eq), found, wanted, self)
        for i, along in wanted.items():
            size = along.outer * self.num_places * along.inner
            if eq.outputs[i].aval.shape[along.dim] != size:
                raise ForbiddenError(eq, "it has more places, or fewer, than a row")
        window = Window.of(eq, wanted[0]) if eq.name == "conv_general_dilated" else None
        return window or ByRule.of(eq, wanted, self.num_places)
