"""`PassPlan`: decisions about forward and backward over a plan, made before either runs.

They say when each leaf is gathered, which values backward reads, and which ones forward leaves for
it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.fetch.keeping.choose import Keeping
from zeroxla.fetch.keeping.keep_everything import KeepEverything
from zeroxla.fetch.order import FetchOrder, missing_leaves, stacked_leaves
from zeroxla.fetch.residuals import Linearized, linearize
from zeroxla.fetch.reuse import kept_uses
from zeroxla.fetch.segments import FetchPlan, LayerLoop, Segment, Straight
from zeroxla.program.trace import Value
from zeroxla.wire.routes import LeafSource, Route


class Tape(NamedTuple):
    """The values that forward leaves for backward. It is a pytree, so that a loop can stack it.

    Attributes:
      references: values that backward reads and the caller does not keep, each once.
      saved: for each segment, the values that only its own backward reads.
      live: gathered leaves that backward uses again instead of gathering them.
      secondary: the secondary shards from which backward gathers, and all new copies.
    """

    references: tuple[jax.Array, ...]
    saved: tuple[Any, ...]
    live: tuple[jax.Array, ...]
    secondary: tuple[LeafSource, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassPlan:
    """Forward and backward over the segments of a plan.

    Attributes:
      linear: forward and backward of each straight segment.
      summed: the values whose cotangents are summed as they come: the leaves.
      kept: (moment, leaf) for each leaf that stays whole after its use at that moment, counted
        over forward and backward.
      forward_order, backward_order: the order of the gathers in each pass.
      first_use: the first segment that uses each leaf.
      live_order: the leaves that may stay gathered from forward to backward.
      references: values that backward reads and the caller does not keep.
      gathered_again: the leaves that a later pass gathers from a secondary shard.
    """

    linear: Mapping[Segment, Linearized]
    summed: frozenset[Value]
    kept: frozenset[tuple[int, Value]]
    forward_order: FetchOrder
    backward_order: FetchOrder
    first_use: dict[Value, int]
    live_order: tuple[Value, ...]
    references: tuple[Value, ...]
    gathered_again: tuple[Value, ...]

    def keeps_stacked(self, i: int, loop: LayerLoop) -> bool:
        """Return whether the stacked leaves of a loop, segment i, stay whole until its backward."""
        stacked = stacked_leaves(loop)
        return bool(stacked) and all((i, leaf) in self.kept for leaf in stacked)

    def to_keep(self, sources: Mapping[Value, LeafSource]) -> list[Value]:
        """Return the leaves whose secondary shards forward leaves for a later pass or, as new
        copies, for the next step."""
        again = [v for v in self.gathered_again if sources[v].is_shard]
        copied = [v for v in self.first_use if sources[v].copy is not None]
        return list(dict.fromkeys((*again, *copied)))

    def after(
        self, sources: Mapping[Value, LeafSource], tape: Tape | None
    ) -> dict[Value, LeafSource]:
        """Return the sources of the leaves after a forward that left `tape`."""
        if tape is None:
            return dict(sources)
        kept = zip(self.to_keep(sources), tape.secondary, strict=True)
        return {**sources, **dict(kept)}

    def live(self, live: Mapping[Value, jax.Array]) -> list[jax.Array]:
        """Return the leaves that are whole when forward ends, in `live_order`."""
        assert set(live) <= set(self.live_order), "a leaf stayed live without a later use"
        return [live[v] for v in self.live_order]


def plan_passes(
    plan: FetchPlan,
    routes: Mapping[Value, Route],
    limits: FetchLimits,
    *,
    in_loop: bool,
    in_remat: bool,
    keeping: Keeping | KeepEverything | None = None,
) -> PassPlan:
    """Decide about the passes over a plan.

    Args:
      plan: the plan to run.
      routes: the route of each of its leaves.
      limits: the limits of prefetch and reuse.
      in_loop: whether the plan is the body of a loop.
      in_remat: whether forward runs a second time before backward.
      keeping: what the segments keep; None keeps every residual that is an activation.
    """
    segments = plan.segments
    # The inputs of a whole model are leaves that are not gathered.
    summed = frozenset(plan.leaves if in_loop or in_remat else (*plan.leaves, *plan.inputs))
    keeping = keeping or KeepEverything()
    linear: dict[Segment, Linearized] = {
        seg: linearize(*keeping.of(plan, seg, summed))
        for seg in segments
        if isinstance(seg, Straight)
    }
    forward_leaves = [seg.leaves for seg in segments]
    backward_leaves = [linear[seg].leaves if seg in linear else seg.leaves for seg in segments]
    stacked = [stacked_leaves(seg) for seg in segments]
    kept = kept_uses(
        [
            *((*unit, *more) for unit, more in zip(forward_leaves, stacked)),
            *reversed([(*unit, *more) for unit, more in zip(backward_leaves, stacked)]),
        ],
        {leaf: leaf.aval.size for leaf in plan.leaves},
        limits,
    )
    forward_order, backward_order = (
        FetchOrder.make(
            some,
            units,
            [[v for v in unit if (i, v) in kept] for i, unit in enumerate(units, begin)],
            limits.prefetch,
            in_loop=in_loop,
        )
        for some, units, begin in (
            (segments, forward_leaves, 0),
            (segments[::-1], backward_leaves[::-1], len(segments)),
        )
    )
    first_use, last_use = _uses(forward_leaves)
    live_order = tuple(v for v in first_use if (last_use[v], v) in kept)
    # Leaves that backward gathers once more; in a remat body the second forward does.
    missing = (
        missing_leaves(forward_order, ())
        if in_remat
        else missing_leaves(backward_order, live_order)
    )
    again = {v for leaves in missing for v in leaves if routes[v].secondary}
    read = (
        v for seg in segments for v in (linear[seg].references if seg in linear else seg.inputs)
    )
    return PassPlan(
        linear=linear,
        summed=summed,
        kept=kept,
        forward_order=forward_order,
        backward_order=backward_order,
        first_use=first_use,
        live_order=live_order,
        references=tuple(dict.fromkeys(v for v in read if v not in plan.recoverable)),
        gathered_again=tuple(v for v in plan.leaves if v in again),
    )


def _uses(units: Iterable[Iterable[Value]]) -> tuple[dict[Value, int], dict[Value, int]]:
    """Return the first and the last segment that uses each leaf."""
    first: dict[Value, int] = {}
    last: dict[Value, int] = {}
    for i, unit in enumerate(units):
        for leaf in unit:
            first.setdefault(leaf, i)
            last[leaf] = i
    return first, last
