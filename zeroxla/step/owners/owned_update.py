"""`OwnedUpdate`: an optimizer's update, its matrices computed by their owners."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from zeroxla.mesh.placement import Placement
from zeroxla.offload.update.sub_groups import RunEquations, SubGroups
from zeroxla.program import compat
from zeroxla.program.shapes import shapes_of, structure_of
from zeroxla.program.trace import Equation, Program, Value, read, run, trace
from zeroxla.step.owners.owners_plan import OwnersPlan
from zeroxla.step.owners.spread import followed_values

TracedUpdate = tuple[Program, Any, OwnersPlan | None]
"""(program, tree of its results, plan)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnedUpdate:
    """Calls an update of arrays in stored form, with owners for its matrices if it has some.

    Attributes:
      update: (parameters, optimizer state, gradients, *scalars) -> results.
      placements: the placements of parameters and optimizer state.
      mesh: the mesh.
      is_on: whether there are owners; if not, XLA is left to send matrices to all devices.
      known: the plans so far by shapes, so that an update is traced and cut once.
    """

    update: Callable[..., Any]
    placements: tuple[tuple[Placement, ...], tuple[Placement, ...]]
    mesh: Mesh
    is_on: bool = True
    known: dict[Any, TracedUpdate] = dataclasses.field(default_factory=dict)

    def __call__(self, *args: Any) -> Any:
        """Return what `update` returns."""
        if not self.is_on:
            return self.update(*args)
        program, tree, plan = self.plan(*args)
        if plan is None:
            return self.update(*args)
        env: dict[Any, Any] = dict(zip(program.inputs, jax.tree.leaves(args), strict=True))
        plan.run(env)
        return tree.unflatten([read(env, x) for x in program.outputs])

    def plan(self, *args: Any) -> TracedUpdate:
        """Trace the update for arrays or their shapes.

        Returns:
          The program, the tree of its results, and the plan; None if nothing has an owner.
        """
        dtypes = tuple(x.dtype for x in jax.tree.leaves(args))
        key = self.placements, structure_of(args), dtypes
        if key not in self.known:
            self.known[key] = self._plan(*args)
        return self.known[key]

    def _plan(self, *args: Any) -> TracedUpdate:
        leaves, tree = jax.tree.flatten(args)
        shapes = tree.unflatten(shapes_of(leaves))
        program, results = trace(self.update, *shapes, opened=compat.forward_jaxpr)
        return program, results, OwnersPlan.of(program, self._known(program), self.mesh)

    def run_of(self, sub_groups: SubGroups) -> RunEquations:
        """Return the function that computes a sub-group of the update, or what comes before all of
        them: the matrices in each have owners among themselves. See `stream`."""
        if not self.is_on:
            return run
        program = sub_groups.program
        known = followed_values(program, self._known(program), self.mesh)
        needed = {v for v in program.outputs if isinstance(v, Value)}
        needed.update(v for group in sub_groups.groups for v in (*group.reads, *group.scalars))
        num_readers = Counter(v for eq in program.equations for v in set(eq.values))

        def run_owned(equations: Sequence[Equation], env: dict[Value, Any]) -> None:
            here = Counter(v for eq in equations for v in set(eq.values))
            made = dict.fromkeys(v for eq in equations for v in eq.outputs)
            part = Program(
                inputs=tuple(v for v in here if v not in made),
                equations=tuple(equations),
                outputs=tuple(v for v in made if v in needed or num_readers[v] > here[v]),
            )
            plan = OwnersPlan.of(part, known, self.mesh)
            if plan is None:
                run(equations, env)
            else:
                plan.run(env)

        return run_owned

    def _known(self, program: Program) -> dict[Value, Placement]:
        """Return the placements of the program's inputs."""
        in_params, in_opt = self.placements
        return dict(zip(program.inputs, (*in_params, *in_opt, *in_params), strict=False))
