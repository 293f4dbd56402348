"""Values of a traced program that are in the host's memory, and the equations that move them."""

from __future__ import annotations

from typing import Any

from jax import memory

from zeroxla.program.trace import Equation


def is_host_type(aval: Any) -> bool:
    """Return whether an array of this type is in host memory."""
    return getattr(aval, "memory_space", None) == memory.Space.Host


def is_value_on_host(value: Any) -> bool:
    """Return whether a value of a traced program, a `trace.Value` or JAX's `Var`, is in host
    memory."""
    return is_host_type(value.aval)


def is_move(eq: Equation) -> bool:
    """Return whether an equation moves arrays between the host's memory and the device's."""
    there = sum(map(is_value_on_host, eq.outputs)), sum(map(is_value_on_host, eq.values))
    return eq.name == "device_put" and there[0] != there[1]
