"""Finds a model's blocks: the loop over stacked leaves in the trace of its loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from zeroxla.frontend import Adapted
from zeroxla.program.scan import Scan
from zeroxla.program.stacked_scan import Stacked, find_stacked
from zeroxla.program.trace import Equation, Operand, Program, Value, closure, trace


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blocks:
    """A loss, taken apart at its loop over blocks.

    Attributes:
      program: the program of the loss.
      result: the tree structure of (loss, metrics, model_state).
      leaves: the inputs of the program that are the model's leaves.
      loop: the `scan` over blocks.
      stacked: the operands of the loop that slice a leaf, by their position.
      producers: for each value that does not depend on the loop, the equation that makes it.
      passed_on: the activations made before the loop that the loop reads beside its carry, or that
        are read after it. They travel from stage to stage with the carry.
    """

    program: Program
    result: Any
    leaves: tuple[Value, ...]
    loop: Scan
    stacked: Mapping[int, Stacked]
    producers: Mapping[Value, Equation]
    passed_on: tuple[Value, ...]

    @property
    def num_blocks(self) -> int:
        """The number of blocks: the turns of the loop."""
        return self.loop.length

    @property
    def other_operands(self) -> list[Value]:
        """The values that the loop reads beside its carry and the stacked leaves."""
        xs = [a for i, a in enumerate(self.loop.xs, self.loop.first_x) if i not in self.stacked]
        return [a for a in (*self.loop.consts, *xs) if isinstance(a, Value)]

    @property
    def after(self) -> list[Equation]:
        """The equations that depend on the loop's results."""
        return _dependents(self.program.equations, self.loop.equation.outputs)

    @property
    def read_after(self) -> list[Value]:
        """The values made before the loop that the equations after it read."""
        made = {v for eq in self.after for v in eq.outputs} | set(self.loop.equation.outputs)
        values = [v for eq in self.after for v in eq.values]
        values += [a for a in self.program.outputs if isinstance(a, Value)]
        return list(dict.fromkeys(v for v in values if v not in made))

    def leaves_of(self, values: Sequence[Operand]) -> set[Value]:
        """Return the leaves that values depend on."""
        found = closure([v for v in values if isinstance(v, Value)], self.producers)[1]
        return set(found) & set(self.leaves)


def find_blocks(adapted: Adapted, tree: Any, batch: Any, key: jax.Array, *, train: bool) -> Blocks:
    """Trace a model's loss and find its blocks: the loop over the largest stacked leaves.

    Args:
      adapted: the model.
      tree: the shapes of its leaves.
      batch, key: the shapes of one device's micro-batch and of its key.
      train: whether the model is told that it is trained.

    Raises:
      ValueError: the model has no loop over stacked leaves, or its loop cannot be cut.
    """
    shapes, structure = jax.tree.flatten(tree)

    def loss(leaves: list[jax.Array], batch: Any, key: jax.Array) -> Any:
        return adapted.loss(structure.unflatten(leaves), {}, batch, key, train=train)

    program, result = trace(loss, shapes, batch, key)
    leaves = program.inputs[: len(shapes)]
    made_by = {v: eq for eq in program.equations for v in eq.outputs}
    candidates = []
    for eq in program.equations:
        if eq.name == "scan":
            scan = Scan(eq)
            stacked = _stacked(scan, made_by, leaves)
            size = sum(s.leaf.aval.size for s in stacked.values())
            candidates.append((size, scan, stacked))
    size, loop, stacked = max(candidates, key=lambda c: c[0], default=(0, None, {}))
    if loop is None or not size:
        raise ValueError(
            "the model has no loop over stacked blocks to cut; build it with scanned blocks "
            "(scan=True), or give its layers as zeroxla.Pipeline([...], loss)"
        )
    _check_loop(loop, program)
    after = _dependents(program.equations, loop.equation.outputs)
    producers = {v: eq for v, eq in made_by.items() if eq not in after and eq is not loop.equation}
    read_later = [v for eq in after for v in eq.values]
    read_later += [a for a in program.outputs if isinstance(a, Value)]
    beside = [a for a in (*loop.consts, *loop.xs) if isinstance(a, Value)]
    activations = _activations(program, leaves)
    passed_on = dict.fromkeys(
        v for v in (*beside, *read_later) if v in activations and v in producers
    )
    return Blocks(
        program=program,
        result=result,
        leaves=leaves,
        loop=loop,
        stacked=stacked,
        producers=producers,
        passed_on=tuple(passed_on),
    )


def _stacked(
    scan: Scan, made_by: Mapping[Value, Equation], leaves: Sequence[Value]
) -> dict[int, Stacked]:
    """Return the operands of a `scan` that slice a leaf, by their position."""
    whole = dict.fromkeys(leaves)
    found = ((i, find_stacked(a, made_by, whole)) for i, a in enumerate(scan.xs, scan.first_x))
    return {i: stacked for i, stacked in found if stacked is not None}


def _check_loop(loop: Scan, program: Program) -> None:
    """Check that a pipeline can run the loop.

    Raises:
      ValueError: something of each block is read later, or the loop runs in reverse.
    """
    read_later = {v for eq in program.equations for v in eq.values} | set(program.outputs)
    if any(v in read_later for v in loop.ys):
        raise ValueError(
            "the loop over blocks returns something of each block (its ys), which later layers "
            "read; carry it through the blocks, or give the layers as zeroxla.Pipeline([...], loss)"
        )
    if loop.reverse:
        raise ValueError("the loop over blocks runs in reverse; a pipeline runs forward")


def _dependents(equations: Sequence[Equation], values: Sequence[Value]) -> list[Equation]:
    """Return the equations that depend on some of the values, in order."""
    reached, found = set(values), []
    for eq in equations:
        if not reached.isdisjoint(eq.values):
            reached.update(eq.outputs)
            found.append(eq)
    return found


def _activations(program: Program, leaves: Sequence[Value]) -> set[Value]:
    """Return the values that depend both on leaves and on the batch or the key."""
    on_leaves, on_data = set(leaves), set(program.inputs) - set(leaves)
    for eq in program.equations:
        for known in (on_leaves, on_data):
            if not known.isdisjoint(eq.values):
                known.update(eq.outputs)
    return on_leaves & on_data
