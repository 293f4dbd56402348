"""Keys that tell whether two equations do the same.

Models without loops repeat a block by running the same Python code again. Each run leaves equations
of its own, whose parameters are equal, though seldom the same objects. `likeness` makes of an
equation a key that can be hashed: equations with equal keys compute the same from equal operands,
and so do their derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from zeroxla.program import compat
from zeroxla.program.primitives import CUSTOM_RULES
from zeroxla.program.rules import pullback_of
from zeroxla.program.trace import Constant, Equation, Operand, Value

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
    operands = tuple((isinstance(a, Constant), _type_of(a)) for a in eq.inputs)
    return _of_equation(eq.source, rules=True), operands


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


def _of_equation(eqn: Any, *, rules: bool) -> Hashable:
    """Return the key of a jaxpr's equation, without its operands.

    Args:
      eqn: the equation.
      rules: whether the derivatives of custom rules are a part of the key. Within a derivative they
        are not: they are of the second order, and `odeint` has them without end.
    """
    has_rule = eqn.primitive.name in CUSTOM_RULES
    params = tuple(
        (name, _of_param(value, rules))
        for name, value in sorted(eqn.params.items())
        if not (has_rule and name in _RULES)
    )
    rule = _of_jaxpr(pullback_of(eqn), rules=False) if has_rule and rules else None
    settings = compat.settings_of(eqn)
    return eqn.primitive.name, params, settings, tuple(map(_of_aval, eqn.outvars)), rule


def _of_aval(v: Any) -> Hashable:
    return str(v.aval)


def _of_param(value: Any, rules: bool) -> Hashable:
    """Return the key of a parameter; that of an object of an unknown kind is its identity."""
    if isinstance(value, tuple | list):
        return type(value).__name__, tuple(_of_param(v, rules) for v in value)
    if isinstance(value, dict):
        return "dict", tuple(sorted((str(k), _of_param(v, rules)) for k, v in value.items()))
    if compat.is_jaxpr(value):
        return _of_jaxpr(value, rules)
    if isinstance(value, np.ndarray | jax.Array):
        return "array", value.shape, str(value.dtype), id(value)
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    return type(value).__name__, value


def _of_jaxpr(jaxpr: Any, rules: bool) -> Hashable:
    """Return the key of a jaxpr: its equations, with its variables by their numbers."""
    jaxpr, consts = compat.open_jaxpr(jaxpr)
    numbers: dict[Any, int] = {}

    def number(v: Any) -> Hashable:
        if isinstance(v, jex.Literal):
            return "literal", str(v.aval), np.asarray(v.val).tobytes()
        return numbers.setdefault(v, len(numbers))

    inputs = tuple((number(v), _of_aval(v)) for v in (*jaxpr.constvars, *jaxpr.invars))
    equations = tuple(
        (
            _of_equation(eqn, rules=rules),
            tuple(map(number, eqn.invars)),
            tuple(map(number, eqn.outvars)),
        )
        for eqn in jaxpr.eqns
    )
    return inputs, tuple(map(_of_constant, consts)), equations, tuple(map(number, jaxpr.outvars))


def _of_constant(value: Any) -> Hashable:
    """Return the key of an array or a number: its elements, if they are few and known."""
    is_array = isinstance(value, _ARRAYS) and not isinstance(value, Tracer)
    if not is_array or _is_key(value) or np.size(value) > MOST_ELEMENTS:
        return id(value)
    return _type_of(Constant(value)), np.asarray(value).tobytes()
