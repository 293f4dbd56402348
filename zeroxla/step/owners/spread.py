"""`placed_values`: follows the placements of stored arrays to the values that are computed from
them, to know along which dim a matrix is split when it travels to its owner."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from zeroxla.mesh.axes import axes_size, leaf_axes
from zeroxla.mesh.placement import Placement, place
from zeroxla.program.primitives import ELEMENTWISE
from zeroxla.program.trace import Equation, Program, Value
from zeroxla.step.owners.matrix_pieces import CutProgram


def placed_values(
    cut: CutProgram, known: Mapping[Value, Placement], mesh: Mesh
) -> dict[Value, Placement]:
    """Return the placements of values that pieces read and make.

    Args:
      cut: the update.
      known: the placements of its inputs.
      mesh: the mesh.

    A value that follows element by element from a split array is split like it, and so is a piece's
    result with the shape of something that the piece reads. XLA does the same outside of pieces.
    Any other value is placed by its own shape; if XLA has split it otherwise, it sends it once
    more.
    """
    found = _started(known, mesh)
    piece_of = {eq: piece for piece in cut.pieces for eq in piece.equations}
    for eq in cut.program.equations:
        if eq not in piece_of:
            found.update((v, p) for v in eq.outputs if (p := _followed(eq, v, found, mesh)))
            continue
        # All that a piece reads has been met before its first equation with a result.
        reads = [found[v] for v in piece_of[eq].reads if v in found]
        for v in eq.outputs:
            like = next((p for p in reads if p.shape == tuple(v.aval.shape)), None)
            if like is not None and v in piece_of[eq].results:
                found[v] = like
    for v in {v for piece in cut.pieces for v in (*piece.reads, *piece.results)}:
        found.setdefault(v, placed_anew(v.aval.shape, mesh))
    return found


def followed_values(
    program: Program, known: Mapping[Value, Placement], mesh: Mesh
) -> dict[Value, Placement]:
    """Return the placements of values that follow element by element from split inputs.

    Args:
      program: any program.
      known: the placements of its inputs.
      mesh: the mesh.
    """
    found = _started(known, mesh)
    for eq in program.equations:
        found.update((v, p) for v in eq.outputs if (p := _followed(eq, v, found, mesh)))
    return found


def _started(known: Mapping[Value, Placement], mesh: Mesh) -> dict[Value, Placement]:
    """Return the placements of inputs that are split, for the arrays as they are stored."""
    split = [(v, p) for v, p in known.items() if p.dim is not None]
    return {v: _with_shape(p, v.aval.shape, mesh) for v, p in split}


def placed_anew(shape: Sequence[int], mesh: Mesh, skip: Sequence[int] = ()) -> Placement:
    """Return a placement of an array over all devices, split along none of the dims `skip`."""
    axes = leaf_axes(mesh)
    return place(shape, axes_size(mesh, axes), skip=skip, axes=axes)


def _with_shape(placement: Placement, shape: Sequence[int], mesh: Mesh) -> Placement:
    """Return a placement along the same dim, for an array of the same rank."""
    pad = -shape[placement.split_dim] % axes_size(mesh, placement.axes)
    return dataclasses.replace(placement, shape=tuple(shape), pad=pad, parts=(), layer_dims=())


def _followed(
    eq: Equation, value: Value, found: Mapping[Value, Placement], mesh: Mesh
) -> Placement | None:
    """Return the placement of an equation's result; None if it does not follow from operands'."""
    shape = tuple(value.aval.shape)
    if eq.name == "transpose" and eq.values[0] in found:
        order = list(eq.params["permutation"])
        before = found[eq.values[0]]
        stage = before.stage_dim
        return dataclasses.replace(
            before,
            shape=shape,
            dim=order.index(before.split_dim),
            stage_dim=None if stage is None else order.index(stage),
        )
    if eq.name in ELEMENTWISE:
        return next((found[v] for v in eq.values if v in found and found[v].shape == shape), None)
    # Padding is cut off where an array enters the update, and appended where it leaves.
    if eq.name in ("slice", "pad") and eq.values[0] in found:
        return _with_shape(found[eq.values[0]], shape, mesh)
    return None
