"""Runs a program on an axis as a plan says: on parts, copies and summands of its arrays.

Call it inside `shard_map`. The result can be differentiated: each conversion has its transpose, and
each equation is differentiated on what the device holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.program import compat
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Constant, Equation, Operand, Value
from zeroxla.split.atoms import Dims
from zeroxla.split.holdings import COPIES, WHOLE, Holding, Kind, RowWindow, cheapest, convert
from zeroxla.split.run_parts import PartsRunner, rematerialised
from zeroxla.split.split_axis import SplitAxis
from zeroxla.split.ways import AxisPlan, Way

Held = Mapping[Holding, jax.Array]
"""An array in each holding in which it exists."""
_Env = dict[Value, dict[Holding, jax.Array]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PlanRunner:
    """Runs one plan.

    Attributes:
      plan: the plan.
      axis: the axis.
      sizes: sizes of groups of rows that the plan has ragged, where its program does not compute
        them.
    """

    plan: AxisPlan
    axis: SplitAxis
    sizes: Mapping[Operand, jax.Array] = dataclasses.field(default_factory=dict)

    def __call__(self, inputs: Sequence[Held]) -> list[jax.Array]:
        """Return the program's results in the holdings of `plan.outputs`.

        Args:
          inputs: each input of the program, in one holding or several.
        """
        env: _Env = {
            v: dict(held) for v, held in zip(self.plan.program.inputs, inputs, strict=True)
        }
        for eq, way in self.plan.steps:
            if eq.name == "optimization_barrier":
                self._barrier(env, eq)
                continue
            with _scope_of(eq):  # A scope's conversions are in it, too.
                args = [
                    [self._read(env, x, h) for h in needs]
                    for x, needs in zip(eq.inputs, way.needs, strict=True)
                ]
            with compat.context_of(eq.source, eq.name_stack):
                found = self._run(eq, way, args)
            pairs = zip(eq.outputs, way.gives, way.kept, found, strict=True)
            for v, h, kept, x in pairs:
                with _scope_of(eq):
                    if h.kind is Kind.RAGGED:
                        x = self._window(env, h).own(x, h)
                    x = self._converted(env, x, self.plan.flow.dims[v], h, kept)
                env[v] = {kept: x}
        pairs = zip(self.plan.program.outputs, self.plan.outputs, strict=True)
        return [jnp.asarray(self._read(env, x, h)) for x, h in pairs]

    def _read(self, env: _Env, operand: Operand, want: Holding) -> jax.Array:
        """Return an operand in a holding; the converted array is kept for other readers."""
        if isinstance(operand, Constant):
            if want.is_full:
                return operand.value
            dims = self.plan.flow.of_operand(operand)
            return self._converted(env, jnp.asarray(operand.value), dims, WHOLE, want)
        held = env[operand]
        if want not in held:
            # Copies of a leaf are what is gathered; everything else is made from them.
            first = COPIES
            if COPIES not in held or not self.plan.flow.made_of_leaves(operand):
                has_gradient = self.plan.flow.has_gradient(operand)
                _, first = cheapest(held, want, self.axis.parts, has_gradient=has_gradient)
            dims = self.plan.flow.dims[operand]
            held[want] = self._converted(env, held[first], dims, first, want)
        return held[want]

    def _converted(
        self, env: _Env, x: jax.Array, dims: Dims, have: Holding, want: Holding
    ) -> jax.Array:
        return convert(x, dims, have, want, self.axis, lambda held: self._window(env, held))

    def _window(self, env: _Env, held: Holding) -> RowWindow:
        """Return the rows that a ragged holding gives the device."""
        assert held.sizes is not None
        sizes = self.sizes.get(held.sizes)
        if sizes is None:
            sizes = jnp.asarray(self._read(env, held.sizes, COPIES))
        return RowWindow.of(sizes, self.axis)

    def _run(self, eq: Equation, way: Way, args: list[list[jax.Array]]) -> list[jax.Array]:
        if way.exchange is not None:
            return way.exchange.run(self.axis, [x for (x,) in args])
        if way.turns:
            return self._turns(eq, way, [x for (x,) in args])
        if way.body is None and not way.is_split and self.axis.sizes is None:
            return compat.call_equation(eq.source, eq.name_stack, [x for (x,) in args])
        if way.body is None:
            return way.run(self.axis, [x for (x,) in args])
        if eq.name == "scan":
            return self._loop(eq, way, way.body, args)
        if way.backward is not None:
            first, second = (_on_arrays(plan, self.axis) for plan in (way.body, way.backward))
            return self.plan.flow.rules[eq].run(first, second, [x for (x,) in args])
        plan, sizes = way.body, [len(x) for x in args]
        body = PlanRunner(plan, self.axis)

        def run(flat: Sequence[jax.Array]) -> list[jax.Array]:
            return body(_held(plan, _grouped(flat, sizes)))

        return rematerialised(eq, run)([x for each in args for x in each])

    def _turns(self, eq: Equation, way: Way, args: list[jax.Array]) -> list[jax.Array]:
        """Run this device's part of a loop's turns."""
        assert way.flow is not None, "the loop alone"
        (alone,) = way.flow.program.equations
        scan, (body,) = Scan(eq), way.flow.bodies[alone]
        consts, carry, xs = scan.split_inputs(args)
        whole = dataclasses.replace(self.axis, parts=1, name=None)
        run = body.program if self.axis.sizes is None else _in_order(PartsRunner(body, whole))

        def turn(
            carry: list[jax.Array], xs: list[jax.Array]
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            found = scan.split_outputs(run(*consts, *carry, *xs))
            return list(found[0]), list(found[1])

        carry, ys = scan.run(turn, list(carry), list(xs), length=xs[0].shape[0])
        return [*carry, *ys]

    def _loop(
        self, eq: Equation, way: Way, plan: AxisPlan, args: list[list[jax.Array]]
    ) -> list[jax.Array]:
        """Run a loop."""
        scan, body = Scan(eq), PlanRunner(plan, self.axis)
        consts, carry, xs = scan.split_inputs(args)

        def turn(
            carry: list[jax.Array], xs: list[list[jax.Array]]
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            outs = body(_held(plan, [*consts, *([x] for x in carry), *xs]))
            found = scan.split_outputs(outs)
            return list(found[0]), list(found[1])

        carry, ys = scan.run(turn, [x for (x,) in carry], list(xs))
        return [*carry, *ys]

    def _barrier(self, env: _Env, eq: Equation) -> None:
        """Pass a barrier with every holding of its operands."""
        held = [
            {WHOLE: jnp.asarray(x.value)} if isinstance(x, Constant) else env[x] for x in eq.inputs
        ]
        passed = lax.optimization_barrier([list(each.values()) for each in held])
        for v, each, arrays in zip(eq.outputs, held, passed, strict=True):
            env[v] = dict(zip(each, arrays, strict=True))


def _scope_of(eq: Equation) -> contextlib.AbstractContextManager[Any]:
    scope = str(eq.name_stack)
    return jax.named_scope(scope) if scope else contextlib.nullcontext()


def _on_arrays(plan: AxisPlan, axis: SplitAxis) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """Return what runs a plan whose inputs have one holding each."""
    run = PlanRunner(plan, axis)
    return lambda args: run(_held(plan, [[x] for x in args]))


def _in_order(run: Callable[[Sequence[jax.Array]], list[jax.Array]]) -> Callable[..., list]:
    """Return a function of a list as a function of its items."""
    return lambda *args: run(args)


def _held(plan: AxisPlan, arrays: Sequence[Sequence[jax.Array]]) -> list[Held]:
    """Return the inputs of a body, each in the holdings of its plan."""
    return [
        dict(zip(holdings, each, strict=True))
        for holdings, each in zip(plan.inputs, arrays, strict=True)
    ]


def _grouped(flat: Sequence[jax.Array], sizes: Sequence[int]) -> list[list[jax.Array]]:
    rest = iter(flat)
    return [[next(rest) for _ in range(size)] for size in sizes]
