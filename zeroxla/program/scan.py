"""`scan` equations: which operands are constants, carries and slices, and which results are what.

Only this file and `compat` know how a `scan` equation lays out its operands and parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax import lax

from zeroxla.program import compat
from zeroxla.program.trace import Equation, Opened, Operand, Program, Value, flatten

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class Scan:
    """A `scan` equation.

    Its operands are the constants, which every turn reads whole, then the first carry, then the
    `xs`, which the turns slice. Its results are the last carry, then the stacked `ys`. The body's
    inputs and outputs have the same order; `split_inputs` and `split_outputs` cut any sequence that
    has it.

    Attributes:
      equation: the equation.
    """

    equation: Equation

    @property
    def num_consts(self) -> int:
        """The number of constants; the carry begins at this operand."""
        return compat.scan_counts(self.equation.params)[0]

    @property
    def num_carry(self) -> int:
        """The number of carried arrays."""
        return compat.scan_counts(self.equation.params)[1]

    @property
    def first_x(self) -> int:
        """The position of the first of the `xs` among the operands."""
        return sum(compat.scan_counts(self.equation.params))

    @property
    def length(self) -> int:
        """The number of turns."""
        return self.equation.params["length"]

    @property
    def reverse(self) -> bool:
        """Whether the first turn reads the last slice."""
        return self.equation.params["reverse"]

    @property
    def jaxpr(self) -> Any:
        """The body as a jaxpr."""
        return self.equation.params["jaxpr"]

    @property
    def consts(self) -> Sequence[Operand]:
        """The operands that every turn reads whole."""
        return self.split_inputs(self.equation.inputs)[0]

    @property
    def carry(self) -> Sequence[Operand]:
        """The operands that the first turn is given as its carry."""
        return self.split_inputs(self.equation.inputs)[1]

    @property
    def xs(self) -> Sequence[Operand]:
        """The operands that the turns slice."""
        return self.split_inputs(self.equation.inputs)[2]

    @property
    def ys(self) -> Sequence[Value]:
        """The results that the turns stack."""
        return self.split_outputs(self.equation.outputs)[1]

    def split_inputs(self, values: Sequence[_T]) -> tuple[Sequence[_T], Sequence[_T], Sequence[_T]]:
        """Cut a sequence in the operands' order into (constants, carry, xs)."""
        num_consts, first_x = self.num_consts, self.first_x
        return values[:num_consts], values[num_consts:first_x], values[first_x:]

    def split_outputs(self, values: Sequence[_T]) -> tuple[Sequence[_T], Sequence[_T]]:
        """Cut a sequence in the results' order into (carry, ys)."""
        return values[: self.num_carry], values[self.num_carry :]

    def body(self, opened: Opened = compat.inlined_jaxpr) -> Program:
        """Return the program of one turn, with new values at each call; see `trace` for `opened`.

        Its inputs are the constants, the carry and one slice of each of the `xs`.
        """
        return flatten(self.jaxpr, opened)

    def run(
        self,
        turn: Callable[[Any, Any], tuple[Any, Any]],
        carry: Any,
        xs: Any,
        *,
        length: int | None = None,
        back: bool = False,
    ) -> tuple[Any, Any]:
        """Run another body in this one's place: `lax.scan`, unrolled alike and in the same order.

        Args:
          turn: (carry, slices of `xs`) -> (carry, results to stack).
          carry: a pytree; the first carry.
          xs: a pytree; its arrays are sliced along dim 0.
          length: the number of turns; this scan's own if None.
          back: whether to take the turns in the opposite order, as backward does.
        """
        return lax.scan(
            turn,
            carry,
            xs,
            length=self.length if length is None else length,
            reverse=self.reverse != back,
            unroll=self.equation.params["unroll"],
        )
