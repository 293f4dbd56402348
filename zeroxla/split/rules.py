"""What each kind of equation says about dims, and how it runs on parts.

A `Rule` has two sides that must agree:

* `connect` joins the atoms of operands and results that are split together, and blocks those that
  the equation needs whole;
* `run` computes a part of the results from parts of the operands. Where an equation names shapes,
  those of the parts take their place; where a split atom is summed over, the parts are summed.

An equation without a rule needs its operands whole, and runs as it is. The rules are in `mapping`,
`shapes` and `products`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from zeroxla.program.trace import Atom as Operand
from zeroxla.program.trace import Equation, Value
from zeroxla.split.atoms import Dim, Dims, block, dim_of, join


class Parts(Protocol):
    """What `run` may ask of a program that runs on parts."""

    def dims(self, operand: Operand) -> Dims:
        """The dims of an operand or result."""
        ...

    def part(self, dim: Dim) -> int:
        """The size of a part of a dim."""
        ...

    def take(self, whole: jax.Array, dims: Dims) -> jax.Array:
        """This device's part of an array that every device has whole."""
        ...

    def sum(self, part: jax.Array) -> jax.Array:
        """The sum over the devices that share the model."""
        ...

    @property
    def index(self) -> jax.Array | int:
        """This device's place among them."""
        ...


Args = Sequence[jax.Array]
Connect = Callable[[Equation, list[Dims]], list[Dims]]
Run = Callable[[Parts, Equation, Args], list[jax.Array]]


def bind(eq: Equation, args: Args, **changed: Any) -> list[jax.Array]:
    """Run an equation, with other parameters than its own."""
    out = eq.source.primitive.bind(*args, **{**eq.params, **changed})
    return list(out) if eq.source.primitive.multiple_results else [out]


def run_as_is(parts: Parts, eq: Equation, args: Args) -> list[jax.Array]:
    """Run an equation that names no shape."""
    del parts
    return bind(eq, args)


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """See the top of the file."""

    connect: Connect
    run: Run = run_as_is


def fresh(value: Value) -> Dims:
    """Return dims that nothing has been said of."""
    return tuple(map(dim_of, value.aval.shape))


def shape_of(operand: Operand) -> tuple[int, ...]:
    """Return the shape of an operand."""
    return tuple(operand.aval.shape if isinstance(operand, Value) else jnp.shape(operand.value))


def same(eq: Equation, a: Dim, b: Dim) -> None:
    """Join two dims that an equation makes one."""
    join(a, b, f"{eq.name} regroups it")


def connect_unknown(eq: Equation, ins: list[Dims]) -> list[Dims]:
    """Everything is needed whole."""
    outs = [fresh(v) for v in eq.outputs]
    for dims in (*ins, *outs):
        for dim in dims:
            block(dim, f"{eq.name} needs it whole")
    return outs


UNKNOWN = Rule(connect_unknown)
