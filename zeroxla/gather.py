"""Runs a fetch plan: gather a unit, compute, release; in backward gather again, reduce, release.

Forward and backward are both written out here, segment by segment, instead of left to `jax.grad`:
so each gather and each reduce stands where the plan wants it, tied by `optimization_barrier` to the
activation or cotangent that it must not run ahead of. Without the ties XLA merges the backward
gathers with the forward ones, or hoists them all, and the whole model is alive again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.collectives import Collectives
from zeroxla.linearize import Linearized, linearize
from zeroxla.loops import LoopRunner
from zeroxla.placement import Placement
from zeroxla.reuse import Limits, kept_uses
from zeroxla.segments import Loop, Plan, Remat, Segment, Straight
from zeroxla.trace import Value, read, run

Arrays = Mapping[Value, jax.Array]


class Tape(NamedTuple):
    """What forward leaves for backward: a pytree, so that a loop can stack it.

    Attributes:
      references: values that backward reads and the caller does not keep, each once.
      saved: per segment, what only its own backward reads.
      live: gathered leaves that backward uses again instead of gathering them.
    """

    references: tuple[jax.Array, ...]
    saved: tuple[Any, ...]
    live: tuple[jax.Array, ...]


class Runner:
    """Runs one plan inside `shard_map`.

    Args:
      plan: what to run.
      collectives: how a unit is gathered and its gradient reduced.
      placements: of each leaf of the plan.
      limits: of prefetch and reuse.
    """

    def __init__(
        self,
        plan: Plan,
        collectives: Collectives,
        placements: Mapping[Value, Placement],
        limits: Limits,
    ) -> None:
        self.plan, self.collectives, self.placements = plan, collectives, placements
        self.linear: dict[Segment, Linearized] = {}
        self.bodies: dict[Segment, Any] = {}
        for seg in plan.segments:
            if isinstance(seg, Straight):
                self.linear[seg] = linearize(seg, plan.active, plan.constants)
            elif isinstance(seg, Remat):
                self.bodies[seg] = Runner(seg.body, collectives, placements, limits)

        self.backward_leaves = [
            self.linear[seg].leaves if seg in self.linear else seg.leaves for seg in plan.segments
        ]
        stacked = [_stacked_leaves(seg) for seg in plan.segments]
        forward_uses = [(*s.leaves, *more) for s, more in zip(plan.segments, stacked)]
        backward_uses = [(*b, *more) for b, more in zip(self.backward_leaves, stacked)]
        self.kept = kept_uses(
            [*forward_uses, *reversed(backward_uses)],
            {leaf: leaf.aval.size for leaf in plan.leaves},
            limits,
        )
        for i, seg in enumerate(plan.segments):
            if isinstance(seg, Loop):
                keep = bool(stacked[i]) and all((i, leaf) in self.kept for leaf in stacked[i])
                self.bodies[seg] = LoopRunner(
                    seg, collectives, placements, limits, keep=keep, make_runner=Runner
                )
        sizes = [sum(leaf.aval.size for leaf in s.leaves) for s in plan.segments]
        self.ahead_forward = _tie_points(sizes, limits.prefetch)
        sizes = [sum(leaf.aval.size for leaf in leaves) for leaves in self.backward_leaves]
        self.ahead_backward = _tie_points(sizes[::-1], limits.prefetch)
        self.reduce_lag = 0 if limits.prefetch == 0 else 1
        self.first_use: dict[Value, int] = {}
        for i, seg in enumerate(plan.segments):
            for leaf in seg.leaves:
                self.first_use.setdefault(leaf, i)
        self.references = tuple(
            dict.fromkeys(
                v
                for seg in plan.segments
                for v in self._references_of(seg)
                if v not in plan.recoverable
            )
        )

    def _references_of(self, seg: Segment) -> tuple[Value, ...]:
        if seg in self.linear:
            return self.linear[seg].references
        return seg.inputs

    def forward(
        self, shards: Arrays, inputs: Sequence[jax.Array], *, record: bool
    ) -> tuple[list[jax.Array], Tape]:
        """Run the plan.

        Args:
          shards: what this device stores of each leaf.
          inputs: one per input of the plan.
          record: whether to leave a tape for backward.
        """
        env = dict(zip(self.plan.inputs, inputs, strict=True))
        live: dict[Value, jax.Array] = {}
        saved: list[Any] = []
        entries: list[list[jax.Array]] = []
        made: dict[Value, int] = {}  # by which segment
        for i, seg in enumerate(self.plan.segments):
            newest = max((v for v in seg.inputs if v in made), key=made.__getitem__, default=None)
            entries.append([] if newest is None else [env[newest]])
            gathered = self._gather(shards, seg.leaves, live, entries[self.ahead_forward[i]])
            outputs, kept = self._segment_forward(seg, shards, gathered, env, record)
            env.update(zip(seg.outputs, outputs, strict=True))
            made.update(dict.fromkeys(seg.outputs, i))
            saved.append(kept)
            live.update((v, x) for v, x in gathered.items() if (i, v) in self.kept)
        if not record:
            return self._outputs(env), Tape((), (), ())
        references = tuple(env[v] for v in self.references)
        kept_live = tuple(live[v] for v in self._live_order(live))
        return self._outputs(env), Tape(references, tuple(saved), kept_live)

    def _outputs(self, env: Arrays) -> list[jax.Array]:
        return [jnp.asarray(read(env, atom)) for atom in self.plan.outputs]

    def _segment_forward(
        self,
        seg: Segment,
        shards: Arrays,
        gathered: Arrays,
        env: Arrays,
        record: bool,
    ) -> tuple[Sequence[jax.Array], Any]:
        if isinstance(seg, Straight):
            args = {**gathered, **{v: env[v] for v in seg.inputs}}
            if not record:
                run(seg.equations, args)
                return [args[v] for v in seg.outputs], ()
            results = self.linear[seg].forward(*(args[v] for v in (*seg.leaves, *seg.inputs)))
            return results[: len(seg.outputs)], tuple(results[len(seg.outputs) :])
        if isinstance(seg, Loop):
            return self.bodies[seg].forward(shards, gathered, env, record=record)
        body = self.bodies[seg]
        outputs, _ = body.forward(shards, [env[v] for v in body.plan.inputs], record=False)
        return outputs, ()

    def backward(
        self,
        shards: Arrays,
        inputs: Arrays,
        tape: Tape,
        cotangents: Sequence[jax.Array | None],
    ) -> tuple[dict[Value, jax.Array], list[jax.Array | None]]:
        """Run the plan's backward.

        Args:
          shards: as in forward.
          inputs: the recoverable inputs of the plan.
          tape: from forward.
          cotangents: one per output; None for zero.

        Returns:
          The reduced gradient shards (float32; no entry where nothing depends on the leaf), and the
          cotangent of each input of the plan (None for zero).
        """
        plan = self.plan
        env = {**inputs, **dict(zip(self.references, tape.references, strict=True))}
        live = dict(zip(self._live_order(), tape.live, strict=True))
        cts = _Sums()
        for atom, ct in zip(plan.outputs, cotangents, strict=True):
            if ct is not None and atom in plan.active:
                cts.add(atom, ct)
        whole, reduced = _Sums(), _Sums()
        entries: list[list[jax.Array]] = []
        waiting: list[list[jax.Array]] = []
        last = len(plan.segments) - 1
        for step, i in enumerate(range(last, -1, -1)):
            seg = plan.segments[i]
            mine = [cts.pop(v) for v in seg.outputs]
            present = [ct for ct in mine if ct is not None]
            entries.append(present)
            if present:
                entry = entries[self.ahead_backward[step]]
                gathered = self._gather(shards, self.backward_leaves[i], live, entry)
                now = len(plan.segments) + step
                live.update((v, x) for v, x in gathered.items() if (now, v) in self.kept)
                mine = _tie(mine, waiting.pop(0) if len(waiting) > self.reduce_lag else [])
                saved = tape.saved[i]
                grads, done = self._segment_backward(seg, shards, gathered, env, saved, mine)
                for v, ct in grads.items():
                    (whole if v in self.first_use else cts).add(v, ct)
                for v, ct in done.items():
                    reduced.add(v, ct)
            ready = [v for v in whole if self.first_use[v] == i]
            if ready:
                placements = [self.placements[v] for v in ready]
                results = self.collectives.reduce([whole[v] for v in ready], placements)
                for v, ct in zip(ready, results, strict=True):
                    reduced.add(v, ct)
                waiting.append(results)
        return dict(reduced), [cts.pop(v) for v in plan.inputs]

    def _segment_backward(
        self,
        seg: Segment,
        shards: Arrays,
        gathered: Arrays,
        env: Arrays,
        saved: Any,
        cotangents: Sequence[jax.Array | None],
    ) -> tuple[Arrays, Arrays]:
        """Return cotangents of whole leaves and inputs, and reduced gradient shards."""
        if isinstance(seg, Straight):
            linear = self.linear[seg]
            by_value = dict(zip(seg.outputs, cotangents, strict=True))
            filled = [_or_zeros(by_value[v], v) for v in linear.outputs]
            references = {v: env[v] for v in linear.references}
            return linear.backward(gathered, references, saved, filled), {}
        if isinstance(seg, Loop):
            return self.bodies[seg].backward(shards, gathered, env, saved, cotangents)
        body: Runner = self.bodies[seg]
        # The tie keeps this second forward from being merged with the first.
        inputs = [env[v] for v in body.plan.inputs]
        inputs = _tie(inputs, [ct for ct in cotangents if ct is not None])
        _, tape = body.forward(shards, inputs, record=True)
        again = dict(zip(body.plan.inputs, inputs, strict=True))
        reduced, input_cts = body.backward(shards, again, tape, cotangents)
        pairs = zip(body.plan.inputs, input_cts, strict=True)
        return {v: ct for v, ct in pairs if ct is not None}, reduced

    def _gather(
        self,
        shards: Arrays,
        leaves: Sequence[Value],
        live: dict[Value, jax.Array],
        entry: Sequence[jax.Array],
    ) -> dict[Value, jax.Array]:
        """Gather a unit's leaves in one collective per hop, but for those that are still live."""
        missing = [v for v in leaves if v not in live]
        stored = _tie([shards[v] for v in missing], entry)
        found = self.collectives.gather(stored, [self.placements[v] for v in missing])
        whole = dict(zip(missing, found, strict=True))
        return {v: whole[v] if v in whole else live.pop(v) for v in leaves}

    def _live_order(self, live: Iterable[Value] = ()) -> list[Value]:
        """The leaves that stay gathered from forward to backward, in order of first use."""
        last = {v: i for i, seg in enumerate(self.plan.segments) for v in seg.leaves}
        order = [v for v in self.first_use if (last[v], v) in self.kept]
        assert set(live) <= set(order), "a leaf stayed live without a later use"
        return order


