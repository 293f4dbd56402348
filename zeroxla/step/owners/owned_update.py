"""`OwnedUpdate`: an optimizer's update, its matrices computed by their owners."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from zeroxla.mesh.placement import Placement
from zeroxla.program import compat
from zeroxla.program.shapes import shapes_of
from zeroxla.program.trace import Program, read, trace
from zeroxla.step.owners.owners_plan import OwnersPlan


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnedUpdate:
    """Calls an update of arrays in stored form, with owners for its matrices if it has some.

    Attributes:
      update: (parameters, optimizer state, gradients, *scalars) -> results.
      placements: the placements of parameters and optimizer state.
      mesh: the mesh.
    """

    update: Callable[..., Any]
    placements: tuple[tuple[Placement, ...], tuple[Placement, ...]]
    mesh: Mesh

    def __call__(self, *args: Any) -> Any:
        """Return what `update` returns."""
        program, tree, plan = self.plan(*args)
        if plan is None:
            return self.update(*args)
        env: dict[Any, Any] = dict(zip(program.inputs, jax.tree.leaves(args), strict=True))
        plan.run(env)
        return tree.unflatten([read(env, x) for x in program.outputs])

    def plan(self, *args: Any) -> tuple[Program, Any, OwnersPlan | None]:
        """Trace the update for arrays or their shapes.

        Returns:
          The program, the tree of its results, and the plan; None if nothing has an owner.
        """
        leaves, tree = jax.tree.flatten(args)
        shapes = tree.unflatten(shapes_of(leaves))
        program, results = trace(self.update, *shapes, opened=compat.forward_jaxpr)
        in_params, in_opt = self.placements
        known = dict(zip(program.inputs, (*in_params, *in_opt, *in_params), strict=False))
        return program, results, OwnersPlan.of(program, known, self.mesh)
