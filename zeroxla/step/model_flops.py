"""`model_flops`: the FLOPs that a model's own products take in one training step."""

from __future__ import annotations

import math
from typing import Any

import jax

from zeroxla.mesh.axes import world_size
from zeroxla.mesh.placement import Placement
from zeroxla.program import compat
from zeroxla.program.flops import all_product_flops
from zeroxla.program.trace import trace
from zeroxla.step.loss_plan import leaf_shapes
from zeroxla.step.model_on_mesh import ModelOnMesh


def model_flops(
    model: ModelOnMesh,
    params: Any,
    placements: tuple[Placement, ...],
    model_state: Any,
    batch: Any,
    key: Any,
) -> float:
    """Return the FLOPs of all devices together in a step, as MFU counts them.

    The products and convolutions of the loss count once for the forward pass, once for the
    gradients of their inputs, and once for those of the parameters, as far as these are trained:
    with 1 % of all parameters trained, by 1 %. What is computed twice to save memory counts once.
    Elementwise work does not count, and of experts only those that a token meets do.

    Args:
      model: the model on its mesh.
      params: the shapes of the stored parameters.
      placements: how they are stored.
      model_state, batch, key: the shapes of the loss's other arguments; of the batch all rows.
    """
    layout = model.layout_of(params, placements)
    leaves = leaf_shapes(layout, model.wiring.collectives.compute_dtype)
    whole = jax.tree.structure(params).unflatten(leaves)
    num_rows = jax.tree.leaves(batch)[0].shape[0]
    some = max(1, num_rows // world_size(model.mesh))
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((some, *x.shape[1:]), x.dtype), batch)

    def forward(model_state: Any, rows: Any, key: jax.Array) -> float:
        loss = model.losses[True]
        program, _ = trace(loss, whole, model_state, rows, key, opened=compat.forward_jaxpr)
        return sum(map(all_product_flops, program.equations))

    flops = model.in_mesh(forward, model_state, rows, key) * num_rows / some
    sizes = [(math.prod(leaf.placement.shape), leaf.frozen) for leaf in layout]
    trained = sum(size for size, frozen in sizes if not frozen)
    return flops * (2 + trained / sum(size for size, _ in sizes))
