"""An equation with narrow floats, run with float32 in their place.

Equations that hold a program of their own other than loops and branches (kernels, scatters), that
read bits or call Python run as they are: operands are rounded to their own dtypes, and an overflow
shows as infinity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zeroxla.program import compat
from zeroxla.program.primitives import CALLBACKS
from zeroxla.program.trace import Constant, Equation, Value


def is_narrow(dtype: Any) -> bool:
    """Return whether a dtype is floating with fewer than 32 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4


def rounded(constant: Constant, dtype: Any) -> np.ndarray:
    """Return a constant in the dtype that it has in the program: -1e9 is -inf in float16."""
    with np.errstate(over="ignore"):
        return np.asarray(constant.value).astype(dtype)


def operand_of(env: Mapping[Value, Any], eq: Equation, i: int) -> Any:
    """Return operand i of an equation, as float32 if it is narrow."""
    operand = eq.inputs[i]
    if isinstance(operand, Value):
        return env[operand]
    variable = eq.source.invars[i]
    if has_float(variable) and is_narrow(variable.aval.dtype):
        return jnp.asarray(rounded(operand, variable.aval.dtype).astype(np.float32))
    return operand.value


def wide_constant(constant: Constant) -> Any:
    """Return a constant that a program returns, as float32 if it is narrow."""
    array = jnp.asarray(constant.value)
    return array.astype(jnp.float32) if is_narrow(array.dtype) else array


def wide_results(eq: Equation, operands: Sequence[Any]) -> list[Any]:
    """Return an equation's results with narrow floats as float32; or, if it runs as it is, its own
    results cast to float32."""
    if not _runs_as_it_is(eq):
        params = {name: _wide(value) for name, value in eq.params.items()}
        return compat.call_equation(eq.source.replace(params=params), eq.name_stack, operands)
    own = [
        x.astype(v.aval.dtype) if has_float(v) and is_narrow(v.aval.dtype) else x
        for x, v in zip(operands, eq.source.invars, strict=True)
    ]
    results = compat.call_equation(eq.source, eq.name_stack, own)
    return [
        x.astype(jnp.float32) if is_float_value(v) and is_narrow(v.aval.dtype) else x
        for x, v in zip(results, eq.outputs, strict=True)
    ]


def _runs_as_it_is(eq: Equation) -> bool:
    values = [x for p in eq.params.values() for x in (p if isinstance(p, tuple) else (p,))]
    return (
        any(map(compat.is_jaxpr, values))
        or eq.name in CALLBACKS
        or eq.name == "bitcast_convert_type"
    )


def _wide(param: Any) -> Any:
    """Return a parameter of an equation, float32 if it is a narrow dtype."""
    is_dtype = isinstance(param, np.dtype) or (
        isinstance(param, type) and issubclass(param, np.generic)
    )
    return np.dtype(np.float32) if is_dtype and is_narrow(param) else param


def has_float(variable: Any) -> bool:
    """Return whether a variable of JAX's own program is floating."""
    return jnp.issubdtype(variable.aval.dtype, jnp.floating)


def is_float_value(value: Value) -> bool:
    """Return whether a value is floating, complex ones aside."""
    return jnp.issubdtype(value.aval.dtype, jnp.floating)