class _Sums(dict[Value, jax.Array]):
    """Cotangents summed by value."""

    def add(self, value: Value, ct: jax.Array) -> None:
        self[value] = self[value] + ct if value in self else ct

    def pop(self, value: Value) -> jax.Array | None:  # type: ignore[override]
        return super().pop(value, None)


def _or_zeros(ct: jax.Array | None, value: Value) -> jax.Array:
    return jnp.zeros(value.aval.shape, value.aval.dtype) if ct is None else ct


def _tie(arrays: Sequence[Any], to: Sequence[jax.Array]) -> list[Any]:
    """Return `arrays` (some may be None) such that none exists before all of `to` do."""
    present = [x for x in arrays if x is not None]
    if not to or not present:
        return list(arrays)
    tied = iter(lax.optimization_barrier((*present, *to))[: len(present)])
    return [None if x is None else next(tied) for x in arrays]


def _tie_points(sizes: Sequence[int], budget: int | None) -> list[int]:
    """For each segment the earliest one at whose entry its gather may start: the elements gathered
    ahead by then, its own included, are at most `budget` (None: one segment ahead)."""
    points = []
    for i, size in enumerate(sizes):
        j, ahead = i, size
        while budget is not None and j > 0 and 0 < ahead <= budget:
            j -= 1
            ahead += sizes[j]
        points.append(max(i - 1, 0) if budget is None else j)
    return points


def _stacked_leaves(seg: Segment) -> tuple[Value, ...]:
    if not isinstance(seg, Loop):
        return ()
    return tuple(dict.fromkeys(leaf for leaf, _ in seg.stacked.values()))
