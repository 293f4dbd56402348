"""Cuts one device's rows of a batch into micro-batches, each with a key of its own.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax

from zeroxla.step.micro_batches import micro_batches
from zeroxla.wire.collectives import Collectives


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """What every stage knows of one micro-batch.

    Attributes:
      rows: the micro-batch's rows of the batch.
      key: the key of the model's randomness.
    """

    rows: Any
    key: jax.Array


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MicroBatches:
    """All micro-batches of one device.

    Attributes:
      rows: the rows of the batch, [micro-batches, rows, ...].
      keys: the keys, [micro-batches].
    """

    rows: Any
    keys: jax.Array

    @staticmethod
    def of(batch: Any, key: jax.Array, count: int, collectives: Collectives) -> MicroBatches:
        """Cut this device's rows of a batch.

        Args:
          batch: the rows; their number divides by `count`.
          key: the step's key. Each micro-batch of each of a stage's devices gets a key of its own,
            the same one in every stage.
          count: the number of micro-batches.
          collectives: the collectives among a stage's devices.
        """
        rows, keys = micro_batches(batch, key, count)
        keys = jax.vmap(lambda k: jax.random.fold_in(k, collectives.rank()))(keys)
        return MicroBatches(rows, keys)

    def at(self, i: jax.Array) -> MicroBatch:
        """Return micro-batch `i`."""
        return MicroBatch(_row(self.rows, i), self.keys[i])

    def shapes(self) -> tuple[Any, Any]:
        """Return the shapes of one micro-batch's rows and of its key."""
        rows = jax.eval_shape(lambda rows: _row(rows, 0), self.rows)
        return rows, jax.eval_shape(lambda keys: keys[0], self.keys)


def _row(rows: Any, i: Any) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), rows)
