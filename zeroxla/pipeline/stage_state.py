"""The model state in a pipeline: each stage changes its own part, micro-batch by micro-batch.

Every device carries the whole state through a step, once for each of its stages, and only that
stage's part of it is new. At the end the parts are put together. Where what a stage computes
depends on the state, as a norm of weights does on its running vector, a ring keeps the state that
each micro-batch saw, because its backward runs the stage again when later micro-batches have
changed it.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.mesh.axes import PIPE
from zeroxla.pipeline.stage import StateShare
from zeroxla.pipeline.stage_moves import each_rank
from zeroxla.program.paths import Path
from zeroxla.program.trace import is_float
from zeroxla.wire.vectors import as_words, from_words

Keeps = Sequence[Sequence[StateShare]]
"""For each stage, the parts of the state that it changes."""


class StageState(NamedTuple):
    """The model state as a device carries it through a step for one of its stages.

    Attributes:
      leaves: its leaves, after the stage's newest micro-batch.
      ring: the same, stacked, as earlier micro-batches saw them; empty if nothing depends on them.
    """

    leaves: list[jax.Array]
    ring: list[jax.Array]

    @staticmethod
    def start(leaves: Sequence[jax.Array], num_slots: int) -> StageState:
        """Return the state at the start of a step, with a ring of so many slots."""
        slots = [jnp.broadcast_to(x, (num_slots, *x.shape)) for x in leaves] if num_slots else []
        return StageState(list(leaves), slots)

    def changed(self, leaves: Sequence[jax.Array], number: jax.Array) -> StageState:
        """Return the state after a micro-batch, which is `number`."""
        ring = [
            lax.dynamic_update_index_in_dim(slots, old, number % slots.shape[0], 0)
            for slots, old in zip(self.ring, self.leaves)
        ]
        return StageState(list(leaves), ring)

    def seen_by(self, number: jax.Array) -> list[jax.Array]:
        """Return the leaves as a micro-batch saw them. Without a ring they are the newest, on which
        nothing depends."""
        if not self.ring:
            return self.leaves
        return [
            lax.dynamic_index_in_dim(slots, number % slots.shape[0], keepdims=False)
            for slots in self.ring
        ]


def check_keeps(keeps: Keeps, paths: Sequence[Path]) -> None:
    """Check that no two stages change the same part of the state.

    All stages may compute one and the same value, such as the number of steps.

    Args:
      keeps: see `Keeps`.
      paths: the paths of the state's leaves.

    Raises:
      NotImplementedError: two stages change one leaf.
    """
    changed_by = collections.defaultdict[int, list[int]](list)
    for stage, shares in enumerate(keeps):
        for share in shares:
            if share.rows is None:
                changed_by[share.leaf].append(stage)
    for leaf, stages in changed_by.items():
        if 1 < len(stages) < len(keeps):
            raise NotImplementedError(
                f"stages {stages} change one leaf of the model's state, {'/'.join(paths[leaf])!r}; "
                "the next micro-batch could not begin before the last of them; share no layer with "
                "a state between stages, or use pipe=1"
            )


def put_together(
    states: Sequence[Sequence[jax.Array]], keeps: Keeps, ranks: Sequence[int]
) -> list[jax.Array]:
    """Return the model state that all stages share, from the part of each.

    Args:
      states: for each stage of this device's rank, in order, the state that it has made.
      keeps: see `Keeps`.
      ranks: the rank of each stage.

    Cost: one sum over `pipe` of all leaves that not all stages have changed.
    """
    counts = collections.Counter(share.leaf for shares in keeps for share in shares)
    rows = {share.leaf for shares in keeps for share in shares if share.rows is not None}
    moved = sorted(i for i, n in counts.items() if n < len(keeps) or i in rows)
    leaves = list(states[0])
    words = [{i: _as_summed(mine[i]) for i in moved} for mine in states]

    def own(rank: int) -> list[jax.Array]:
        found = {i: jnp.zeros_like(words[0][i]) for i in moved}
        stages = (stage for stage, r in enumerate(ranks) if r == rank)
        for mine, stage in zip(words, stages, strict=False):
            for share in keeps[stage]:
                if share.leaf in found:
                    here = slice(*share.rows) if share.rows else slice(None)
                    whole = mine[share.leaf]
                    found[share.leaf] = (
                        found[share.leaf].at[here].set(whole[here]) if whole.ndim else whole
                    )
        return [found[i] for i in moved]

    if moved:
        sums = lax.psum(each_rank(max(ranks) + 1, own), PIPE)
        for i, x in zip(moved, sums, strict=True):
            leaves[i] = x if is_float(leaves[i].dtype) else from_words(x, leaves[i])
    return leaves


def _as_summed(x: jax.Array) -> jax.Array:
    """Return an array in a dtype whose sums with zeros are exact."""
    return x if is_float(x.dtype) else as_words(x)
