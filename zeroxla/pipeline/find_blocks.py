"""The blocks of a model: the loop over stacked leaves in the trace of its loss, and what is around
it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from zeroxla.frontend import Adapted
from zeroxla.program import compat
from zeroxla.program.stacked_scan import Stacked, find_stacked
from zeroxla.program.trace import Atom, Equation, Program, Value, closure, trace


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blocks:
    """A loss, taken apart at its loop over blocks.

    Attributes:
      program: the loss.
      result: tree structure of (loss, metrics, model_state).
      leaves: the values of the model's leaves.
      loop: the scan.
      stacked: which of its `xs` are leaves.
      known: the equation that makes each value before the loop, or beside it.
      travels: the activations made before the loop that are read after it, or in it besides the
        carry.
    """

    program: Program
    result: Any
    leaves: tuple[Value, ...]
    loop: Equation
    stacked: Mapping[int, Stacked]
    known: Mapping[Value, Equation]
    travels: tuple[Value, ...]

    @property
    def num_blocks(self) -> int:
        return self.loop.params["length"]

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of constants and carries of the loop."""
        return compat.scan_counts(self.loop.params)

    @property
    def carry(self) -> tuple[Atom, ...]:
        """What the loop begins with."""
        num_consts, num_carry = self.counts
        return self.loop.inputs[num_consts : num_consts + num_carry]

    @property
    def beside(self) -> list[Value]:
        """What the loop reads besides its carry and the stacked leaves."""
        num_consts, num_carry = self.counts
        return [
            a
            for i, a in enumerate(self.loop.inputs)
            if isinstance(a, Value)
            and i not in self.stacked
            and not num_consts <= i < num_consts + num_carry
        ]

    @property
    def after(self) -> list[Equation]:
        """The equations that follow the loop."""
        return _dependents(self.program.equations, self.loop.outputs)

    @property
    def read_last(self) -> list[Value]:
        """What these read that was made before the loop."""
        made = {v for eq in self.after for v in eq.outputs} | set(self.loop.outputs)
        values = [v for eq in self.after for v in eq.values]
        values += [a for a in self.program.outputs if isinstance(a, Value)]
        return list(dict.fromkeys(v for v in values if v not in made))

    def roots(self, values: Sequence[Atom]) -> set[Value]:
        """Return the leaves that values depend on."""
        found = closure([v for v in values if isinstance(v, Value)], self.known)[1]
        return set(found) & set(self.leaves)


def take_apart(adapted: Adapted, tree: Any, batch: Any, key: jax.Array, *, train: bool) -> Blocks:
    """Find the blocks of a model.

    Args:
      adapted: the model.
      tree: shapes of its leaves.
      batch, key: of a micro-batch.
      train: whether it is trained.

    Raises:
      ValueError: it has no loop over stacked leaves, or one that cannot be cut.
    """
    shapes, structure = jax.tree.flatten(tree)

    def loss(leaves: list[jax.Array], batch: Any, key: jax.Array) -> Any:
        return adapted.loss(structure.unflatten(leaves), {}, batch, key, train=train)

    program, result = trace(loss, shapes, batch, key)
    leaves = program.inputs[: len(shapes)]
    producers = {v: eq for eq in program.equations for v in eq.outputs}
    candidates = []
    for eq in program.equations:
        if eq.name == "scan":
            stacked = _stacked(eq, producers, leaves)
            size = sum(s.leaf.aval.size for s in stacked.values())
            candidates.append((size, eq, stacked))
    size, loop, stacked = max(candidates, key=lambda c: c[0], default=(0, None, {}))
    if loop is None or not size:
        raise ValueError(
            "the model has no loop over stacked blocks to cut; build it with scanned blocks "
            "(scan=True), or give its layers as zeroxla.Pipeline([...], loss)"
        )
    _check_loop(loop, program)
    after = _dependents(program.equations, loop.outputs)
    known = {v: eq for v, eq in producers.items() if eq not in after and eq is not loop}
    read_later = [v for eq in after for v in eq.values]
    read_later += [a for a in program.outputs if isinstance(a, Value)]
    num_consts, num_carry = compat.scan_counts(loop.params)
    beside = [
        a
        for i, a in enumerate(loop.inputs)
        if isinstance(a, Value) and i not in range(num_consts, num_consts + num_carry)
    ]
    activations = _activations(program, leaves)
    travels = dict.fromkeys(v for v in (*beside, *read_later) if v in activations and v in known)
    return Blocks(
        program=program,
        result=result,
        leaves=leaves,
        loop=loop,
        stacked=stacked,
        known=known,
        travels=tuple(travels),
    )


def _stacked(
    eq: Equation, producers: Mapping[Value, Equation], leaves: Sequence[Value]
) -> dict[int, Stacked]:
    num_consts, num_carry = compat.scan_counts(eq.params)
    start = num_consts + num_carry
    whole = dict.fromkeys(leaves)
    found = ((i, find_stacked(a, producers, whole)) for i, a in enumerate(eq.inputs[start:], start))
    return {i: stacked for i, stacked in found if stacked is not None}


def _check_loop(loop: Equation, program: Program) -> None:
    num_carry = compat.scan_counts(loop.params)[1]
    read_later = {v for eq in program.equations for v in eq.values} | set(program.outputs)
    if any(v in read_later for v in loop.outputs[num_carry:]):
        raise ValueError(
            "the loop over blocks returns something of each block (its ys), which later layers "
            "read; carry it through the blocks, or give the layers as zeroxla.Pipeline([...], loss)"
        )
    if loop.params.get("reverse"):
        raise ValueError("the loop over blocks runs in reverse; a pipeline runs forward")


def _dependents(equations: Sequence[Equation], values: Sequence[Value]) -> list[Equation]:
    """Return the equations that depend on values, in order."""
    reached, found = set(values), []
    for eq in equations:
        if not reached.isdisjoint(eq.values):
            reached.update(eq.outputs)
            found.append(eq)
    return found


def _activations(program: Program, leaves: Sequence[Value]) -> set[Value]:
    """Return the values that depend on leaves and on the batch or the key."""
    on_leaves, on_data = set(leaves), set(program.inputs) - set(leaves)
    for eq in program.equations:
        for known in (on_leaves, on_data):
            if not known.isdisjoint(eq.values):
                known.update(eq.outputs)
    return on_leaves & on_data
