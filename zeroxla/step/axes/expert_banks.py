"""Whether a model has banks of experts, which the axis `expert` splits."""

from __future__ import annotations

from typing import Any

import jax

from zeroxla.program import compat
from zeroxla.program.trace import trace
from zeroxla.split.atoms import dims_of
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.experts import experts_of
from zeroxla.step.setup import Setup


def has_expert_banks(setup: Setup, batch: Any) -> bool:
    """Return whether a model's loss does products with leaves one by one along some dim of them.

    Args:
      setup: a model on a mesh.
      batch: the shapes of a global batch.

    Cost: one trace of the loss.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    rows = jax.eval_shape(setup.first_rows, batch)
    params, model_state = jax.eval_shape(setup.adapted.init, key, rows)

    def found(*shapes: Any) -> bool:
        program, _ = trace(setup.losses[True], *shapes)
        leaves = program.inputs[: len(jax.tree.leaves(params))]
        flow = DimsFlow.of(program, [dims_of(v.aval.shape) for v in leaves], compat.inlined_jaxpr)
        return bool(experts_of(flow))

    return setup.in_mesh(found, params, model_state, rows, key)
