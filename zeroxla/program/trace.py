"""Turns a function into a flat program, the form in which the rest of zeroxla reads models.

`trace` returns a `Program`: a flat list of equations over values that are assigned once. Bodies of
`jit` are inlined. Custom rules, branches, loops and `jax.checkpoint` bodies stay one equation each;
a reader that wants to look into one calls `flatten` on its body.

A program runs by binding its equations again. So it can be evaluated, differentiated or traced
under any transformation, whole or piece by piece.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from zeroxla.program import compat
from zeroxla.program.primitives import COLLECTIVES, NO_GRADIENT


class Value:
    """One array of a program, assigned once. Compared by identity."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any) -> None:
        self.aval = aval

    @property
    def is_float(self) -> bool:
        """Whether gradients can flow through it."""
        return is_float(self.aval.dtype)

    def __repr__(self) -> str:
        return f"Value({self.aval.str_short()})"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A value known while tracing: a literal, or an array that the function closed over."""

    value: Any


Operand = Value | Constant


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """`outputs = primitive(inputs)`.

    Attributes:
      source: the jaxpr equation that it came from.
      name_stack: its `jax.named_scope` path, the scopes around inlined bodies included.
      inputs: the operands.
      outputs: the results.
    """

    source: Any
    name_stack: Any
    inputs: tuple[Operand, ...]
    outputs: tuple[Value, ...]

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.source.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        """The primitive's parameters."""
        return self.source.params

    @property
    def has_effects(self) -> bool:
        """Whether it does more than compute, such as print."""
        return compat.has_effects(self.source)

    @property
    def is_pinned(self) -> bool:
        """Whether it must run exactly where it stands: it has effects, or is a collective of the
        model's own, such as a synchronised norm's."""
        return self.has_effects or self.name in COLLECTIVES

    @property
    def values(self) -> tuple[Value, ...]:
        """The inputs that are not constants."""
        return tuple(a for a in self.inputs if isinstance(a, Value))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A flat list of equations from `inputs` to `outputs`."""

    inputs: tuple[Value, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Operand, ...]

    def __call__(self, *args: Any) -> list[Any]:
        """Evaluate on `args`, one array per input; return the outputs."""
        env = dict(zip(self.inputs, args, strict=True))
        run(self.equations, env)
        return [read(env, operand) for operand in self.outputs]


def is_float(dtype: Any) -> bool:
    """Return whether a dtype is floating or complex. Only such values carry gradients."""
    return jax.numpy.issubdtype(dtype, jax.numpy.inexact)


def bytes_of(value: Value) -> int:
    """Return the bytes of a value; an element of a PRNG key counts as two words."""
    return value.aval.size * getattr(value.aval.dtype, "itemsize", 8)


def read(env: Mapping[Value, Any], operand: Operand) -> Any:
    """Return the array of `operand`."""
    return operand.value if isinstance(operand, Constant) else env[operand]


def run(equations: Iterable[Equation], env: dict[Value, Any]) -> None:
    """Bind `equations` in order, reading inputs from `env` and writing outputs to it."""
    for eq in equations:
        args = [read(env, operand) for operand in eq.inputs]
        env.update(zip(eq.outputs, compat.call_equation(eq.source, eq.name_stack, args)))


Opened = Callable[[Any], Any]
"""(jaxpr equation) -> its body if it is to be inlined, None if it is to stay one equation."""


def trace(
    fun: Callable[..., Any], *args: Any, opened: Opened = compat.inlined_jaxpr
) -> tuple[Program, Any]:
    """Trace a function.

    Args:
      fun: a function of pytrees of arrays.
      *args: its arguments: pytrees of arrays or `jax.ShapeDtypeStruct`s.
      opened: says which equations are inlined. By default only calls such as `jit` are.

    Returns:
      The program and the tree structure of the result. The program's inputs and outputs are the
      flattened arguments and results. Equations without use or effect are dropped.
    """
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    jaxpr, consts = compat.without_dead_code(closed)
    inputs = tuple(Value(v.aval) for v in jaxpr.invars)
    return _program(jaxpr, consts, inputs, (), inputs, opened), jax.tree.structure(shapes)


def flatten(jaxpr: Any, opened: Opened = compat.inlined_jaxpr) -> Program:
    """Return the flat program of a jaxpr, open or closed, without equations that have neither use
    nor effect."""
    inputs = tuple(Value(v.aval) for v in compat.open_jaxpr(jaxpr)[0].invars)
    return _program(*compat.open_jaxpr(jaxpr), inputs, (), inputs, opened)


def flatten_behind(
    jaxpr: Any, inputs: Sequence[Value], first: Iterable[Equation], args: Sequence[Operand]
) -> Program:
    """Return the program that runs the equations `first` on `inputs` and then `jaxpr` on `args`."""
    return _program(*compat.open_jaxpr(jaxpr), inputs, first, args, compat.inlined_jaxpr)


def _program(
    jaxpr: Any,
    consts: Sequence[Any],
    inputs: Sequence[Value],
    first: Iterable[Equation],
    args: Sequence[Operand],
    opened: Opened,
) -> Program:
    equations = list(first)
    outputs = _inline(jaxpr, consts, args, None, equations, opened)
    return Program(tuple(inputs), _without_dead(equations, outputs), tuple(outputs))


def _inline(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Operand],
    stack: Any,
    into: list[Equation],
    opened: Opened,
) -> list[Operand]:
    """Append a jaxpr's equations to `into`; return its outputs.

    Values are new each time, because one jaxpr may be called at several places.
    """
    env: dict[Any, Operand] = dict(zip(jaxpr.invars, args, strict=True))
    env.update((v, Constant(c)) for v, c in zip(jaxpr.constvars, consts, strict=True))

    def operand(v: Any) -> Operand:
        return Constant(v.val) if isinstance(v, jex.Literal) else env[v]

    for eqn in map(compat.as_remat, jaxpr.eqns):
        inputs = tuple(operand(v) for v in eqn.invars)
        name_stack = compat.name_stack_of(eqn)
        name_stack = name_stack if stack is None else stack + name_stack
        if (body := opened(eqn)) is not None:
            outputs = _inline(*compat.open_jaxpr(body), inputs, name_stack, into, opened)
        else:
            outputs = [Value(v.aval) for v in eqn.outvars]
            into.append(Equation(eqn, name_stack, inputs, tuple(outputs)))
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [operand(v) for v in jaxpr.outvars]


def _without_dead(
    equations: Sequence[Equation], outputs: Iterable[Operand]
) -> tuple[Equation, ...]:
    needed = {a for a in outputs if isinstance(a, Value)}
    kept: list[Equation] = []
    for eq in reversed(equations):
        if eq.has_effects or not needed.isdisjoint(eq.outputs):
            kept.append(eq)
            needed.update(eq.values)
    return tuple(reversed(kept))


def closure(
    values: Iterable[Value], producers: Mapping[Value, Equation]
) -> tuple[list[Equation], list[Value]]:
    """Return what values are computed from.

    Args:
      values: the values that are wanted.
      producers: the equation that makes each value.

    Returns:
      The equations that `values` need, in order; and the roots, the values that they need and that
      no equation of `producers` makes.
    """
    equations: dict[Equation, None] = {}
    roots: dict[Value, None] = {}  # ordered: every process must trace the same program
    stack: list[tuple[Value, bool]] = [(v, False) for v in values]
    while stack:
        value, done = stack.pop()
        eq = producers.get(value)
        if eq is None:
            roots[value] = None
        elif done:
            equations[eq] = None
        elif eq not in equations:
            stack.append((value, True))
            stack.extend((v, False) for v in eq.values)
    return list(equations), list(roots)


def active_values(
    equations: Sequence[Equation], active: Iterable[Value], outputs: Iterable[Operand]
) -> set[Value]:
    """Return the floating values through which a gradient flows from `outputs` to `active` values.

    A value counts if it is or depends on an active one, and an output depends on it. Every result
    of an equation is taken to depend on every operand, even those of a `cond`. So the result may
    have too many values, never too few.
    """
    downstream = {v for v in active if v.is_float}
    for eq in equations:
        if eq.name not in NO_GRADIENT and not downstream.isdisjoint(eq.values):
            downstream.update(v for v in eq.outputs if v.is_float)
    upstream = {v for v in outputs if isinstance(v, Value) and v.is_float}
    for eq in reversed(equations):
        if eq.name not in NO_GRADIENT and not upstream.isdisjoint(eq.outputs):
            upstream.update(v for v in eq.values if v.is_float)
    return downstream & upstream
