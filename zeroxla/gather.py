"""Runs a fetch plan: gather a unit, compute, release; in backward gather again, reduce, release.

Forward and backward are both written out here, segment by segment, instead of left to `jax.grad`:
so each gather and each reduce stands where the plan wants it, tied to the activation or cotangent
that it must not run ahead of (`prefetch.py`). Without the ties XLA merges the backward gathers with
the forward ones, or hoists them all, and the whole model is alive again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zeroxla.collectives import Collectives
from zeroxla.linearize import Linearized, linearize
from zeroxla.loops import LoopRunner
from zeroxla.placement import Placement
from zeroxla.prefetch import Fetches, tie, tie_points
from zeroxla.reuse import Limits, kept_uses
from zeroxla.segments import Loop, Plan, Remat, Segment, Straight
from zeroxla.trace import Value, read

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
      in_loop: the plan is the body of a loop.
    """

    def __init__(
        self,
        plan: Plan,
        collectives: Collectives,
        placements: Mapping[Value, Placement],
        limits: Limits,
        *,
        in_loop: bool = False,
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
        self.prefetches = limits.prefetch != 0
        self.forward_fetches = self._fetches(
            plan.segments, [s.leaves for s in plan.segments], 0, limits, in_loop
        )
        self.backward_fetches = self._fetches(
            plan.segments[::-1], self.backward_leaves[::-1], len(plan.segments), limits, in_loop
        )
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

    def _fetches(
        self,
        segments: Sequence[Segment],
        units: Sequence[Sequence[Value]],
        begin: int,
        limits: Limits,
        in_loop: bool,
    ) -> Callable[..., Fetches]:
        """Return what makes the gathers of a pass that begins at time `begin` of `self.kept`."""
        inside = [() if isinstance(s, Straight) else next(iter(s.body.units), ()) for s in segments]
        return functools.partial(
            Fetches,
            units=units,
            # Without prefetch no loop gathers before its first turn.
            stacked=[_stacked_leaves(s) if self.prefetches else () for s in segments],
            keeps=[[v for v in unit if (i, v) in self.kept] for i, unit in enumerate(units, begin)],
            points=tie_points(
                [sum(v.aval.size for v in (*unit, *first)) for unit, first in zip(units, inside)],
                limits.prefetch,
                loops=[i for i, s in enumerate(segments) if isinstance(s, Loop)],
                in_loop=in_loop and self.prefetches,
            ),
            chained=self.prefetches,
            collectives=self.collectives,
            placements=self.placements,
        )

    def _references_of(self, seg: Segment) -> tuple[Value, ...]:
        if seg in self.linear:
            return self.linear[seg].references
        return seg.inputs

    def forward(
        self,
        shards: Arrays,
        inputs: Sequence[jax.Array],
        *,
        record: bool,
        activations: Iterable[Value] = (),
    ) -> tuple[list[jax.Array], Tape]:
        """Run the plan.

        Args:
          shards: what this device stores of each leaf.
          inputs: one per input of the plan.
          record: whether to leave a tape for backward.
          activations: the inputs that were computed, ahead of which no gather may run.
        """
        env = dict(zip(self.plan.inputs, inputs, strict=True))
        fetches = self.forward_fetches(shards=shards, live={})
        saved: list[Any] = []
        made = dict.fromkeys(activations, -1)  # by which segment
        for i, seg in enumerate(self.plan.segments):
            newest = sorted((v for v in seg.inputs if v in made), key=made.__getitem__)[-1:]
            env.update(zip(newest, fetches.enter(i, [env[v] for v in newest]), strict=True))
            gathered = fetches.take(i)
            outputs, kept = self._segment_forward(
                seg, fetches.shards, gathered, env, record=record, activations=made
            )
            env.update(zip(seg.outputs, outputs, strict=True))
            made.update(dict.fromkeys(seg.outputs, i))
            saved.append(kept)
        if not record:
            return self._outputs(env), Tape((), (), ())
        references = tuple(env[v] for v in self.references)
        kept_live = tuple(fetches.live[v] for v in self._live_order(fetches.live))
        return self._outputs(env), Tape(references, tuple(saved), kept_live)

    def _outputs(self, env: Arrays) -> list[jax.Array]:
        return [jnp.asarray(read(env, atom)) for atom in self.plan.outputs]

    def _segment_forward(
        self,
        seg: Segment,
        shards: Arrays,
        gathered: Arrays,
        env: Arrays,
        *,
        record: bool,
        activations: Iterable[Value],
    ) -> tuple[Sequence[jax.Array], Any]:
        if isinstance(seg, Straight):
            args = [*(gathered[v] for v in seg.leaves), *(env[v] for v in seg.inputs)]
            outputs, kept = self.linear[seg].forward(args)
            return outputs, kept if record else ()
        if isinstance(seg, Loop):
            return self.bodies[seg].forward(shards, gathered, env, record=record)
        body: Runner = self.bodies[seg]
        inputs = [env[v] for v in body.plan.inputs]
        outputs, _ = body.forward(shards, inputs, record=False, activations=activations)
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
        fetches = self.backward_fetches(shards=shards, live=live)
        cts = _Sums()
        for atom, ct in zip(plan.outputs, cotangents, strict=True):
            if ct is not None and atom in plan.active:
                cts.add(atom, ct)
        whole, reduced = _Sums(), _Sums()
        waiting: list[list[jax.Array]] = []
        last = len(plan.segments) - 1
        for step, i in enumerate(range(last, -1, -1)):
            seg = plan.segments[i]
            mine = [cts.pop(v) for v in seg.outputs]
            present = [ct for ct in mine if ct is not None]
            tied = iter(fetches.enter(step, present))
            mine = [None if ct is None else next(tied) for ct in mine]
            gathered = fetches.take(step)
            if present:
                mine, _ = tie(mine, waiting.pop(0) if len(waiting) > self.prefetches else [])
                grads, done = self._segment_backward(
                    seg, fetches.shards, gathered, env, tape.saved[i], mine
                )
                for v, ct in grads.items():
                    (whole if v in self.first_use else cts).add(v, ct)
                for v, ct in done.items():
                    reduced.add(v, ct)
            ready = [v for v in whole if self.first_use[v] == i]
            if ready:
                placements = [self.placements[v] for v in ready]
                before = waiting[-1] if self.prefetches and waiting else []
                mine, _ = tie([whole[v] for v in ready], before)
                results = self.collectives.reduce(mine, placements)
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
        inputs, tied = tie(
            [env[v] for v in body.plan.inputs], [ct for ct in cotangents if ct is not None]
        )
        rest = iter(tied)
        cotangents = [None if ct is None else next(rest) for ct in cotangents]
        _, tape = body.forward(shards, inputs, record=True, activations=body.plan.inputs)
        again = dict(zip(body.plan.inputs, inputs, strict=True))
        reduced, input_cts = body.backward(shards, again, tape, cotangents)
        pairs = zip(body.plan.inputs, input_cts, strict=True)
        return {v: ct for v, ct in pairs if ct is not None}, reduced

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


def _stacked_leaves(seg: Segment) -> tuple[Value, ...]:
    if not isinstance(seg, Loop):
        return ()
    return tuple(dict.fromkeys(leaf for leaf, _ in seg.stacked.values()))
