"""Computes one equation at one place, by the rules that split programs over devices.

A place is a part of one element. So the rules say which operands an equation then reads in part, at
the same place, and which it reads whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.hybrid.from_trace.places import Along, ForbiddenError, Form, PlaceAxis, alongs, mark
from zeroxla.program import compat
from zeroxla.program.trace import Constant, Equation, Operand, Value
from zeroxla.split.atoms import Atom, Dims, atoms_in, dims_of, expand, pieces_of
from zeroxla.split.products import rule_of
from zeroxla.split.rules import shape_of

Get = Callable[[int, Form], jax.Array]
"""(number of an operand, form) -> the operand in this form."""


class AtPlace(Protocol):
    """An equation that is computed at one place.

    Attributes:
      needs: the forms in which it reads each operand.
      states: the arrays that it keeps from place to place. They begin as zeros.
    """

    @property
    def needs(self) -> Sequence[Sequence[Form]]: ...

    @property
    def states(self) -> Sequence[jax.ShapeDtypeStruct]: ...

    def run(
        self, axis: PlaceAxis, get: Get, states: Sequence[jax.Array]
    ) -> tuple[Sequence[jax.Array | None], Sequence[jax.Array]]:
        """Return the slices of the results, None for those that nothing wants; and the states."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ByRule:
    """An equation whose rule cuts it.

    Attributes:
      equation: the equation, with an operand of its own for every operand.
      dims: the dims of its operands and results; the places are the chosen atom.
      needs: see `AtPlace`.
    """

    equation: Equation
    dims: Mapping[Operand, Dims]
    needs: Sequence[Sequence[Form]]
    states = ()

    @staticmethod
    def of(eq: Equation, wanted: Mapping[int, Along], num_places: int) -> ByRule:
        """Cut an equation.

        Args:
          eq: the equation.
          wanted: the slices that are wanted, by the number of the result.
          num_places: the number of places.

        Raises:
          ForbiddenError: it cannot be cut there.
        """
        eq = _with_own_operands(eq)
        ins, outs, places = _connected(eq, num_places)
        for i, along in wanted.items():
            mark(outs[i], along, places, eq)
        (*more, root) = expand((places,))
        if more or root.needed_whole or pieces_of(root):
            raise ForbiddenError(eq, "; ".join(root.needed_whole) or "it regroups places")
        root.chosen = True
        found = [alongs(dims, root) for dims in (*ins, *outs)]
        held = [sum(root in atoms_in(dim) for dim in dims) for dims in (*ins, *outs)]
        if held != list(map(len, found)):
            raise ForbiddenError(eq, "it takes some places, or joins them with others")
        if any(len(mine) > 1 for mine in found):
            raise ForbiddenError(eq, "one array holds its places twice")
        needs = [list(mine) or [None] for mine in found[: len(ins)]]
        dims = dict(zip((*eq.inputs, *eq.outputs), (*ins, *outs), strict=True))
        return ByRule(equation=eq, dims=dims, needs=needs)

    def run(
        self, axis: PlaceAxis, get: Get, states: Sequence[jax.Array]
    ) -> tuple[Sequence[jax.Array | None], Sequence[jax.Array]]:
        """See `AtPlace`."""
        eq = self.equation
        args = [get(i, form) for i, (form,) in enumerate(self.needs)]
        with compat.context_of(eq.source, eq.name_stack):
            return rule_of(eq).run(axis, self.dims, eq, args), states


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Window:
    """A convolution along places: it reads a window of its input, which is kept.

    Attributes:
      equation: the equation.
      dim: the dim of its input along which the window moves.
      spatial: the number of this dim among the spatial ones.
      before: the number of elements that it reads before the one at its own place.
      size: the number of elements that it reads.
    """

    equation: Equation
    dim: int
    spatial: int
    before: int
    size: int
    needs = ((None,), (None,))
    states = ()

    @staticmethod
    def of(eq: Equation, wanted: Along) -> Window | None:
        """Return the window of a convolution; None if it moves by more than a place."""
        params = eq.params
        numbers = params["dimension_numbers"]
        if wanted.dim not in numbers.out_spec[2:]:
            return None
        k = numbers.out_spec[2:].index(wanted.dim)
        if shape_of(eq.inputs[1])[numbers.rhs_spec[2 + k]] == 1 and params["padding"][k] == (0, 0):
            return None  # It reads its own place alone.
        if (params["window_strides"][k], params["lhs_dilation"][k]) != (1, 1):
            return None
        taps = shape_of(eq.inputs[1])[numbers.rhs_spec[2 + k]]
        return Window(
            equation=eq,
            dim=numbers.lhs_spec[2 + k],
            spatial=k,
            before=params["padding"][k][0],
            size=params["rhs_dilation"][k] * (taps - 1) + 1,
        )

    def run(
        self, axis: PlaceAxis, get: Get, states: Sequence[jax.Array]
    ) -> tuple[Sequence[jax.Array | None], Sequence[jax.Array]]:
        """See `AtPlace`."""
        whole, kernel = get(0, None), get(1, None)
        at = axis.index - self.before + jnp.arange(self.size)
        inside = (at >= 0) & (at < whole.shape[self.dim])
        found = jnp.take(whole, at, axis=self.dim, mode="clip")
        real = lax.broadcast_in_dim(inside, found.shape, (self.dim,))
        padding = list(self.equation.params["padding"])
        padding[self.spatial] = (0, 0)
        params = {**self.equation.params, "padding": tuple(padding)}
        bind = self.equation.source.primitive.bind
        return [bind(jnp.where(real, found, 0), kernel, **params)], states


