"""Runs a program whose floats are narrow in float32, and notes how large each value becomes.

Every equation runs with its narrow operands and results (float16, bfloat16, float8) as float32, so
that a value that would overflow is there to be seen; see `wide_equations.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zeroxla.inspect.check.wide_equations import (
    has_float,
    is_float_value,
    operand_of,
    rounded,
    wide_constant,
    wide_results,
)
from zeroxla.program import compat
from zeroxla.program.primitives import INFINITE_AT_POLES, LOOPS, NO_LARGER
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Constant, Equation, Operand, Program, Value
from zeroxla.program.walk import body_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideRun:
    """The values of a program that ran in float32.

    Attributes:
      outputs: the results of the program.
      equations: the equations in the order in which they ran; those of a loop's body once.
      largest: the largest size of a finite element of each floating value; infinity if an equation
        made infinity from finite operands. Of a loop's values, over all turns.
      nan: the values with a NaN.
      entered: for each loop and branch, by its place in `equations`, the inputs of its bodies with
        the operands that they are given.
    """

    outputs: list[Any]
    equations: tuple[Equation, ...]
    largest: dict[Value, float]
    nan: frozenset[Value]
    entered: dict[int, list[tuple[Value, Operand]]]


def run_wide(program: Program, platform: str, wrap: Any, args: Sequence[Any]) -> WideRun:
    """Run a program.

    Args:
      program: the program, with narrow inputs.
      platform: see `compat.branches_for`.
      wrap: makes a function ready to run, such as by `shard_map`.
      args: the inputs, narrow ones as float32.

    Cost: one compilation.
    """
    recorder = _Recorder(platform)
    values: list[Value] = []  # those with a note

    def run(*args: Any) -> Any:
        outputs, notes = recorder.run(program, list(args))
        values[:] = list(notes)
        return outputs, list(notes.values())

    outputs, notes = jax.jit(wrap(run))(*args)
    found = {v: np.asarray(note) for v, note in zip(values, notes, strict=True)}
    equations = tuple(recorder.equations.values())
    for eq in equations:
        # Inside a loop a carry counts as large as it is at first: what makes it large is inside.
        entered = recorder.entered.get(id(eq), ())
        found.update((v, found[operand]) for v, operand in entered if operand in found)
        given = [found[v] for v in eq.values if v in found]
        if given and _inherits(eq):
            found.update((v, np.max(given, 0)) for v in eq.outputs if is_float_value(v))
    infinite = {v for v, (_, whole) in found.items() if np.isinf(whole)}
    made = {
        v
        for eq in equations
        if eq.name not in INFINITE_AT_POLES | LOOPS | {"cond"}
        and infinite.isdisjoint(eq.values)
        and not _reads_infinity(eq)
        for v in infinite.intersection(eq.outputs)
    }
    return WideRun(
        outputs=outputs,
        equations=equations,
        largest={v: np.inf if v in made else float(finite) for v, (finite, _) in found.items()},
        nan=frozenset(v for v, (_, whole) in found.items() if np.isnan(whole)),
        entered={i: recorder.entered.get(id(eq), []) for i, eq in enumerate(equations)},
    )


Notes = dict[Value, Any]
"""float32[2] of each value: the largest size of its finite elements, and of all, which is NaN if
there is one."""


class _Recorder:
    """Runs programs and notes their values; called while JAX traces.

    Attributes:
      equations: the equations that have run, by identity: JAX may trace a body several times.
      entered: for loops and branches, the inputs of bodies, each with the operand that it is given.
    """

    def __init__(self, platform: str) -> None:
        self._platform = platform
        self.equations: dict[int, Equation] = {}
        self.entered: dict[int, list[tuple[Value, Operand]]] = {}

    def run(self, program: Program, args: list[Any]) -> tuple[list[Any], Notes]:
        """Return the outputs of a program, and notes on its values and on those inside it."""
        notes: Notes = {
            v: _note(x) for v, x in zip(program.inputs, args, strict=True) if is_float_value(v)
        }
        outputs, inside = self._run(program, args)
        return outputs, notes | inside

    def _run(self, program: Program, args: Sequence[Any]) -> tuple[list[Any], Notes]:
        env: dict[Value, Any] = dict(zip(program.inputs, args, strict=True))
        notes: Notes = {}
        for eq in program.equations:
            self.equations[id(eq)] = eq
            operands = [operand_of(env, eq, i) for i in range(len(eq.inputs))]
            results, inside = self._results(eq, operands)
            notes |= inside
            env.update(zip(eq.outputs, results, strict=True))
            if not _inherits(eq):
                made = zip(eq.outputs, results, strict=True)
                notes |= {v: _note(x) for v, x in made if is_float_value(v)}
        outputs = [wide_constant(a) if isinstance(a, Constant) else env[a] for a in program.outputs]
        return outputs, notes

    def _results(self, eq: Equation, operands: list[Any]) -> tuple[list[Any], Notes]:
        if eq.name == "scan":
            return self._scan(Scan(eq), operands)
        if eq.name == "while":
            return self._while(eq, operands)
        if eq.name == "cond":
            return self._cond(eq, operands)
        return wide_results(eq, operands), {}

    def _enter(self, eq: Equation, body: Program, operands: Sequence[Operand]) -> None:
        self.entered.setdefault(id(eq), []).extend(zip(body.inputs, operands, strict=True))

    def _scan(self, scan: Scan, operands: list[Any]) -> tuple[list[Any], Notes]:
        body = scan.body(compat.forward_jaxpr)
        self._enter(scan.equation, body, scan.equation.inputs)
        consts, carry, xs = scan.split_inputs(operands)
        inside: list[Value] = []

        def turn(carry: Any, xs: Any) -> Any:
            outputs, notes = self._run(body, [*consts, *carry, *xs])
            inside[:] = list(notes)
            last, ys = scan.split_outputs(outputs)
            return list(last), (list(ys), list(notes.values()))

        last, (ys, notes) = scan.run(turn, list(carry), list(xs))
        return [*last, *ys], {v: x.max(0, initial=0) for v, x in zip(inside, notes, strict=True)}

    def _while(self, eq: Equation, operands: list[Any]) -> tuple[list[Any], Notes]:
        params = eq.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body = operands[:num_cond], operands[num_cond : num_cond + num_body]
        first = operands[num_cond + num_body :]
        cond, body = body_of(params["cond_jaxpr"]), body_of(params["body_jaxpr"])
        self._enter(eq, cond, [*eq.inputs[:num_cond], *eq.inputs[num_cond + num_body :]])
        self._enter(eq, body, eq.inputs[num_cond:])
        inside: list[Value] = []

        def turn(carry: list[Any]) -> Any:
            outputs, notes = self._run(body, [*of_body, *carry])
            inside[:] = list(notes)
            return outputs, list(notes.values())

        def goes_on(carry: Any) -> Any:
            return self._run(cond, [*of_cond, *carry[0]])[0][0]

        def next_turn(carry: Any) -> Any:
            outputs, notes = turn(carry[0])
            return outputs, [jnp.maximum(a, b) for a, b in zip(carry[1], notes, strict=True)]

        zeros = [jnp.zeros(2, jnp.float32) for _ in jax.eval_shape(turn, first)[1]]
        outputs, notes = lax.while_loop(goes_on, next_turn, (first, zeros))
        return outputs, dict(zip(inside, notes, strict=True))

    def _cond(self, eq: Equation, operands: list[Any]) -> tuple[list[Any], Notes]:
        which, *rest = operands
        branches = [body_of(b) for b in compat.branches_for(eq.params, self._platform)]
        for branch in branches:
            self._enter(eq, branch, eq.inputs[1:])
        if len(branches) == 1:
            return self._run(branches[0], rest)
        inside: list[list[Value]] = [[] for _ in branches]

        def run(i: int, *args: Any) -> Any:
            outputs, notes = self._run(branches[i], list(args))
            inside[i] = list(notes)
            return outputs, list(notes.values())

        runs = [functools.partial(run, i) for i in range(len(branches))]
        counts = [len(jax.eval_shape(run, *rest)[1]) for run in runs]
        zero = jnp.zeros(2, jnp.float32)

        def padded(i: int, *args: Any) -> Any:
            outputs, notes = runs[i](*args)
            return outputs, [
                *[zero] * sum(counts[:i]),
                *notes,
                *[zero] * sum(counts[i + 1 :]),
            ]

        functions = [functools.partial(padded, i) for i in range(len(branches))]
        outputs, notes = lax.switch(which, functions, *rest)
        return outputs, dict(zip([v for of in inside for v in of], notes, strict=True))


@jax.jit
def _note(x: Any) -> Any:
    size = jnp.abs(x).astype(jnp.float32)
    finite = jnp.where(jnp.isfinite(size), size, 0)
    return jnp.stack([jnp.max(finite, initial=0), jnp.max(size, initial=0)])


def _inherits(eq: Equation) -> bool:
    """Return whether an equation's results need no notes: they are as large as its operands."""
    constants = any(
        isinstance(a, Constant) and has_float(v)
        for a, v in zip(eq.inputs, eq.source.invars, strict=True)
    )
    return eq.name in NO_LARGER and not constants and any(map(is_float_value, eq.values))


def _reads_infinity(eq: Equation) -> bool:
    """Return whether an equation reads a constant with an infinity, such as a mask."""
    found = (
        rounded(a, eq.source.invars[i].aval.dtype)
        for i, a in enumerate(eq.inputs)
        if isinstance(a, Constant) and has_float(eq.source.invars[i])
    )
    return any(not np.isfinite(np.asarray(x, np.float32)).all() for x in found)
