"""What a step does otherwise where its optimizer's state is on disk."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
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
from zeroxla.trace import Program, Value, closure, read, run, trace


class DiskSteps:
    """Makes states whose optimizer state is on disk, and takes steps with them.

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
          *args: its arguments.
        """
        writer = self.writer(shapes)
        on_disk = writer.shapes

        def without_disk(*args: Any) -> TrainState:
            state = program(*args)
            return dataclasses.replace(state, opt_state=_without(state.opt_state, on_disk))

        rest = _without(shardings.opt_state, on_disk)
        shardings = dataclasses.replace(shardings, opt_state=rest)
        try:
            state = self._run(name, self._jit(without_disk, out_shardings=shardings), *args)
            params = args[0] if state.params is None else state.params
            self._write_first(params, shapes, writer)
            return with_disk(state, shapes, writer.finish())
        except BaseException:
            writer.abandon()
            raise

    def writer(self, shapes: TrainState) -> DiskWriter:
        """Return what fills the file of states of these shapes."""
        folder = self._programs.config.offload.path
        assert folder is not None
        return DiskWriter(shapes, folder)

    def train(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Take one optimizer step. See `DiskUpdate`."""
        return self._update(state)(state, batch, self._run)

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """Lower the program that computes the gradients, for shapes."""
        return self._update(state).lower(state, batch)

    def _update(self, state: TrainState) -> DiskUpdate:
        structure = jax.tree.structure(state), tuple(x.shape for x in jax.tree.leaves(state))
        if structure not in self._updates:
            self._updates[structure] = DiskUpdate(self._programs, self._jit, state)
        return self._updates[structure]

    def _write_first(self, params: Any, shapes: TrainState, writer: DiskWriter) -> None:
        """Compute the optimizer's first state and write it, a few arrays at a time."""
        leaves, tree = jax.tree.flatten(params)

        def first(leaves: list[jax.Array]) -> list[jax.Array]:
            state = self._programs.first_opt_state(tree.unflatten(leaves), shapes.placements)
            return jax.tree.leaves(state)

        program, _ = trace(first, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
        limit = self._programs.config.offload.sub_group * self._programs.mesh.size
        for positions in packed(writer.shapes, lambda i: writer.shapes[i].size, limit):
            compute = functools.partial(_results, program, positions)
            shardings = [writer.shapes[i].sharding for i in positions]
            make = self._jit(compute, out_shardings=shardings)
            arrays = self._run(f"optimizer state {positions[0]}", make, leaves)
            for i, array in zip(positions, arrays, strict=True):
                writer.write(i, array)


def _results(
    program: Program, positions: Sequence[int], leaves: Sequence[jax.Array]
) -> list[jax.Array]:
    """Compute some of a program's results."""
    makers = {v: eq for eq in program.equations for v in eq.outputs}
    atoms = [program.outputs[i] for i in positions]
    env = dict(zip(program.inputs, map(to_device, leaves), strict=True))
    run(closure([a for a in atoms if isinstance(a, Value)], makers)[0], env)
    return [jnp.asarray(read(env, atom)) for atom in atoms]


def with_disk(state: TrainState, shapes: TrainState, arrays: Mapping[int, DiskArray]) -> TrainState:
    """Return a state that has None where arrays are on disk with these arrays, by position."""
    tree = jax.tree.structure(shapes.opt_state)
    others = iter(jax.tree.leaves(state.opt_state))
    leaves = [arrays[i] if i in arrays else next(others) for i in range(tree.num_leaves)]
    return dataclasses.replace(state, opt_state=tree.unflatten(leaves))


def with_disk_shapes(shapes: TrainState) -> TrainState:
    """Return the shapes of a state such that what is on disk is a `DiskShape`."""
    leaves, tree = jax.tree.flatten(shapes.opt_state)
    found = [
        DiskShape(x.shape, x.dtype, sharding=x.sharding) if placement.is_on_disk else x
        for x, placement in zip(leaves, shapes.placements[1], strict=True)
    ]
    return dataclasses.replace(shapes, opt_state=tree.unflatten(found))


def has_disk(state: TrainState) -> bool:
    """Whether a state, or its shapes, has something on disk."""
    return any(p.is_on_disk for placements in state.placements for p in placements)


def _without(opt_state: Any, on_disk: Mapping[int, Any]) -> Any:
    leaves, tree = jax.tree.flatten(opt_state)
    return tree.unflatten([None if i in on_disk else x for i, x in enumerate(leaves)])
