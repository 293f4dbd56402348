"""`ModelShapes`: the shapes for which a model is cut into stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
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
    """

    params: Any
    model_state: Any
    batch: Any
    key: Any
    kinds: tuple[Hashable, ...]

    @property
    def plain(self) -> ModelShapes:
        """The same without shardings."""
        params, model_state, batch, key = shapes_of(self.arguments)
        return ModelShapes(
            params=params, model_state=model_state, batch=batch, key=key, kinds=self.kinds
        )

    @property
    def arguments(self) -> tuple[Any, Any, Any, Any]:
        """The arguments of the loss: parameters, model state, batch and key."""
        return self.params, self.model_state, self.batch, self.key
