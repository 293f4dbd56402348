"""Runs a fetch plan: gather a unit, compute, release; in backward gather again, reduce, release.

Forward and backward are both written out here, segment by segment, instead of left to `jax.grad`:
so each gather and each reduce stands where the plan wants it, tied to the activation or cotangent
that it must not run ahead of (`prefetch.py`). Without the ties XLA merges the backward gathers with
the forward ones, or hoists them all, and the whole model is alive again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zeroxla.collectives import Collectives
from zeroxla.cotangents import Sums
from zeroxla.linearize import Linearized, linearize
from zeroxla.loops import LoopRunner
from zeroxla.placement import Placement
from zeroxla.prefetch import Fetches, FetchOrder, stacked_leaves, tie
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
        stacked = [stacked_leaves(seg) for seg in plan.segments]
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
        self.forward_order, self.backward_order = (
            FetchOrder.make(
                segments,
                units,
                [[v for v in unit if (i, v) in self.kept] for i, unit in enumerate(units, begin)],
                limits.prefetch,
                in_loop=in_loop,
            )
            for segments, units, begin in (
                (plan.segments, [seg.leaves for seg in plan.segments], 0),
                (plan.segments[::-1], self.backward_leaves[::-1], len(plan.segments)),
            )
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

    def _fetches(self, order: FetchOrder, shards: Arrays, live: Arrays) -> Fetches:
        return Fetches(order, self.collectives, self.placements, shards, live)

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
        fetches = self._fetches(self.forward_order, shards, {})
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
            linear = self.linear[seg]
            return linear.forward(args) if record else (linear.evaluate(args), ())
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
        fetches = self._fetches(self.backward_order, shards, live)
        cts = Sums()
        for atom, ct in zip(plan.outputs, cotangents, strict=True):
            if ct is not None and atom in plan.active:
                cts.add(atom, ct)
        whole, reduced = Sums(), Sums()
        # With prefetch a unit's reduce may run beside the next unit, not only before it.
        lag = int(self.backward_order.chained)
        waiting: list[list[jax.Array]] = []
        last = len(plan.segments) - 1
        for step, i in enumerate(range(last, -1, -1)):
            seg = plan.segments[i]
            mine = fetches.enter(step, [cts.pop(v) for v in seg.outputs])
            gathered = fetches.take(step)
            if any(ct is not None for ct in mine):
                mine, _ = tie(mine, waiting.pop(0) if len(waiting) > lag else [])
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
                # Else XLA joins the reduces of units that wait for the same activation.
                grads, _ = tie([whole[v] for v in ready], waiting[-1] if lag and waiting else [])
                results = self.collectives.reduce(grads, placements)
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
        inputs, cotangents = tie([env[v] for v in body.plan.inputs], cotangents)
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


def _or_zeros(ct: jax.Array | None, value: Value) -> jax.Array:
    return jnp.zeros(value.aval.shape, value.aval.dtype) if ct is None else ct
