"""A model's loss as a line that can be cut at any place.

The loss is traced to a program, whose repeated blocks are rolled into loops. The equations that
make activations are the line, in their order. A loop over stacked leaves is as long as it has turns
and can be cut between two of them; any other equation is one place long. Arrays that follow from
the model alone or from the batch alone (casts of leaves, masks, rotary tables, keys of dropout)
have no place: every stage that reads them computes them again.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from zeroxla.frontend import Adapted
from zeroxla.pipeline.model_shapes import ModelShapes
from zeroxla.program.origins import activation_equations
from zeroxla.program.roll import block_of, roll, stacked_values
from zeroxla.program.scan import Scan
from zeroxla.program.stacked_scan import Stacked, find_stacked
from zeroxla.program.trace import Equation, Operand, Program, Value, bytes_of, trace


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BlockLoop:
    """A loop over blocks.

    Attributes:
      scan: the loop.
      stacked: the operands that slice leaves or state, by their position among all operands: from
        one stacked array, or from one array for each block.
    """

    scan: Scan
    stacked: Mapping[int, Stacked | tuple[Value, ...]]

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The last carry, and the stacked results."""
        return self.scan.equation.outputs

    def block(self, turn: int) -> int:
        """Return the number of the block that a turn runs: the place of its slices."""
        return self.scan.length - 1 - turn if self.scan.reverse else turn


Part = Equation | BlockLoop


@dataclasses.dataclass(frozen=True, slots=True)
class Passed:
    """An array that passes from one stage to the next.

    Attributes:
      value: the value. For a loop that has not ended yet it is one of the loop's results.
      turns: the turns that the loop has made: the array is the carry after so many of them, or the
        part of the stacked results that they have made. None for a value that is complete.
    """

    value: Value
    turns: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class NewState:
    """The new value of a leaf of the model state.

    Attributes:
      operand: the value, or the results of all blocks, of which the leaf is one; the leaf itself if
        it stays as it is.
      block: the block whose result the leaf is; None if it is all of `operand`.
    """

    operand: Operand
    block: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LossLine:
    """A loss as a line of places.

    Attributes:
      program: the program of the loss.
      result: the tree structure of (loss, metrics, model_state).
      leaves: the inputs of the program that are the model's leaves.
      state: the inputs of the program that are the model's state.
      parts: the equations and the loops over blocks, in order.
      makers: the equations that make the values that have no place.
      new_state: the new value of each leaf of the state.
    """

    program: Program
    result: Any
    leaves: tuple[Value, ...]
    state: tuple[Value, ...]
    parts: tuple[Part, ...]
    makers: Mapping[Value, Equation]
    new_state: tuple[NewState, ...]

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """The place at which each part begins, and at the end the length of the line."""
        starts = [0]
        for part in self.parts:
            starts.append(starts[-1] + length_of(part))
        return tuple(starts)

    @property
    def length(self) -> int:
        """The number of places."""
        return self.starts[-1]

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """The loss and its metrics."""
        return self.program.outputs[: len(self.program.outputs) - len(self.state)]

    @functools.cached_property
    def made(self) -> dict[Value, int]:
        """For each activation, the place after which it is complete."""
        ends = zip(self.parts, self.starts[1:])
        return {v: end for part, end in ends for v in part.outputs}

    @functools.cached_property
    def needed(self) -> dict[Value, int]:
        """For each activation that is read, the last place that reads it. Outputs are read at the
        end."""
        last: dict[Value, int] = {}
        for part, start in zip(self.parts, self.starts):
            last.update((v, place) for v, place in _reads(part, start) if v in self.made)
        last.update((a, self.length) for a in self.outputs if a in self.made)
        return last

    def passed(self, place: int) -> tuple[Passed, ...]:
        """Return the arrays that cross a place."""
        whole = [
            Passed(v)
            for v, last in self.needed.items()
            if self.made[v] <= place <= last and place < self.length
        ]
        inside = [
            Passed(v, place - start)
            for part, start, end in zip(self.parts, self.starts, self.starts[1:])
            if isinstance(part, BlockLoop) and start < place < end
            for v in self._of_turns(part)
        ]
        return (*whole, *inside)

    def _of_turns(self, loop: BlockLoop) -> list[Value]:
        """Return the results of a loop that pass from turn to turn: the carry, and what is read
        later of each block."""
        carry, ys = loop.scan.split_outputs(loop.outputs)
        return [*carry, *(y for y in ys if y in self.needed)]

    @functools.cached_property
    def bytes_across(self) -> tuple[int, ...]:
        """The bytes that cross each place, from 0 to the length of the line.

        A part of a loop's stacked results counts as if it were complete.
        """
        change = collections.Counter[int]()
        for v, last in self.needed.items():
            change[self.made[v]] += bytes_of(v)
            change[last + 1] -= bytes_of(v)
        for part, start, end in zip(self.parts, self.starts, self.starts[1:]):
            if isinstance(part, BlockLoop) and end - start > 1:
                inside = sum(map(bytes_of, self._of_turns(part)))
                change[start + 1] += inside
                change[end] -= inside
        total, across = 0, []
        for place in range(self.length + 1):
            total += change[place]
            across.append(total)
        return tuple(across)


