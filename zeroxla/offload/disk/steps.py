"""What a step does otherwise where its state is on disk."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.offload.disk.array import DiskArray, DiskShape
from zeroxla.offload.disk.update import DiskUpdate, RunProgram
from zeroxla.offload.disk.writer import DiskWriter
from zeroxla.offload.kinds import to_device
from zeroxla.packing import packed
from zeroxla.programs import Programs
from zeroxla.state import TrainState
from zeroxla.trace import Atom, Equation, Value, closure, read, run, trace


class DiskSteps:
    """Makes states that are on disk, and runs programs of them.

    Args:
      programs: of the step.
      jit: `jax.jit` with the step's options.
      run_program: (name, jitted program, *arguments) -> its results.
    """

    def __init__(
        self, programs: Programs, jit: Callable[..., Any], run_program: RunProgram
    ) -> None:
        self._programs, self._jit, self._run = programs, jit, run_program
        self._updates: dict[Any, DiskUpdate] = {}

    def make(
        self,
        name: str,
        program: Callable[..., TrainState],
        shapes: TrainState,
        shardings: TrainState,
        *args: Any,
    ) -> TrainState:
        """Make a state, without ever holding all of what goes to disk.

        Args:
          name: of the program.
          program: a function of arrays that returns the state; perhaps without its parameters,
            which then are the first argument.
          shapes: of the state, with shardings.
          shardings: of what the program returns.
          *args: its arguments; the last one is the batch.
        """
        writer = self.writer(shapes)
        num = jax.tree.structure(shapes.params).num_leaves
        has_params = any(i < num for i in writer.shapes)

        def in_memory(state: TrainState) -> tuple[dict[int, Any], TrainState]:
            """Return what is not on disk, by position, and the rest."""
            given = 0 if state.params is not None else num
            leaves = enumerate(jax.tree.leaves((state.params, state.opt_state)), given)
            rest = dataclasses.replace(state, params=None, opt_state=None)
            if has_params:  # what wires remember of parameters follows when these are there
                rest = dataclasses.replace(rest, wire_state=None)
            return {i: x for i, x in leaves if i not in writer.shapes}, rest

        try:
            make = self._jit(
                lambda *args: in_memory(program(*args)), out_shardings=in_memory(shardings)
            )
            found, rest = self._run(name, make, *args)
            if shardings.params is None:
                for i, x in enumerate(jax.tree.leaves(args[0])):
                    if i in writer.shapes:
                        writer.write(i, x)
                    else:
                        found[i] = x
            else:
                self._write_params([i for i in writer.shapes if i < num], shapes, writer, *args)
            if has_params:
                found |= writer.finish()
            self._write_opt_state([found[i] for i in range(num)], shapes, writer)
            found |= writer.finish()
        except BaseException:
            writer.abandon()
            raise
        tree = jax.tree.structure((shapes.params, shapes.opt_state))
        params, opt_state = tree.unflatten([found[i] for i in range(tree.num_leaves)])
        state = dataclasses.replace(rest, params=params, opt_state=opt_state)
        if has_params and shapes.wire_state is not None:
            start = functools.partial(self._programs.wire_state, batch=args[-1])
            wires = self.call("wire state", self._jit(start), state)
            state = dataclasses.replace(state, wire_state=wires)
        return state

    def writer(self, shapes: TrainState) -> DiskWriter:
        """Return what fills the file of states of these shapes."""
        folder = self._programs.config.offload.path
        assert folder is not None
        return DiskWriter(shapes, folder)

    def train(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Take one optimizer step. See `DiskUpdate`."""
        return self._update(state)(state, batch, self._run)

    def call(self, name: str, program: Any, state: TrainState, *args: Any) -> Any:
        """Run a jitted program of a state, in any memory, without that of its optimizer. Raises
        what `Desk.call` raises."""
        leaves, tree = jax.tree.flatten(state.params)

        def run(leaves: list[Any]) -> Any:
            light = dataclasses.replace(state, params=tree.unflatten(leaves), opt_state=None)
            return self._run(name, program, light, *args)

        return self._programs.desk.call(name, leaves, state.placements[0], run)

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """Lower the program that computes the gradients, for shapes."""
        return self._update(state).lower(state, batch)

    def _update(self, state: TrainState) -> DiskUpdate:
        structure = jax.tree.structure(state), tuple(x.shape for x in jax.tree.leaves(state))
        if structure not in self._updates:
            self._updates[structure] = DiskUpdate(self._programs, self._jit, state)
        return self._updates[structure]

    def _write_params(
        self, positions: Sequence[int], shapes: TrainState, writer: DiskWriter, *args: Any
    ) -> None:
        """Compute the first parameters and write them, a few at a time."""
        for group in self._groups(positions, writer):
            compute = functools.partial(
                self._programs.first_params, placements=shapes.placements, only=group
            )
            self._write(f"parameters {group[0]}", compute, group, writer, *args)

    def _write_opt_state(self, params: list[Any], shapes: TrainState, writer: DiskWriter) -> None:
        """Compute the optimizer's first state and write it, a few arrays at a time."""
        tree = jax.tree.structure(shapes.params)

        def first(leaves: list[jax.Array]) -> list[jax.Array]:
            state = self._programs.first_opt_state(tree.unflatten(leaves), shapes.placements)
            return jax.tree.leaves(state)

        program, _ = trace(first, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in params])
        makers = {v: eq for eq in program.equations for v in eq.outputs}
        num = len(params)
        for group in self._groups([i for i in writer.shapes if i >= num], writer):
            atoms = [program.outputs[i - num] for i in group]
            equations, roots = closure([a for a in atoms if isinstance(a, Value)], makers)
            compute = functools.partial(_results, atoms, equations, roots)
            held = dict(zip(program.inputs, params, strict=True))
            arrays = [_in_memory(held[v]) for v in roots]
            self._write(f"optimizer state {group[0]}", compute, group, writer, arrays)

    def _write(
        self,
        name: str,
        compute: Callable[..., list[jax.Array]],
        group: Sequence[int],
        writer: DiskWriter,
        *args: Any,
    ) -> None:
        """Compute arrays and write them."""
        make = self._jit(compute, out_shardings=[writer.shapes[i].sharding for i in group])
        for i, array in zip(group, self._run(name, make, *args), strict=True):
            writer.write(i, array)

    def _groups(self, positions: Sequence[int], writer: DiskWriter) -> list[list[int]]:
        limit = self._programs.config.offload.sub_group * self._programs.mesh.size
        return packed(positions, lambda i: writer.shapes[i].size, limit)


