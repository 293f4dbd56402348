"""Runs a program on parts: each device computes with its part of every split dim.

The arrays are the program's arrays with the split dims shorter, so an equation need not know that
there are other parts. Sums over a split dim are completed over one mesh axis. Call this under
`shard_map`, or under `vmap` with an axis name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.program import compat
from zeroxla.program.branches import While
from zeroxla.program.primitives import CUSTOM_RULES, REMATS
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Constant, Equation, Operand
from zeroxla.split.atoms import Atom, choosing
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.products import rule_of
from zeroxla.split.split_axis import SplitAxis


@dataclasses.dataclass(frozen=True, slots=True)
class PartsRunner:
    """Runs a program on one device's parts.

    Attributes:
      flow: the program, and the dims of its values.
      axis: the mesh axis over which the parts lie.
      in_place: for a result that takes the place of an input, that input. A loop that slices such
        an input and stacks such a result updates one array instead of holding two.
      index: a class that is split while the program runs, and when it is differentiated later;
        None if the classes that are split stay so.
    """

    flow: DimsFlow
    axis: SplitAxis
    in_place: Mapping[Operand, Operand] = dataclasses.field(default_factory=dict)
    index: Atom | None = None

    def __call__(self, args: Sequence[jax.Array]) -> list[jax.Array]:
        """Return this device's parts of the program's results, given its parts of the inputs."""
        env: dict[Operand, jax.Array] = dict(zip(self.flow.program.inputs, args, strict=True))

        def read(operand: Operand) -> jax.Array:
            if not isinstance(operand, Constant):
                return env[operand]
            dims = self.flow.dims[operand]
            if tuple(map(self.axis.dim_size, dims)) == jnp.shape(operand.value):
                return operand.value  # A literal stays a literal.
            return self.axis.take(jnp.asarray(operand.value), dims)

        for eq in self.flow.program.equations:
            ins = [read(x) for x in eq.inputs]
            with compat.context_of(eq.source, eq.name_stack):
                if eq in self.flow.bodies:
                    outs = _RUN[eq.name](self, eq, ins)
                else:
                    outs = rule_of(eq).run(self.axis, self.flow.dims, eq, ins)
            env.update(zip(eq.outputs, outs, strict=True))
        return [read(x) for x in self.flow.program.outputs]

    def _bodies(self, eq: Equation) -> list[PartsRunner]:
        """Return what runs the programs of an equation. They complete their sums."""
        axis = dataclasses.replace(self.axis, defers=False)
        return [PartsRunner(body, axis, index=self.index) for body in self.flow.bodies[eq]]

    def _remat(self, eq: Equation, ins: Sequence[jax.Array]) -> list[jax.Array]:
        """Run a `jax.checkpoint`."""
        (body,) = self._bodies(eq)
        return rematerialised(eq, body)(ins)

    def _rule(self, eq: Equation, ins: Sequence[jax.Array]) -> list[jax.Array]:
        """Run an equation with a derivative of its own."""
        forward, backward = self._bodies(eq)

        def later(args: Sequence[jax.Array]) -> list[jax.Array]:
            with choosing(self.index):
                return backward(args)

        return self.flow.rules[eq].run(forward, later, ins)

    def _while(self, eq: Equation, ins: Sequence[jax.Array]) -> list[jax.Array]:
        """Run a `while`. Its condition is a scalar, which all devices compute alike."""
        test, body = self._bodies(eq)
        of_test, of_body, carry = While(eq).split_inputs(ins)
        if self.axis.sizes is not None:  # On random arrays it might never end: it takes one turn.
            goes_on, once = test([*of_test, *carry])[0], body([*of_body, *carry])
            return [jnp.where(goes_on, x, y) for x, y in zip(once, carry, strict=True)]
        return lax.while_loop(
            lambda carry: test([*of_test, *carry])[0],
            lambda carry: body([*of_body, *carry]),
            list(carry),
        )

    def _branches(self, eq: Equation, ins: Sequence[jax.Array]) -> list[jax.Array]:
        """Run the branch of a `cond` that a scalar names, which all devices compute alike."""
        index, *args = ins
        branches = [lambda *args, run=run: run(args) for run in self._bodies(eq)]
        return lax.switch(index, branches, *args)

    def _loop(self, eq: Equation, ins: Sequence[jax.Array]) -> list[jax.Array]:
        """Run a `scan`. Arrays that are updated in place are carried, the others are sliced."""
        scan = Scan(eq)
        (body,) = self._bodies(eq)
        consts, carry, xs = scan.split_inputs(ins)
        x_of = {x: i for i, x in enumerate(scan.xs)}
        updated = {  # number of a stacked result -> number of the sliced input that it replaces
            i: x_of[self.in_place[y]] for i, y in enumerate(scan.ys) if self.in_place.get(y) in x_of
        }
        read = [i for i in range(len(xs)) if i not in updated.values()]

        def turn(state: tuple[list, dict], now: tuple[Any, list]) -> tuple[tuple, list]:
            (carry, arrays), (i, slices) = state, now
            layer = dict(zip(read, slices, strict=True))
            for x in updated.values():
                layer[x] = lax.dynamic_index_in_dim(arrays[x], i, keepdims=False)
            outs = body([*consts, *carry, *(layer[x] for x in range(len(xs)))])
            carry, ys = scan.split_outputs(outs)
            for y, x in updated.items():
                arrays = {**arrays, x: lax.dynamic_update_index_in_dim(arrays[x], ys[y], i, 0)}
            return (carry, arrays), [y for k, y in enumerate(ys) if k not in updated]

        length = xs[0].shape[0] if xs else self.axis.turns(scan.length)
        (carry, arrays), stacked = scan.run(
            turn,
            (list(carry), {x: xs[x] for x in updated.values()}),
            (jnp.arange(length), [xs[i] for i in read]),
            length=length,
        )
        rest = iter(stacked)
        ys = (arrays[updated[i]] if i in updated else next(rest) for i in range(len(scan.ys)))
        return [*carry, *ys]


_RUN = {
    "scan": PartsRunner._loop,
    "while": PartsRunner._while,
    "cond": PartsRunner._branches,
    **dict.fromkeys(REMATS, PartsRunner._remat),
    **dict.fromkeys(CUSTOM_RULES, PartsRunner._rule),
}
"""Equations that run programs of their own."""


def rematerialised(eq: Equation, run: Callable[[Sequence[jax.Array]], list[jax.Array]]) -> Any:
    """Return `run` under the `jax.checkpoint` that an equation is."""

    def again(args: Sequence[jax.Array]) -> list[jax.Array]:
        return run(args)

    return jax.checkpoint(again, policy=eq.params["policy"], prevent_cse=eq.params["prevent_cse"])
