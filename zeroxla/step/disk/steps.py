"""`DiskSteps`: makes states that are on disk, and runs programs on them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from zeroxla.offload.disk.disk_array import DiskShape, in_memory
from zeroxla.offload.disk.step_file import StepFile
from zeroxla.offload.memory_kinds import put, to_device
from zeroxla.program.chunks import packed
from zeroxla.program.shapes import shapes_of
from zeroxla.program.trace import Equation, Operand, Value, closure, read, run, trace
from zeroxla.step.disk.update import DiskUpdate, RunProgram
from zeroxla.step.disk.writer import DiskWriter
from zeroxla.step.programs import Programs
from zeroxla.step.state import TrainState


class DiskSteps:
    """Makes states that are on disk, and runs programs on them.

    Args:
      programs: the step's programs.
      jit: `jax.jit` with the step's compiler options.
      run_program: calls a jitted program: (name, program, *arguments) -> its results.
    """

    def __init__(
        self, programs: Programs, jit: Callable[..., Any], run_program: RunProgram
    ) -> None:
        self._programs, self._jit, self._run = programs, jit, run_program
        self._updates: dict[Any, DiskUpdate] = {}
        path = programs.config.offload.path
        self._file = None if path is None else StepFile(path)

    def make(
        self,
        name: str,
        program: Callable[..., TrainState],
        shapes: TrainState,
        shardings: TrainState,
        *args: Any,
    ) -> TrainState:
        """Make a state without ever holding all of its arrays on disk in memory.

        Args:
          name: the program's name.
          program: a function of arrays that returns the state. If it returns the state without
            parameters, these are its first argument.
          shapes: the shapes of the state, with shardings.
          shardings: the shardings of the program's result.
          *args: the program's arguments; the last one is the batch. A parameter that goes to disk
            may be a function that returns the array. Each function is called when the array before
            it is being written.
        """
        writer = self.writer(shapes)
        stored, tree = jax.tree.flatten(shapes.params)
        on_disk = [i for i in writer.shapes if i < len(stored)]
        is_given = shardings.params is None
        given: dict[int, Any] = dict(enumerate(jax.tree.leaves(args[0]))) if is_given else {}
        to_write: list[Any] = [given.pop(i) for i in on_disk if is_given]

        def kept(state: TrainState) -> tuple[dict[int, Any], TrainState]:
            """Return the parameters in memory, by position, and the state without parameters and
            optimizer state. With parameters on disk, the wire state is also made later."""
            params = enumerate(jax.tree.leaves(state.params))
            wires = None if on_disk else state.wire_state
            rest = dataclasses.replace(state, params=None, opt_state=None, wire_state=wires)
            return {i: x for i, x in params if i not in writer.shapes}, rest

        def compute(given: dict[int, jax.Array], *args: Any) -> tuple[dict[int, Any], TrainState]:
            if is_given:  # zeros for leaves on disk: no result depends on them
                here = (given.get(i, jnp.zeros(x.shape, x.dtype)) for i, x in enumerate(stored))
                args = tree.unflatten(here), *args
            return kept(program(*args))

        try:
            make = self._jit(compute, out_shardings=kept(shardings))
            found, rest = self._run(name, make, given, *args[is_given:])
            found |= given
            if is_given:
                for i, x in zip(on_disk, to_write, strict=True):
                    array: Any = x() if callable(x) else x
                    writer.write(i, array)
            else:
                self._write_params(on_disk, shapes, writer, *args)
            if on_disk:
                found |= writer.finish()
            found |= self._first_opt_state([found[i] for i in range(len(stored))], shapes, writer)
            found |= writer.finish()
        except BaseException:
            writer.abandon()
            raise
        tree = jax.tree.structure((shapes.params, shapes.opt_state))
        params, opt_state = tree.unflatten([found[i] for i in range(tree.num_leaves)])
        state = dataclasses.replace(rest, params=params, opt_state=opt_state)
        if on_disk and shapes.wire_state is not None:
            start = functools.partial(self._programs.wire_state, batch=args[-1])
            wires = self.call("wire state", self._jit(start), state)
            state = dataclasses.replace(state, wire_state=wires)
        return state

    def writer(self, shapes: TrainState) -> DiskWriter:
        """Return the writer of the file for states with these shapes."""
        assert self._file is not None
        return DiskWriter(shapes, self._file)

    def train(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Take one optimizer step. See `DiskUpdate`."""
        return self.update_of(state)(state, batch, self._run)

    def call(self, name: str, program: Any, state: TrainState, *args: Any) -> Any:
        """Run a jitted program of a state, in any memory, without its optimizer state.

        It raises the errors of `Desk.call`.
        """
        leaves, tree = jax.tree.flatten(state.params)

        def run(leaves: list[Any]) -> Any:
            light = dataclasses.replace(state, params=tree.unflatten(leaves), opt_state=None)
            return self._run(name, program, light, *args)

        return self._programs.desk.call(name, leaves, state.placements[0], run)

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """Lower the program that computes the gradients, for shapes."""
        return self.update_of(state).lower(state, batch)

    def update_of(self, state: TrainState) -> DiskUpdate:
        """Return the programs for states of this structure. The first call makes them."""
        structure = jax.tree.structure(state), tuple(x.shape for x in jax.tree.leaves(state))
        if structure not in self._updates:
            self._updates[structure] = DiskUpdate(self._programs, self._jit, state)
        return self._updates[structure]

    def _write_params(
        self, positions: Sequence[int], shapes: TrainState, writer: DiskWriter, *args: Any
    ) -> None:
        """Compute the first parameters and write them, a few at a time."""
        for group in self._groups(positions, writer.shapes):
            compute = functools.partial(
                self._programs.first_params, placements=shapes.placements, only=group
            )
            places = [writer.shapes[i].sharding for i in group]
            make = self._jit(compute, out_shardings=places)
            found = self._run(f"parameters {group[0]}", make, *args)
            for i, x in zip(group, found, strict=True):
                writer.write(i, x)

    def _first_opt_state(
        self, params: list[Any], shapes: TrainState, writer: DiskWriter
    ) -> dict[int, jax.Array]:
        """Compute the optimizer's first state, a few arrays at a time.

        Each is computed from the parameters that it needs, so only these are read. Arrays that go
        to disk are written; the others are returned, by position.
        """
        tree, num = jax.tree.structure(shapes.params), len(params)

        def first(leaves: list[jax.Array]) -> list[jax.Array]:
            state = self._programs.first_opt_state(tree.unflatten(leaves), shapes.placements)
            return jax.tree.leaves(state)

        program, _ = trace(first, shapes_of(params))
        makers = {v: eq for eq in program.equations for v in eq.outputs}
        held = dict(zip(program.inputs, params, strict=True))
        stored = dict(enumerate(jax.tree.leaves(shapes.opt_state), num))
        found: dict[int, jax.Array] = {}
        for group in self._groups(stored, stored):
            operands = [program.outputs[i - num] for i in group]
            equations, roots = closure([a for a in operands if isinstance(a, Value)], makers)
            places = [stored[i].sharding for i in group]
            compute = functools.partial(_results, operands, equations, roots, places)
            make = self._jit(compute, out_shardings=places)
            arrays = [in_memory(held[v]) for v in roots]
            results = self._run(f"optimizer state {group[0]}", make, arrays)
            for i, x in zip(group, results, strict=True):
                if i in writer.shapes:
                    writer.write(i, x)
                else:
                    found[i] = x
        return found

    def _groups(self, positions: Iterable[int], shapes: Mapping[int, Any]) -> list[list[int]]:
        """Group positions of arrays so that a device computes at most a sub-group at a time."""
        limit = self._programs.config.offload.sub_group * self._programs.mesh.size
        return packed(positions, lambda i: shapes[i].size, limit)