def _results(
    atoms: Sequence[Atom],
    equations: Sequence[Equation],
    inputs: Sequence[Value],
    arrays: Sequence[jax.Array],
) -> list[jax.Array]:
    """Compute some of a program's results from those of its inputs that they need."""
    env: dict[Value, Any] = dict(zip(inputs, map(to_device, arrays), strict=True))
    run(equations, env)
    return [jnp.asarray(read(env, atom)) for atom in atoms]


def _in_memory(x: jax.Array | DiskArray) -> jax.Array:
    return x.read().result() if isinstance(x, DiskArray) else x


def with_disk_shapes(shapes: TrainState) -> TrainState:
    """Return the shapes of a state such that what is on disk is a `DiskShape`."""
    leaves, tree = jax.tree.flatten((shapes.params, shapes.opt_state))
    placements = (p for placed in shapes.placements for p in placed)
    found = [
        DiskShape(x.shape, x.dtype, sharding=x.sharding) if placement.is_on_disk else x
        for x, placement in zip(leaves, placements, strict=True)
    ]
    params, opt_state = tree.unflatten(found)
    return dataclasses.replace(shapes, params=params, opt_state=opt_state)


def has_disk(state: TrainState) -> bool:
    """Whether a state, or its shapes, has something on disk."""
    return any(p.is_on_disk for placements in state.placements for p in placements)
