"""The collectives of one training setup: gathers, reduces, and small sums.

Every collective passes one mesh axis at a time. A flat collective over both axes would move 4.5x to
7x the bytes between hosts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.mesh.axes import DEVICE, LEAF_AXES, NODE, PIPE
from zeroxla.wire.gather import Gathers
from zeroxla.wire.hops import Hops
from zeroxla.wire.reduce import Reduces


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Collectives:
    """The collectives of one training setup; every method runs inside `shard_map`.

    Attributes:
      gathers: the gathers of leaves.
      reduces: the reduces of gradients.
      ties_by_data: whether ties between collectives must also be ties of data, as on XLA's CPU
        backend; see `fetch/ties.py`.
      exchanges_across_turns: whether a loop makes the last hop of a turn's quantized gradients in
        its next turn; see `fetch/loop_runner.py`.
      stages: length of the axis `pipe`, for sums over all stages; 1 for sums inside one stage.
    """

    gathers: Gathers
    reduces: Reduces
    ties_by_data: bool = False
    exchanges_across_turns: bool = False
    stages: int = 1

    @property
    def hops(self) -> Hops:
        """The hops of a gather."""
        return self.gathers.hops

    @property
    def world(self) -> int:
        """Number of data-parallel devices: nodes x devices per node."""
        return self.hops.world

    def num_holders(self, axes: Sequence[str]) -> int:
        """Return the number of devices, of all stages, that hold a leaf whole if it is not split
        over `axes`."""
        return self.hops.over(axes).world * self.stages

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Dtype of gathered leaves."""
        return self.gathers.compute_dtype

    def sum(self, x: jax.Array, axes: Sequence[str] = LEAF_AXES) -> jax.Array:
        """Sum a vector over data-parallel devices and stages, hop by hop. Use it for small vectors
        only: every device receives all of it.

        Args:
          x: the vector.
          axes: the axes over which a leaf is split; axes that split work are summed over too.
        """
        return self._reduced(lax.psum, x, axes)

    def sum_everywhere(self, x: jax.Array) -> jax.Array:
        """Sum a small vector over all devices, those of axes that split work included."""
        return self._reduced(lax.psum, x, dict(self.hops.lengths))

    def once(self, x: jax.Array) -> jax.Array:
        """Return x on the first device along each axis that splits work, and zeros on the others:
        what all of them have then counts once in `sum_everywhere`."""
        for axis, _ in self.hops.lengths:
            x = jnp.where(lax.axis_index(axis) == 0, x, jnp.zeros_like(x))
        return x

    def max(self, x: jax.Array) -> jax.Array:
        """Return the largest value over all devices of each element of a small vector."""
        return self._reduced(lax.pmax, x, LEAF_AXES)

    def _reduced(
        self, reduce: Callable[..., jax.Array], x: jax.Array, axes: Collection[str]
    ) -> jax.Array:
        if not x.size:
            return x
        split = [(axis, length) for axis, length in self.hops.lengths if axis in axes]
        data = [(DEVICE, self.hops.devices), (NODE, self.hops.nodes), (PIPE, self.stages)]
        for axis, length in (*split, *data):
            if length > 1:
                x = reduce(x, axis)
        return x

    def rank(self) -> jax.Array:
        """Return this device's data-parallel index, node * devices per node + device: int32."""
        return lax.axis_index(NODE) * self.hops.devices + lax.axis_index(DEVICE)

    def number(self) -> jax.Array:
        """Return this device's number among all that are no other stage's: the rank, and its
        places along the axes that split work, int32."""
        number = self.rank()
        for axis, length in self.hops.lengths:
            number = number * length + lax.axis_index(axis)
        return number
