"""Keys that tell whether two equations do the same.

Models without loops repeat a block by running the same Python code again. Each run leaves equations
of its own, whose parameters are equal, though seldom the same objects. `likeness` makes of an
equation a key that can be hashed: equations with equal keys compute the same from equal operands,
and so do their derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from zeroxla.program import compat
from zeroxla.program.primitives import CUSTOM_RULES
from zeroxla.program.trace import Constant, Equation, Operand, Value, is_float

_RULES = frozenset({"bwd", "fwd_jaxpr_thunk", "jvp_jaxpr_fun", "out_trees"})
"""Parameters of custom rules that are functions. The derivative itself is compared instead."""

_ARRAYS = np.ndarray | np.generic | jax.Array | int | float | complex

MOST_ELEMENTS = 2**16
"""Constants of more elements are equal if they are the same object."""


def likeness(eq: Equation) -> Hashable:
    """Return the key of an equation; see above.

    The values of constant operands are not part of it, only their shapes and dtypes.

    Cost: the trace of the derivative, if a custom rule is in the equation.
    """
    inside = _of_equation(eq.source)
    operands = tuple((isinstance(a, Constant), _type_of(a)) for a in eq.inputs)
    derivative = _derivative(eq) if _has_rule(eq.source) else None
    return inside, operands, derivative


def likeness_of_run(
    equations: Iterable[Equation],
    given: Iterable[Value],
    results: Iterable[Value],
    likeness: Callable[[Equation], Hashable] = likeness,
) -> Hashable:
    """Return the key of equations that run one after another. Runs with equal keys compute the same
    results from the same values.

    Args:
      equations: the equations.
      given: the values that they read and none of them makes, in an order.
      results: the results, in an order: of the values that the equations make, those that are read
        elsewhere.
      likeness: returns the key of an equation.
    """
    numbers: dict[Value, int] = {}
    for v in given:
        numbers.setdefault(v, len(numbers))

    def of(operand: Operand) -> Hashable:
        return numbers[operand] if isinstance(operand, Value) else _of_constant(operand.value)

    kinds, keys = tuple(map(_type_of, numbers)), []
    for eq in equations:
        keys.append((likeness(eq), *map(of, eq.inputs)))
        for v in eq.outputs:
            numbers[v] = len(numbers)
    return kinds, tuple(keys), tuple(numbers[v] for v in results)


def is_same_constant(a: Constant, b: Constant) -> bool:
    """Return whether two constants are equal, bit for bit."""
    if a.value is b.value:
        return True
    if _type_of(a) != _type_of(b) or _is_key(a.value) or _is_key(b.value):
        return False
    return np.asarray(a.value).tobytes() == np.asarray(b.value).tobytes()


def _type_of(operand: Operand) -> Hashable:
    aval = operand.value if isinstance(operand, Constant) else operand.aval
    weak = getattr(aval, "weak_type", False)
    return tuple(np.shape(aval)), str(jax.dtypes.result_type(aval)), weak


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(jax.dtypes.result_type(value), jax.dtypes.prng_key)


def _of_equation(eqn: Any) -> Hashable:
    """Return the key of a jaxpr's equation, without its operands."""
    params = tuple(
        (name, _of_param(value))
        for name, value in sorted(eqn.params.items())
        if not (eqn.primitive.name in CUSTOM_RULES and name in _RULES)
    )
    settings = compat.settings_of(eqn)
    return eqn.primitive.name, params, settings, tuple(map(_of_aval, eqn.outvars))


def _of_aval(v: Any) -> Hashable:
    return str(v.aval)


def _of_param(value: Any) -> Hashable:
    """Return the key of a parameter; that of an object of an unknown kind is its identity."""
    if isinstance(value, tuple | list):
        return type(value).__name__, tuple(map(_of_param, value))
    if isinstance(value, dict):
        return "dict", tuple(sorted((str(k), _of_param(v)) for k, v in value.items()))
    if compat.is_jaxpr(value):
        return _of_jaxpr(value)
    if isinstance(value, np.ndarray | jax.Array):
        return "array", value.shape, str(value.dtype), id(value)
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    return type(value).__name__, value


def _of_jaxpr(jaxpr: Any) -> Hashable:
    """Return the key of a jaxpr: its equations, with its variables by their numbers."""
    jaxpr, consts = compat.open_jaxpr(jaxpr)
    numbers: dict[Any, int] = {}

    def number(v: Any) -> Hashable:
        if isinstance(v, jex.Literal):
            return "literal", str(v.aval), np.asarray(v.val).tobytes()
        return numbers.setdefault(v, len(numbers))

    inputs = tuple((number(v), _of_aval(v)) for v in (*jaxpr.constvars, *jaxpr.invars))
    equations = tuple(
        (_of_equation(eqn), tuple(map(number, eqn.invars)), tuple(map(number, eqn.outvars)))
        for eqn in jaxpr.eqns
    )
    return inputs, tuple(map(_of_constant, consts)), equations, tuple(map(number, jaxpr.outvars))


def _of_constant(value: Any) -> Hashable:
    """Return the key of an array or a number: its elements, if they are few and known."""
    is_array = isinstance(value, _ARRAYS) and not isinstance(value, Tracer)
    if not is_array or _is_key(value) or np.size(value) > MOST_ELEMENTS:
        return id(value)
    return _type_of(Constant(value)), np.asarray(value).tobytes()


def _has_rule(eqn: Any) -> bool:
    """Return whether an equation is, or holds, one with a custom derivative."""
    if eqn.primitive.name in CUSTOM_RULES:
        return True
    return any(_has_rule(inner) for jaxpr in _jaxprs(eqn.params) for inner in jaxpr.eqns)


def _jaxprs(params: Any) -> list[Any]:
    """Return the jaxprs among parameters, opened."""
    values = params.values() if isinstance(params, dict) else params
    found = []
    for value in values:
        if compat.is_jaxpr(value):
            found.append(compat.open_jaxpr(value)[0])
        elif isinstance(value, tuple | list):
            found += _jaxprs(value)
    return found


def _derivative(eq: Equation) -> Hashable:
    """Return the key of an equation's pullback. Rules inside it would be of the second order."""

    def pullback(args: Sequence[Any]) -> Any:
        floats = [i for i, x in enumerate(args) if is_float(x.dtype)]

        def call(*some: Any) -> list[Any]:
            every = list(args)
            for i, x in zip(floats, some, strict=True):
                every[i] = x
            results = compat.call_equation(eq.source, eq.name_stack, every)
            return [x for x in results if is_float(x.dtype)]

        results, pull = jax.vjp(call, *(args[i] for i in floats))
        return pull([jnp.ones_like(x) for x in results])

    shapes = []
    for a in eq.inputs:
        aval = a.value if isinstance(a, Constant) else a.aval
        shapes.append(jax.ShapeDtypeStruct(np.shape(aval), jax.dtypes.result_type(aval)))
    return _of_jaxpr(jax.make_jaxpr(pullback)(shapes))
