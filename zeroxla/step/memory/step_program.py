"""`StepProgram`: a step's traced program, from which its memory and its time are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from zeroxla.mesh.placement import Placement
from zeroxla.offload.disk.desk import with_tickets
from zeroxla.offload.disk.disk_array import DiskArray, DiskShape
from zeroxla.offload.update.streamed_update import sub_group_bytes
from zeroxla.program import compat
from zeroxla.program.live.leaf_flow import LeafFlow
from zeroxla.program.live.splits import Splits, splits_of
from zeroxla.program.trace import Program, trace
from zeroxla.program.walk import local_of
from zeroxla.step.programs import Programs
from zeroxla.step.state import TrainState
from zeroxla.wire.leaves import Layout


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepProgram:
    """A step's program.

    Attributes:
      program: the program. If parameters are on disk, it computes the gradients, which reads them.
      local: the part of it that each device runs.
      splits: over how many devices its values are split.
      sub_group_bytes: the most bytes of sub-groups of an offloaded state that are on the device at
        a time.
    """

    program: Program
    local: Program
    splits: Splits
    sub_group_bytes: int

    @staticmethod
    def of(programs: Programs, state: TrainState, batch: Any) -> StepProgram:
        """Trace a step.

        Args:
          programs: its functions.
          state, batch: its arguments, or their shapes with shardings.
        """
        fun: Callable[..., Any] = programs.train
        traced = state
        leaves, tree = jax.tree.flatten(state.params)
        if any(isinstance(x, DiskShape | DiskArray) for x in leaves):
            tickets = with_tickets(leaves, state.placements[0])
            fun = programs.begin
            traced = dataclasses.replace(state, params=tree.unflatten(tickets))
        with programs.tracing():
            program = trace(fun, traced, batch, opened=compat.forward_jaxpr)[0]
        splits = splits_of(program, jax.tree.leaves((state, batch)))
        return StepProgram(
            program=program,
            local=local_of(program),
            splits=splits,
            sub_group_bytes=sub_group_bytes(program, splits, programs.config.offload.buffers),
        )

    def flow(self, programs: Programs, state: TrainState) -> LeafFlow:
        """Return the leaves that the values of `local` come from and go to.

        Args:
          programs, state: what was traced.
        """
        num, tree = len(jax.tree.leaves(state.params)), jax.tree.structure(state.params)
        of_params = dataclasses.replace(
            jax.tree.map(lambda _: -1, state), params=tree.unflatten(range(num))
        )
        inputs = [frozenset({i} if i >= 0 else ()) for i in jax.tree.leaves(of_params)]
        whole = LeafFlow.of(self.program, "", inputs, ())
        mapped = next(eq for eq in self.program.equations if eq.name == "shard_map")
        shapes = [v.aval.shape for v in mapped.outputs]
        gradients = _gradient_of(shapes, programs.layout(state))
        whole.targets.update(zip(mapped.outputs, gradients, strict=False))
        return whole.inside(mapped, self.local, "")


def _gradient_of(shapes: list[tuple[int, ...]], layout: Layout) -> list[frozenset[int]]:
    """Return the leaf of which each of the first results is the gradient. Those of frozen leaves
    may have been dropped from the trace, because nothing reads them."""
    leaves = list(enumerate(layout))
    for rows in (leaves, [(i, leaf) for i, leaf in leaves if not leaf.frozen]):
        placements: list[Placement] = [leaf.placement for _, leaf in rows]
        if [p.stored_shape for p in placements] == shapes[: len(rows)]:
            return [frozenset({i}) for i, _ in rows]
    return []
