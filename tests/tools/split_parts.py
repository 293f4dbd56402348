"""Tensor-parallel plans of models, and functions that run in parts."""

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.frontend import adapt
from zeroxla.hybrid.find_calls import CallOptions
from zeroxla.hybrid.model import LanguageModel
from zeroxla.program import compat
from zeroxla.program.trace import trace
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.layout import planned_dims
from zeroxla.split.run_parts import PartsRunner
from zeroxla.split.split_axis import SplitAxis


def model_of(module):
    """Return a module as the hybrid engine sees it."""
    adapted = adapt(module)
    batch = {"tokens": np.zeros((2, 9), np.int32)}
    params, model_state = jax.eval_shape(adapted.init, jax.random.key(0), batch)
    return LanguageModel.with_calls(adapted, params, model_state, CallOptions())


def in_parts(function, shapes, chosen, parts=2, arrays=None):
    """Return (whole results, results collected from parts) of a function of arrays.

    Args:
      chosen: (dim, pieces) to split, or None, for each argument.
      arrays: the arguments; random ones if None.
    """
    if arrays is None:
        generator = np.random.default_rng(0)
        arrays = [generator.normal(size=shape).astype(np.float32) for shape in shapes]
    program, _ = trace(function, *arrays, opened=compat.forward_jaxpr)
    leaves = [planned_dims(s, *(c or (None, ()))) for s, c in zip(shapes, chosen, strict=True)]
    flow = DimsFlow.of(program, leaves)
    for atoms in flow.atoms():
        assert not any(atom.needed_whole for atom in atoms if atom.chosen), "blocked"
    axis = SplitAxis(parts=parts, name="tensor")

    def run(_):
        taken = [axis.take(jnp.asarray(x), d) for x, d in zip(arrays, leaves, strict=True)]
        outs = PartsRunner(flow, axis)(taken)
        return [axis.collect(x, d) for x, d in zip(outs, flow.outputs(), strict=True)]

    found = jax.vmap(run, axis_name="tensor", axis_size=parts)(jnp.arange(parts)[:, None] * 0)
    return program(*arrays), found
