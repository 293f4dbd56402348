"""Runs a fetch plan: gather a unit, compute, release; in backward gather again, reduce, release.

Forward and backward are both written out here, segment by segment, and not left to `jax.grad`. So
each gather and each reduce stands where the plan wants it, tied to the activation or cotangent that
it must not run ahead of (see `ties`). Without the ties XLA merges the backward gathers with the
forward ones, or hoists them all, and the whole model is alive again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.fetch.cotangents import CotangentSums
from zeroxla.fetch.keeping.choose import Keeping
from zeroxla.fetch.keeping.keep_everything import KeepEverything
from zeroxla.fetch.loop_runner import LoopRunner
from zeroxla.fetch.order import Fetches, FetchOrder
from zeroxla.fetch.passes import Tape, plan_passes
from zeroxla.fetch.reductions import Reductions
from zeroxla.fetch.segments import FetchPlan, LayerLoop, Remat, Segment, Straight
from zeroxla.fetch.ties import tie
from zeroxla.program.random_keys import UNIT_GATHERS, PassRounding, fold_in, number_of
from zeroxla.program.trace import Value, read
from zeroxla.wire.collectives import Collectives
from zeroxla.wire.routes import LeafSource, Route

Arrays = Mapping[Value, jax.Array]
Sources = Mapping[Value, LeafSource]


class FetchRunner:
    """Runs one plan inside `shard_map`.

    Args:
      plan: the plan to run.
      collectives: the collectives of the mesh.
      routes: the route of each leaf of the plan.
      limits: the limits of prefetch and reuse.
      in_loop: whether the plan is the body of a loop.
      in_remat: whether forward runs a second time before backward.
      keeping: what the segments keep; None keeps every residual that is an activation.
    """

    def __init__(
        self,
        plan: FetchPlan,
        collectives: Collectives,
        routes: Mapping[Value, Route],
        limits: FetchLimits,
        *,
        in_loop: bool = False,
        in_remat: bool = False,
        keeping: Keeping | KeepEverything | None = None,
    ) -> None:
        self.plan, self.collectives, self.routes = plan, collectives, routes
        self.passes = passes = plan_passes(
            plan, routes, limits, in_loop=in_loop, in_remat=in_remat, keeping=keeping
        )
        self.bodies: dict[Segment, Any] = {}
        for i, seg in enumerate(plan.segments):
            if isinstance(seg, Remat):
                units = seg.body.units
                # The second forward and backward share the gather of a single unit.
                unit = sum(v.aval.size for v in units[0]) if len(units) == 1 else 0
                own = limits.holding(unit)
                self.bodies[seg] = FetchRunner(
                    seg.body, collectives, routes, own, in_remat=True, keeping=keeping
                )
            elif isinstance(seg, LayerLoop):
                make = functools.partial(
                    FetchRunner, in_loop=True, in_remat=in_remat, keeping=keeping
                )
                keep = passes.keeps_stacked(i, seg)
                self.bodies[seg] = LoopRunner(
                    seg, collectives, routes, limits, keep=keep, make_runner=make
                )

    def _fetches(
        self, order: FetchOrder, sources: Sources, live: Arrays, key: jax.Array | None
    ) -> Fetches:
        key = fold_in(key, UNIT_GATHERS)
        return Fetches(order, self.collectives, self.routes, sources, live, key)

    def _key(self, key: jax.Array | None, purpose: PassRounding, i: int) -> jax.Array | None:
        return fold_in(key, number_of(purpose, i, len(self.plan.segments)))

    def forward(
        self,
        sources: Sources,
        inputs: Sequence[jax.Array],
        *,
        record: bool,
        keep: bool = True,
        activations: Iterable[Value] = (),
        key: jax.Array | None = None,
        earlier: Tape | None = None,
    ) -> tuple[list[jax.Array], Tape]:
        """Run the plan forward.

        Args:
          sources: the piece of each leaf that this device holds.
          inputs: one array per input of the plan.
          record: whether to leave a tape for backward.
          keep: whether to leave secondary shards for a later pass.
          activations: the inputs that were computed. No gather may run ahead of them.
          key: the key of stochastic rounding; None if no format rounds stochastically.
          earlier: the tape of an earlier forward, whose secondary shards are gathered from.

        Returns:
          One array per output of the plan, and the tape. Without `record` the tape holds secondary
          shards alone.
        """
        sources = self.passes.after(sources, earlier)
        env = dict(zip(self.plan.inputs, inputs, strict=True))
        fetches = self._fetches(self.passes.forward_order, sources, {}, key)
        saved: list[Any] = []
        made = dict.fromkeys(activations, -1)  # the segment that made each activation
        for i, seg in enumerate(self.plan.segments):
            newest = sorted((v for v in seg.inputs if v in made), key=made.__getitem__)[-1:]
            env.update(zip(newest, fetches.enter(i, [env[v] for v in newest]), strict=True))
            gathered = fetches.take(i)
            if isinstance(seg, Straight):
                args = [*(gathered[v] for v in seg.leaves), *(env[v] for v in seg.inputs)]
                linear = self.passes.linear[seg]
                outputs, left = linear.forward(args) if record else (linear.evaluate(args), ())
            else:
                outputs, left = self._body_forward(
                    seg,
                    fetches.sources,
                    gathered,
                    env,
                    record=record,
                    keep=keep,
                    activations=made,
                    key=self._key(key, PassRounding.SEGMENT, i),
                    earlier=earlier and earlier.saved[i],
                )
            env.update(zip(seg.outputs, outputs, strict=True))
            made.update(dict.fromkeys(seg.outputs, i))
            saved.append(left)
        secondary = [fetches.sources[v] for v in self.passes.to_keep(sources)] if keep else []
        references = [env[v] for v in self.passes.references] if record else []
        live = self.passes.live(fetches.live) if record else []
        tape = Tape(tuple(references), tuple(saved), tuple(live), tuple(secondary))
        return self._outputs(env), tape

    def _outputs(self, env: Arrays) -> list[jax.Array]:
        return [jnp.asarray(read(env, operand)) for operand in self.plan.outputs]

    def _body_forward(
        self,
        seg: LayerLoop | Remat,
        sources: Sources,
        gathered: Arrays,
        env: Arrays,
        *,
        record: bool,
        **options: Any,
    ) -> tuple[Sequence[jax.Array], Any]:
        if isinstance(seg, LayerLoop):
            del options["activations"]
            return self.bodies[seg].forward(sources, gathered, env, record=record, **options)
        body: FetchRunner = self.bodies[seg]
        inputs = [env[v] for v in body.plan.inputs]
        # Nothing is recorded: backward runs this forward again.
        return body.forward(sources, inputs, record=False, **options)

    def backward(
        self,
        sources: Sources,
        inputs: Arrays,
        tape: Tape,
        cotangents: Sequence[jax.Array | None],
        *,
        key: jax.Array | None = None,
        earlier: Tape | None = None,
        counts: jax.Array | None = None,
        reductions: Reductions | None = None,
    ) -> tuple[dict[Value, jax.Array], list[jax.Array | None]]:
        """Run the plan's backward.

        Args:
          sources: as in `forward`.
          inputs: the recoverable inputs of the plan.
          tape: the tape that `forward` left.
          cotangents: one per output of the plan; None means zero.
          key: as in `forward`.
          earlier: as in `forward`.
          counts: a flag: whether the loss counted anything. If not, all cotangents are zeros, even
            where the derivative of 0/0 would be NaN. None if it always does.
          reductions: takes the units of the plan, if it is a part of another plan.

        Returns:
          The reduced float32 gradient shards, without an entry for a leaf that no output depends
          on; and the cotangent of each input of the plan, None for zero.
        """
        if reductions is None:
            reductions = Reductions(self.collectives.reduces, self.routes)
        plan = self.plan
        env = {**inputs, **dict(zip(self.passes.references, tape.references, strict=True))}
        live = dict(zip(self.passes.live_order, tape.live, strict=True))
        sources = self.passes.after(self.passes.after(sources, earlier), tape)
        fetches = self._fetches(self.passes.backward_order, sources, live, key)
        cts = CotangentSums()
        for operand, ct in zip(plan.outputs, cotangents, strict=True):
            if ct is not None and operand in plan.active:
                cts.add(operand, ct)
        whole = CotangentSums()
        # With prefetch a unit's reduce may also run beside the next unit, and not only before it.
        lag = int(self.passes.backward_order.chained)
        waiting: list[list[jax.Array]] = []
        last = len(plan.segments) - 1
        for step, i in enumerate(range(last, -1, -1)):
            seg = plan.segments[i]
            mine = fetches.enter(step, [cts.pop(v) for v in seg.outputs])
            gathered = fetches.take(step)
            if any(ct is not None for ct in mine):
                before = waiting.pop(0) if len(waiting) > lag else []
                mine, _ = tie(mine, before, by_data=self.collectives.ties_by_data)
                grads = self._segment_backward(
                    seg,
                    fetches.sources,
                    gathered,
                    env,
                    tape.saved[i],
                    mine,
                    key=self._key(key, PassRounding.SEGMENT, i),
                    earlier=earlier and earlier.saved[i],
                    counts=counts,
                    reductions=reductions,
                )
                for v, ct in self._residents_first(seg, grads).items():
                    sums = whole if v in self.passes.first_use else cts
                    (sums.add_at_once if v in self.passes.summed else sums.add)(v, ct)
            ready = [v for v in whole if self.passes.first_use[v] == i]
            if ready:
                # Otherwise XLA joins the reduces of units that wait for the same activation.
                before = waiting[-1] if lag and waiting else []
                grads = [whole[v] for v in ready]
                grads, _ = tie(grads, before, by_data=self.collectives.ties_by_data)
                mine = self._key(key, PassRounding.REDUCE, i)
                waiting.append(reductions.reduce(ready, grads, mine))
        return dict(reductions.shards), [cts.pop(v) for v in plan.inputs]

    def _residents_first(self, seg: Segment, cts: Arrays) -> Arrays:
        """Tie a segment's cotangents: those of the plan's inputs come first.

        Earlier segments then wait for the cotangents of the plan's inputs, among which are the
        leaves that are not gathered. Otherwise XLA may leave these to the end, and keep from every
        segment the values that they are computed from.
        """
        given = [v for v in self.plan.inputs if v in cts]
        awaited = [v for v in cts if v in seg.inputs and v not in given]
        later, first = tie([cts[v] for v in awaited], [cts[v] for v in given], by_data=False)
        return {**cts, **dict(zip(awaited, later)), **dict(zip(given, first))}

    def _segment_backward(
        self,
        seg: Segment,
        sources: Sources,
        gathered: Arrays,
        env: Arrays,
        saved: Any,
        cotangents: Sequence[jax.Array | None],
        reductions: Reductions,
        **options: Any,
    ) -> Arrays:
        """Return the cotangents of whole leaves and inputs. A body's leaves go to `reductions`."""
        if isinstance(seg, Straight):
            linear = self.passes.linear[seg]
            by_value = dict(zip(seg.outputs, cotangents, strict=True))
            filled = [_or_zeros(by_value[v], v) for v in linear.outputs]
            references = {v: env[v] for v in linear.references}
            found = linear.backward(gathered, references, saved, filled)
            if (counts := options["counts"]) is None:
                return found
            return {v: jnp.where(counts, ct, jnp.zeros_like(ct)) for v, ct in found.items()}
        if isinstance(seg, LayerLoop):
            loop: LoopRunner = self.bodies[seg]
            found, shards = loop.backward(sources, gathered, env, saved, cotangents, **options)
            reductions.add(shards)
            return found
        body = self.bodies[seg]
        # The tie keeps this second forward from being merged with the first.
        inputs = [env[v] for v in body.plan.inputs]
        inputs, cotangents = tie(inputs, cotangents, by_data=self.collectives.ties_by_data)
        options["earlier"] = saved
        of_forward = {name: x for name, x in options.items() if name != "counts"}
        _, tape = body.forward(
            sources, inputs, record=True, activations=body.plan.inputs, **of_forward
        )
        again = dict(zip(body.plan.inputs, inputs, strict=True))
        _, input_cts = body.backward(
            sources, again, tape, cotangents, reductions=reductions, **options
        )
        pairs = zip(body.plan.inputs, input_cts, strict=True)
        return {v: ct for v, ct in pairs if ct is not None}


def _or_zeros(ct: jax.Array | None, value: Value) -> jax.Array:
    return jnp.zeros(value.aval.shape, value.aval.dtype) if ct is None else ct
