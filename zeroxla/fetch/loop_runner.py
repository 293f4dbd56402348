"""Runs a `scan` over stacked leaves: each turn gathers one layer, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.fetch.cotangents import CotangentSums
from zeroxla.fetch.reductions import HeldUnit, Reductions
from zeroxla.fetch.segments import LayerLoop
from zeroxla.offload.memory_kinds import is_on_host
from zeroxla.program.lagged_scan import run_with_lag
from zeroxla.program.trace import Value, read, run
from zeroxla.wire.collectives import Collectives
from zeroxla.wire.routes import LeafSource, Route

Arrays = Mapping[Value, jax.Array]
Sources = Mapping[Value, LeafSource]


class LoopRunner:
    """Runs one `LayerLoop` segment forward and backward.

    Both directions are a `lax.scan` over the stored shards, whose slices the body's own plan
    gathers. Forward stacks the body's tapes, so that each turn keeps its activations. Constants and
    the scan's own `xs` are not stacked again; backward reads them where they are.

    Args:
      loop: the segment.
      collectives: the collectives of the mesh.
      routes: the route of each leaf outside the loop.
      limits: the limits of prefetch and reuse.
      keep: whether the stacked leaves stay whole until backward.
      make_runner: makes the `FetchRunner` of the body.
    """

    def __init__(
        self,
        loop: LayerLoop,
        collectives: Collectives,
        routes: Mapping[Value, Route],
        limits: FetchLimits,
        *,
        keep: bool,
        make_runner: Callable[..., Any],
    ) -> None:
        self.loop = loop
        self.scan = loop.scan
        self.routes = routes
        self.reduces = collectives.reduces
        body_routes = {
            sliced: routes[leaf].unstack(dim)
            for sliced, (leaf, dim) in zip(loop.body.leaves, loop.stacked.values(), strict=True)
        }
        if keep:
            everything = sum(v.aval.size for v in loop.body.leaves)
            limits = dataclasses.replace(limits, max_live=everything, max_reuse=2 * everything)
        else:  # the tape would hold for every turn what one turn keeps
            limits = dataclasses.replace(limits, max_live=0)
        # One turn has no exchange of another to make.
        self.holds = (
            collectives.exchanges_across_turns
            and limits.prefetch != 0
            and self.scan.length > 1
            and any(map(self.reduces.sends_wires, body_routes.values()))
        )
        self.body = make_runner(loop.body, collectives, body_routes, limits)
        # The body's later gathers are tied to these. The first one may run in the turn before.
        carries = self.scan.split_inputs(loop.body.inputs)[1]
        self.activations = carries if limits.prefetch != 0 else ()
        self.x_operands = [a for i, a in enumerate(self.scan.xs) if i not in loop.stacked]

    def forward(
        self,
        sources: Sources,
        gathered: Arrays,
        env: Arrays,
        *,
        record: bool,
        keep: bool,
        key: jax.Array | None,
        earlier: Any,
    ) -> tuple[list[jax.Array], Any]:
        """Return the scan's outputs and the stacked tapes."""
        consts, carry, xs = self._operands(self._known(gathered, env))

        def body(carry: Sequence[jax.Array], x: Any) -> tuple[list[jax.Array], Any]:
            slices, others, key, earlier = x
            layer = dict(zip(self.loop.body.leaves, slices, strict=True))
            inputs = [*consts, *carry, *others]
            outputs, tape = self.body.forward(
                layer,
                inputs,
                record=record,
                keep=keep,
                activations=self.activations,
                key=key,
                earlier=earlier,
            )
            carry, ys = self.scan.split_outputs(outputs)
            return list(carry), (ys, tape)

        turns = (self._layers(sources), xs, self._keys(key), earlier)
        carry, (ys, tape) = self.scan.run(body, carry, turns)
        return [*carry, *ys], tape

    def backward(
        self,
        sources: Sources,
        gathered: Arrays,
        env: Arrays,
        tape: Any,
        cotangents: Sequence[jax.Array | None],
        *,
        key: jax.Array | None,
        earlier: Any,
        counts: jax.Array | None,
    ) -> tuple[dict[Value, jax.Array], dict[Value, jax.Array]]:
        """Return the cotangents of whole leaves and inputs, and the stacked leaves' gradient
        shards."""
        plan = self.loop.body
        known_env = self._known(gathered, env)
        consts, _, xs = self._operands(known_env)
        const_vars, carry_vars, x_vars = self.scan.split_inputs(plan.inputs)
        active_consts = [v for v in const_vars if v in plan.active]
        # Even if no turn reads a carry, the cotangent of its last value belongs to the last turn.
        active_carry = [
            i
            for i, (v, out) in enumerate(zip(carry_vars, plan.outputs, strict=False))
            if v in plan.active or out in plan.active
        ]

        carry_cts = [
            _zeros(carry_vars[i]) if cotangents[i] is None else cotangents[i] for i in active_carry
        ]
        y_cts = list(self.scan.split_outputs(cotangents)[1])

        layers = self._layers(sources)
        # Slices of host memory are left to the scan.
        holds = self.holds and not any(is_on_host(x) for x in jax.tree.leaves((layers, tape)))

        def turn(acc: Any, x: Any) -> tuple[Any, Any, list[HeldUnit]]:
            carry_cts, const_cts = acc
            slices, others, tape, y_cts, key, earlier = x
            by_carry = dict(zip(active_carry, carry_cts, strict=True))
            out_cts = [*(by_carry.get(i) for i in range(len(carry_vars))), *y_cts]
            layer = dict(zip(plan.leaves, slices, strict=True))
            inputs = dict(zip((*const_vars, *x_vars), (*consts, *others), strict=True))
            reductions = Reductions(self.reduces, self.body.routes, holds=holds)
            grads, input_cts = self.body.backward(
                layer,
                inputs,
                tape,
                out_cts,
                key=key,
                earlier=earlier,
                counts=counts,
                reductions=reductions,
            )
            cts = {v: ct for v, ct in zip(plan.inputs, input_cts, strict=True) if ct is not None}
            carry_cts = [_ct(cts, carry_vars[i]) for i in active_carry]
            const_cts = [a + cts[v] if v in cts else a for a, v in zip(const_cts, active_consts)]
            layer_grads = [grads.get(v) for v in plan.leaves]
            acc = (carry_cts, const_cts)
            return acc, (layer_grads, [cts.get(v) for v in x_vars]), reductions.held

        start = (carry_cts, [_zeros(v) for v in active_consts])
        turns = (layers, xs, tape, y_cts, self._keys(key), earlier)
        held_grads: list[jax.Array | None] = [None] * len(plan.leaves)
        if holds:
            acc, (layer_grads, x_cts), held_grads = run_with_lag(
                self.scan, turn, self._finish, start, turns, back=True
            )
        else:
            acc, (layer_grads, x_cts) = self.scan.run(
                lambda acc, x: turn(acc, x)[:2], start, turns, back=True
            )
        carry_cts, const_cts = acc

        operand_cts: list[tuple[Any, jax.Array]] = []
        by_const = dict(zip(active_consts, const_cts, strict=True))
        const_operands, carry_operands = self.scan.consts, self.scan.carry
        operand_cts += [
            (a, by_const[v]) for a, v in zip(const_operands, const_vars) if v in by_const
        ]
        operand_cts += [
            (carry_operands[i], ct) for i, ct in zip(active_carry, carry_cts, strict=True)
        ]
        operand_cts += [(a, ct) for a, ct in zip(self.x_operands, x_cts) if ct is not None]
        grads = self._stack(layer_grads, held_grads)
        return self._through_known(operand_cts, gathered, env), grads

    def _finish(self, held: Sequence[HeldUnit]) -> list[jax.Array | None]:
        """Make the exchanges of a turn's units; return the shards, one for each of the leaves."""
        reductions = Reductions(self.reduces, self.body.routes)
        for unit in held:
            reductions.finish(unit)
        return [reductions.shards.get(v) for v in self.loop.body.leaves]

    def _layers(self, sources: Sources) -> list[LeafSource]:
        stacked = self.loop.stacked.values()
        return [self.routes[leaf].layers(sources[leaf], dim) for leaf, dim in stacked]

    def _keys(self, key: jax.Array | None) -> jax.Array | None:
        return None if key is None else jax.random.split(key, self.scan.length)

    def _stack(self, *layer_grads: Sequence[jax.Array | None]) -> dict[Value, jax.Array]:
        grads = CotangentSums()
        for each in layer_grads:
            for (leaf, dim), grad in zip(self.loop.stacked.values(), each, strict=True):
                if grad is not None:
                    grads.add(leaf, jnp.moveaxis(grad, 0, dim))
        return grads

    def _known(self, gathered: Arrays, env: Arrays) -> dict[Value, jax.Array]:
        """Return the given values, and the operands that are computed from leaves and constants."""
        full = {**gathered, **{v: env[v] for v in self.loop.inputs if v in env}}
        run(self.loop.known, full)
        return full

    def _operands(self, env: Arrays) -> tuple[list, list, list]:
        consts = [read(env, a) for a in self.scan.consts]
        carry = [read(env, a) for a in self.scan.carry]
        return consts, carry, [read(env, a) for a in self.x_operands]

    def _through_known(
        self, operand_cts: Sequence[tuple[Any, jax.Array]], gathered: Arrays, env: Arrays
    ) -> dict[Value, jax.Array]:
        """Turn the operands' cotangents into cotangents of whole leaves and inputs."""
        sums = CotangentSums()
        for operand, ct in operand_cts:
            sums.add(operand, ct)
        made = {v for eq in self.loop.known for v in eq.outputs}
        through = [a for a in sums if a in made]
        direct = CotangentSums(
            (a, ct) for a, ct in sums.items() if isinstance(a, Value) and a not in made
        )
        if not through:
            return direct
        sources = {v: x for v, x in {**gathered, **env}.items() if v.is_float and self._reads(v)}

        def known(args: list[jax.Array]) -> list[jax.Array]:
            full = {**gathered, **env, **dict(zip(sources, args, strict=True))}
            run(self.loop.known, full)
            return [full[a] for a in through]

        _, pullback = jax.vjp(known, list(sources.values()))
        (source_cts,) = pullback([sums[a] for a in through])
        for v, ct in zip(sources, source_cts, strict=True):
            direct.add(v, ct)
        return direct

    def _reads(self, value: Value) -> bool:
        return any(value in eq.values for eq in self.loop.known)


def _zeros(value: Value) -> jax.Array:
    return jnp.zeros(value.aval.shape, value.aval.dtype)


def _ct(cts: Arrays, value: Value) -> jax.Array:
    return cts[value] if value in cts else _zeros(value)
