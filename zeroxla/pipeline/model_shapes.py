"""`ModelShapes`: the shapes for which a model is cut into stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from zeroxla.program.shapes import shapes_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelShapes:
    """The shapes of what a model's loss is computed from.

    Attributes:
      params: of the parameters, in the compute dtype, as a tree.
      model_state: of the model state, as a tree.
      batch: of one device's micro-batch.
      key: of its PRNG key.
      kinds: a key for each parameter. Only those that agree in it may be stacked.
      losses: by `train`, the loss of parameters that are parts of the model's, if axes split the
        work on one row, or the loss that is rewritten; None for the model's own loss.
    """

    params: Any
    model_state: Any
    batch: Any
    key: Any
    kinds: tuple[Hashable, ...]
    losses: Mapping[bool, Callable[..., Any]] | None = None

    @property
    def plain(self) -> ModelShapes:
        """The same without shardings."""
        params, model_state, batch, key = shapes_of(self.arguments)
        return dataclasses.replace(
            self, params=params, model_state=model_state, batch=batch, key=key
        )

    @property
    def arguments(self) -> tuple[Any, Any, Any, Any]:
        """The arguments of the loss: parameters, model state, batch and key."""
        return self.params, self.model_state, self.batch, self.key
