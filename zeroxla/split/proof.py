"""Checks a tensor-parallel plan by computing: a small instance, whole and in parts, on one device.

The instance is the program itself with one turn of each loop, and with every split dim cut to one
element for each part: so many heads, so wide a hidden layer, so many words. Where the number of
parts does not divide a dim, each part but the last has two elements. The leaves are random. The
parts run under `vmap`, whose axis stands for the mesh axis. The proof compares the program's
results, which must not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.program.trace import Value
from zeroxla.split.atoms import Dims
from zeroxla.split.part_program import PartProgram
from zeroxla.split.split_axis import SplitAxis
from zeroxla.split.tensor_plan import leaf_classes

_AXIS = "tensor"

TOLERANCE = 1e-4
"""Largest error, relative to the largest result: sums over parts are rounded in another order."""


def prove(program: PartProgram, leaves: Sequence[Dims], parts: int) -> set[str]:
    """Return the classes whose split changes a program's results.

    If only several splits together change it, all chosen classes are returned. The names are those
    that `leaf_classes` gives.

    Args:
      program: the program, with the classes chosen that a plan splits.
      leaves: the dims of its leaves.
      parts: the number of parts.
    """
    chosen = {name: a for name, a in leaf_classes(leaves).items() if a.chosen}
    if _same_results(program, parts):
        return set()
    wrong: set[str] = set()
    for name, atom in chosen.items():
        for other in chosen.values():
            other.chosen = other is atom
        if not _same_results(program, parts):
            wrong.add(name)
    return wrong or set(chosen)


def _same_results(program: PartProgram, parts: int) -> bool:
    """Whether a small instance of the program returns the same, whole and in parts."""
    whole = SplitAxis(parts=1, small=parts)
    split = SplitAxis(parts=parts, small=parts, name=_AXIS)
    generator = np.random.default_rng(0)
    values = program.flow.program.inputs
    dims = [program.flow.dims[v] for v in values]
    num_split = program.num_leaves + program.carry[1]

    def random(value: Value, shape: Sequence[int]) -> np.ndarray:
        if value.is_float:
            return np.asarray(generator.normal(size=shape), value.aval.dtype)
        return generator.integers(0, 2, shape).astype(value.aval.dtype)  # Indices of any table.

    # Leaves and carry are made small. The other arguments are cut to size where they meet them.
    shapes = [tuple(map(whole.dim_size, d)) for d in dims[:num_split]]
    arrays = [random(*x) for x in zip(values, shapes, strict=False)]
    others = [random(v, v.aval.shape) for v in values[num_split:]]

    def run(axis: SplitAxis, arrays: Sequence[jax.Array]) -> Any:
        taken = [axis.take(x, d, of=whole) for x, d in zip(arrays, dims, strict=False)]
        taken, alike = jax.tree.map(partial(_own, axis), (taken, others))
        leaves, carry = taken[: program.num_leaves], taken[program.num_leaves :]
        return program(axis, leaves, carry, *alike)[0]

    expected = jax.jit(partial(run, whole))(arrays)
    in_parts = jax.vmap(partial(run, split), in_axes=None, axis_name=_AXIS, axis_size=parts)
    found = jax.jit(in_parts)(arrays)
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)
    return all(_close(np.asarray(a), np.asarray(b)) for a, b in pairs)


def _own(axis: SplitAxis, x: Any) -> Any:
    """Return an array that counts as a device's own: JAX's vmap lacks some rules for what all
    devices share."""
    if axis.name is None:
        return x
    return jnp.where(axis.index >= 0, x, jnp.zeros_like(x))


def _close(whole: np.ndarray, parts: np.ndarray) -> bool:
    """Whether every part returned the whole result.

    Finite elements must be close. Infinite ones, which models use as masks, must be the same.
    """
    whole, parts = whole.astype(np.float64), parts.astype(np.float64)
    finite = np.isfinite(whole)
    if not finite.any() or np.any(parts[:, ~finite] != whole[~finite]):
        return False
    tolerance = TOLERANCE * max(np.abs(whole[finite]).max(), 1e-30)
    return bool(np.all(np.abs(parts[:, finite] - whole[finite]) <= tolerance))