def make_line(adapted: Adapted, shapes: ModelShapes, *, train: bool) -> LossLine:
    """Trace a model's loss, and lay its equations out in a line.

    Args:
      adapted: the model.
      shapes: the shapes for which it is traced.
      train: whether the model is told that it is trained.
    """
    params, structure = jax.tree.flatten(shapes.params)

    def loss(leaves: list[jax.Array], model_state: Any, batch: Any, key: jax.Array) -> Any:
        params = structure.unflatten(leaves)
        if shapes.losses is not None:
            return shapes.losses[train](params, model_state, batch, key)
        return adapted.loss(params, model_state, batch, key, train=train)

    program, result = trace(loss, params, shapes.model_state, shapes.batch, shapes.key)
    num_leaves, num_state = len(params), len(jax.tree.leaves(shapes.model_state))
    of_state = [("state",)] * num_state
    program = roll(program, dict(zip(program.inputs, (*shapes.kinds, *of_state))))
    leaves = program.inputs[:num_leaves]
    state = program.inputs[num_leaves : num_leaves + num_state]
    activations = activation_equations(program, (*leaves, *state))
    placed = set(activations)
    made_by = {v: eq for eq in program.equations for v in eq.outputs}
    new_state, taken = _new_state(program, state, made_by)
    return LossLine(
        program=program,
        result=result,
        leaves=leaves,
        state=state,
        parts=tuple(_part(eq, made_by, (*leaves, *state)) for eq in activations if eq not in taken),
        makers={v: eq for v, eq in made_by.items() if eq not in placed},
        new_state=new_state,
    )


def _new_state(
    program: Program, state: Sequence[Value], made_by: Mapping[Value, Equation]
) -> tuple[tuple[NewState, ...], set[Equation]]:
    """Return the new values of the state, and the equations that only take them from loops."""
    outputs = program.outputs[len(program.outputs) - len(state) :]
    readers = collections.Counter(v for eq in program.equations for v in eq.values)
    readers.update(a for a in program.outputs if isinstance(a, Value))
    found, taken = [], set()
    for operand in outputs:
        block = block_of(operand, made_by)
        if block is None or not isinstance(operand, Value):
            found.append(NewState(operand))
            continue
        found.append(NewState(*block))
        squeeze = made_by[operand]
        cut = made_by[squeeze.values[0]]
        if readers[operand] == 1:
            taken.add(squeeze)
            taken.update([cut] if readers[cut.outputs[0]] == 1 else ())
    return tuple(found), taken


def _part(eq: Equation, made_by: Mapping[Value, Equation], model: Sequence[Value]) -> Part:
    """Return an equation as a part: as a loop over blocks if it slices leaves or state."""
    if eq.name != "scan":
        return eq
    scan, whole = Scan(eq), dict.fromkeys(model)
    stacked: dict[int, Stacked | tuple[Value, ...]] = {}
    for i, operand in enumerate(scan.xs, scan.first_x):
        found = find_stacked(operand, made_by, whole)
        found = stacked_values(operand, made_by) if found is None else found
        if isinstance(found, Stacked) or (found is not None and whole.keys() >= set(found)):
            stacked[i] = found
    return BlockLoop(scan, stacked) if stacked else eq


def _reads(part: Part, start: int) -> list[tuple[Value, int]]:
    """Return the values that a part reads, and the last place at which it does."""
    if isinstance(part, Equation):
        return [(v, start) for v in part.values]
    scan = part.scan
    by_all = [(a, start + scan.length - 1) for a in (*scan.consts, *scan.xs)]
    first = [(a, start) for a in scan.carry]
    return [(a, place) for a, place in (*first, *by_all) if isinstance(a, Value)]


def length_of(part: Part) -> int:
    """Return the number of places of a part."""
    return part.scan.length if isinstance(part, BlockLoop) else 1