def _results(
    operands: Sequence[Operand],
    equations: Sequence[Equation],
    inputs: Sequence[Value],
    places: Sequence[NamedSharding],
    arrays: Sequence[jax.Array],
) -> list[jax.Array]:
    """Compute some of a program's results.

    Args:
      operands: the results, as the program names them.
      equations: the equations that they need.
      inputs: the program's inputs that they need.
      places: the sharding and memory of each result.
      arrays: the values of `inputs`.
    """
    env: dict[Value, Any] = dict(zip(inputs, map(to_device, arrays), strict=True))
    run(equations, env)
    found = [jnp.asarray(read(env, operand)) for operand in operands]
    return [put(x, place) for x, place in zip(found, places, strict=True)]


def with_disk_shapes(shapes: TrainState) -> TrainState:
    """Return the shapes of a state, with a `DiskShape` for each array on disk."""
    leaves, tree = jax.tree.flatten((shapes.params, shapes.opt_state))
    placements = (p for placed in shapes.placements for p in placed)
    found = [
        DiskShape(x.shape, x.dtype, sharding=x.sharding) if placement.is_on_disk else x
        for x, placement in zip(leaves, placements, strict=True)
    ]
    params, opt_state = tree.unflatten(found)
    return dataclasses.replace(shapes, params=params, opt_state=opt_state)


def has_disk(state: TrainState) -> bool:
    """Return whether a state, or its shapes, has an array on disk."""
    return any(p.is_on_disk for placements in state.placements for p in placements)