def places_behind(eq: Equation, found: Sequence[frozenset[Along] | None]) -> list[frozenset[Along]]:
    """Return the dims that hold places in each result of an equation.

    There may be a few places more or fewer than a row has, as behind a `pad`.

    Args:
      eq: the equation; no loop.
      found: the same of each operand; None for one that depends on no token.
    """
    results: list[set[Along]] = [set() for _ in eq.outputs]
    for i, mine in enumerate(found):
        for along in mine or ():
            own = _with_own_operands(eq)
            num = shape_of(own.inputs[i])[along.dim] // (along.outer * along.inner)
            ins, outs, places = _connected(own, num)
            mark(ins[i], along, places, own)
            (*more, root) = expand((places,))
            for result, dims in zip(results, outs, strict=True):
                result.update(() if more or pieces_of(root) else alongs(dims, root))
    for result, value in zip(results, eq.outputs, strict=True):
        if not result:
            result.update(_guess(eq, value, found))
    return [frozenset(result) for result in results]


def _guess(eq: Equation, value: Value, found: Sequence[frozenset[Along] | None]) -> Iterator[Along]:
    """Yield where the places are in the result of an equation that is not cut along them."""
    for operand, mine in zip(eq.inputs, found, strict=True):
        for along in mine or ():
            if eq.name == "conv_general_dilated":
                numbers = eq.params["dimension_numbers"]
                yield Along(numbers.out_spec[numbers.lhs_spec.index(along.dim)])
            elif len(shape_of(operand)) == len(value.aval.shape):
                yield along


def _connected(eq: Equation, num_places: int) -> tuple[list[Dims], list[Dims], Atom]:
    """Return the dims of an equation's operands and results, and an atom for places."""
    ins = [dims_of(shape_of(x)) for x in eq.inputs]
    return ins, rule_of(eq).connect(eq, ins), Atom(num_places)


def _with_own_operands(eq: Equation) -> Equation:
    """Return an equation whose operands are all different: one array may be read along two dims."""
    inputs = tuple(Value(x.aval) if isinstance(x, Value) else Constant(x.value) for x in eq.inputs)
    return dataclasses.replace(eq, inputs=inputs)
