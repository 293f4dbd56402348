"""A step whose state is on disk: gradients in one program, the update in several.

    disk      read 0 | read 1 |       read 2 ...
    devices   gradients       | update 0 | update 1 ...
    disk                                 write 0 | write 1 ...

The gradients' program reads parameters on disk itself, where it gathers them. Then nothing is read
for the update before that program has ended, as its first unit would wait for those reads.

Each sub-group of the update (see `sub_groups`) is read, computed and written; `buffers` of them are
in memory at a time, so that one is read and one written while one is computed. When all are written
they are put in force at once.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zeroxla.mesh.processes.together import together
from zeroxla.offload.disk.block_file import Access
from zeroxla.offload.disk.desk import with_tickets
from zeroxla.offload.disk.disk_array import DiskArray
from zeroxla.offload.disk.flow import DiskFlow
from zeroxla.offload.disk.group_program import group_program
from zeroxla.offload.memory_kinds import place_of, put
from zeroxla.offload.update.sub_groups import SubGroups
from zeroxla.program.shapes import shapes_of
from zeroxla.program.trace import Value, read
from zeroxla.step.programs import Programs
from zeroxla.step.state import TrainState

RunProgram = Callable[..., Any]
"""(name, jitted program, *arguments) -> its results."""


class DiskUpdate:
    """Runs steps of states of one structure.

    Attributes:
      sub_groups: the update, cut into sub-groups.
      group_programs: the jitted program of each sub-group; layers of the same arrays share one.
    """

    def __init__(self, programs: Programs, jit: Callable[..., Any], state: TrainState) -> None:
        """Trace the update, and cut it.

        Args:
          programs: the step's programs.
          jit: `jax.jit` with the step's compiler options.
          state: a state, or its shapes; only shapes and placements matter.
        """
        placements = [p for placed in state.placements for p in placed]
        mesh, offload = programs.mesh, programs.config.offload
        params, opt_state = shapes_of((state.params, state.opt_state))
        self._tree = jax.tree.structure(params)
        scalars = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((), np.float32)
        args = (params, opt_state, params, *scalars)  # gradients as params
        num_others = len(jax.tree.leaves(args)) - len(placements)
        self._programs, self._buffers = programs, offload.buffers
        self._places = [p.sharding(mesh) for p in placements]
        self._in_params = state.placements[0]
        self.sub_groups = sub_groups = SubGroups.of(
            programs.update_of(state),
            args,
            [p.memory is not None for p in placements] + [False] * num_others,
            limit=offload.sub_group * mesh.size,
            layer_dims=[p.unsplit_layers for p in placements],
        )
        self._run_whole = programs.owned_update_of(state).run_of(sub_groups)
        inputs = sub_groups.program.inputs
        self._in_state, self._from_gradients = inputs[: len(placements)], inputs[len(placements) :]
        # The group that reads a value last may write over it.
        self._last = {v: n for n, group in enumerate(sub_groups.groups) for v in group.reads}
        # The gradients' program leaves these for the groups; the state holds the rest.
        self._kept = tuple(v for v in self._last if v not in set(self._in_state))
        self._gradients = jit(self._gradients_program, donate_argnums=0)
        # On CPUs an array lies in the memory that it was read into. XLA would copy it before
        # writing over it, so it is not donated.
        donated = (1, 3) if mesh.devices.flat[0].platform == "cpu" else (0, 1, 3)
        # Layers of the same arrays share a program.
        made: dict[Any, Any] = {}
        self.group_programs = []
        for group in sub_groups.groups:
            key = group.results, group.rows and group.rows.count
            if key not in made:
                program = group_program(sub_groups, group, self._places, self._run_whole)
                made[key] = jit(program, donate_argnums=donated)
            self.group_programs.append(made[key])

    def __call__(
        self, state: TrainState, batch: Any, run_program: RunProgram
    ) -> tuple[TrainState, dict[str, Any]]:
        """Take one optimizer step.

        Raises:
          DamagedStateError: the file is gone, or does not hold what was written.
          OSError: the disk fails. In both cases nothing of the step is put in force.
        """
        leaves = [*jax.tree.leaves(state.params), *jax.tree.leaves(state.opt_state)]
        held: dict[Value, Any] = dict(zip(self._in_state, leaves, strict=True))
        on_disk = {i: x for i, x in enumerate(leaves) if isinstance(x, DiskArray)}
        file = next(iter(on_disk.values())).file
        begun = time.perf_counter()
        together("state on disk", file.check)
        arriving = [
            (
                {k: held[v] for k, v in enumerate(group.arrays) if isinstance(held[v], DiskArray)},
                group.rows,
            )
            for group in self.sub_groups.groups
        ]
        rest, params, others = _without_arrays(state)
        del leaves
        at_once = not any(isinstance(x, DiskArray) for x in params)
        with DiskFlow(file, arriving, buffers=self._buffers, at_once=at_once) as flow:
            kept, found, rest, metrics = self._programs.desk.call(
                "gradients",
                params,
                self._in_params,
                functools.partial(run_program, "gradients", self._gradients, rest, others, batch),
            )
            del params, others
            jax.block_until_ready(kept)
            held.update(zip(self._kept, kept, strict=True))
            del kept
            results: dict[int, Any] = dict(zip(self.sub_groups.shared, found, strict=True))
            failure = self._update(flow, held, on_disk, results, run_program)

            def commit() -> None:
                if failure is not None:
                    raise failure
                flow.commit()

            together("state on disk", commit)
        results |= {i: held[v] for i, v in self.sub_groups.untouched.items()}
        for i, array in on_disk.items():
            results[i] = dataclasses.replace(array, version=file.version)
        metrics |= self._learning_rate(results) | _disk_rates(
            file.blocks.accesses, time.perf_counter() - begun
        )
        return self._state(rest, results), metrics

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """Lower the program that computes the gradients, for shapes."""
        rest, params, others = _without_arrays(state)
        return self._gradients.lower(rest, others, batch, with_tickets(params, self._in_params))

    def _update(
        self,
        flow: DiskFlow,
        held: dict[Value, Any],
        on_disk: Mapping[int, DiskArray],
        results: dict[int, Any],
        run_program: RunProgram,
    ) -> Exception | None:
        """Compute the sub-groups. Write arrays on disk, and add the others to `results`.

        Returns:
          The error, if there was one: the other processes do not know of it yet.
        """
        try:
            for n, group in enumerate(self.sub_groups.groups):
                arrays, rows = flow.next(), group.rows
                whole, start = {}, np.int32(0)
                if rows is None:
                    there = enumerate(group.arrays)
                    arrays |= {k: held.pop(v) for k, v in there if k not in arrays}
                else:
                    there = (i for i in group.results if i not in on_disk)
                    whole, start = (
                        {i: held.pop(self._in_state[i]) for i in there},
                        np.int32(rows.start),
                    )
                mine, others = self._reads(n, held, whole)
                found, whole, _ = run_program(
                    f"update {n}", self.group_programs[n], arrays, mine, others, whole, start
                )
                flow.write([(on_disk[i], x) for i, x in found.items() if i in on_disk], rows)
                results |= {i: x for i, x in found.items() if i not in on_disk}
                if group.is_last:
                    results |= whole
                else:
                    held |= {self._in_state[i]: x for i, x in whole.items()}
                del arrays, mine, found, whole
        except Exception as error:
            return error
        return None

    def _gradients_program(
        self,
        rest: TrainState,
        others: Sequence[jax.Array | None],
        batch: Any,
        params: Sequence[jax.Array],
    ) -> tuple[list[jax.Array], list[jax.Array], TrainState, dict[str, Any]]:
        """Compute the gradients, and the part of the update that belongs to no sub-group.

        Returns:
          The values that the groups read besides the state; the results that are in no group; the
          next state without parameters and optimizer state; and the metrics.
        """
        program = self.sub_groups.program
        state = dataclasses.replace(rest, params=self._tree.unflatten(params))
        grads, rest, metrics = self._programs.begin(state, batch)
        # No equation here reads an array on disk: the equations that do belong to sub-groups.
        env: dict[Value, Any] = dict(zip(self._in_state, (*params, *others), strict=True))
        found = [*jax.tree.leaves(grads), metrics["finite"], metrics["loss"]]
        env |= zip(self._from_gradients, found, strict=True)
        with jax.named_scope("update"):
            self._run_whole(self.sub_groups.common, env)
        placed = self._placed({i: read(env, program.outputs[i]) for i in self.sub_groups.shared})
        return [env[v] for v in self._kept], placed, rest, metrics

    def _placed(self, results: Mapping[int, jax.Array]) -> list[jax.Array]:
        """Return results of the update, with the state's arrays in the memory of the state."""
        num = len(self._places)
        return [put(x, self._places[i]) if i < num else x for i, x in results.items()]

    def _reads(
        self, n: int, held: dict[Value, Any], whole: Mapping[int, Any]
    ) -> tuple[dict[int, jax.Array], dict[int, jax.Array]]:
        """Return the values that group n reads, by position, without those in `whole`.

        The first dict holds values that nothing reads later, so that the group may write over them.
        The second holds the rest.
        """
        given = {self._in_state[i] for i in whole}
        stays = set(self.sub_groups.untouched.values())
        mine, others = {}, {}
        for k, v in enumerate(self.sub_groups.groups[n].reads):
            if v in given:
                continue
            if self._last[v] == n and v not in stays:
                mine[k] = held.pop(v)
            else:
                others[k] = held[v]
        return mine, others

    def _state(self, rest: TrainState, results: Mapping[int, Any]) -> TrainState:
        leaves = [results[i] for i in range(len(results))]
        params, opt_state, _ = self.sub_groups.tree.unflatten(leaves)
        return dataclasses.replace(rest, params=params, opt_state=opt_state)

    def _learning_rate(self, results: Mapping[int, Any]) -> dict[str, jax.Array]:
        return self._programs.rate_of([results[i] for i in range(len(self._places), len(results))])


def _without_arrays(state: TrainState) -> tuple[TrainState, list[Any], list[Any]]:
    """Return a state without parameters and optimizer state, the leaves of its parameters, and the
    leaves of its optimizer state, with None for those on disk."""
    rest = dataclasses.replace(state, params=None, opt_state=None)
    others = [None if place_of(x) == "disk" else x for x in jax.tree.leaves(state.opt_state)]
    return rest, jax.tree.leaves(state.params), others


def _disk_rates(accesses: Sequence[Access], seconds: float) -> dict[str, float]:
    """Return the metrics of reading and writing, in bytes per second."""
    return {
        f"disk_{kind}_bytes_per_s": sum(x.nbytes for x in accesses if x.kind == kind) / seconds
        for kind in ("read", "write")
    }
