"""Checks a tensor-parallel plan by computing: a small instance, whole and in parts, on one device.

The instance is the program itself with every split dim cut to one element for each part - so many
heads, so wide a hidden layer, so many words; where it does not divide, to two for each but the last
- and one turn of each loop over layers. Its leaves are
random; the parts run under `vmap`, whose axis stands for `tensor`. What a split must not change is
compared: what the program returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.program.trace import Value
from zeroxla.split.atoms import Dims, splits
from zeroxla.split.part_program import PartProgram
from zeroxla.split.run_parts import Sharing, part_size, take_part
from zeroxla.split.tensor_plan import classes

TENSOR = "tensor"

TOLERANCE = 1e-4
"""Of the largest result: sums of parts are rounded in another order."""


def prove(program: PartProgram, leaves: Sequence[Dims], parts: int) -> set[str]:
    """Return the classes, as `classes` calls them, whose splits change what the program returns."""
    chosen = {name: a for name, a in classes(leaves).items() if a.chosen}
    if _holds(program, parts):
        return set()
    wrong: set[str] = set()
    for name, atom in chosen.items():
        for other in chosen.values():
            other.chosen = other is atom
        if not _holds(program, parts):
            wrong.add(name)
    return wrong or set(chosen)


def _holds(program: PartProgram, parts: int) -> bool:
    whole = Sharing(parts=1, small=parts)
    shared = Sharing(parts=parts, small=parts, axis=TENSOR)
    generator = np.random.default_rng(0)
    values = program.flow.program.inputs
    dims = [program.flow.dims[v] for v in values]
    num_shared = program.num_leaves + program.cache[1]

    def random(value: Value, shape: Sequence[int]) -> np.ndarray:
        if value.is_float:
            return np.asarray(generator.normal(size=shape), value.aval.dtype)
        return generator.integers(0, 2, shape).astype(value.aval.dtype)  # Tokens that are there.

    # Leaves and caches are small; everything else is cut to size where it meets them.
    shapes = [tuple(map(whole.part, d)) for d in dims[:num_shared]]
    arrays = [random(*x) for x in zip(values, shapes, strict=False)]
    others = [random(v, v.aval.shape) for v in values[num_shared:]]

    def in_parts(x: jax.Array, dims: Dims) -> jax.Array:
        for d, dim in enumerate(dims):
            if (factors := splits(dim)) is not None:
                outer, _, inner = factors
                size = x.shape[d] // (outer * inner)
                mine, cut = part_size(size, parts), (outer, size, inner)
                return jnp.stack([take_part(x, d, cut, mine, parts, i) for i in range(parts)])
        return jnp.broadcast_to(x, (parts, *x.shape))

    def run(sharing: Sharing, arrays: Sequence[jax.Array]) -> Any:
        leaves, cache = arrays[: program.num_leaves], arrays[program.num_leaves :]
        return program(sharing, leaves, list(cache), *others)[0]

    expected = jax.jit(partial(run, whole))(arrays)
    split = [in_parts(jnp.asarray(x), d) for x, d in zip(arrays, dims, strict=False)]
    found = jax.jit(jax.vmap(partial(run, shared), axis_name=TENSOR))(split)
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)
    return all(_close(np.asarray(a), np.asarray(b)) for a, b in pairs)


def _close(whole: np.ndarray, parts: np.ndarray) -> bool:
    """Whether each part's results are the whole's: the finite elements close, the infinite ones,
    with which models rule tokens out, the same."""
    whole, parts = whole.astype(np.float64), parts.astype(np.float64)
    finite = np.isfinite(whole)
    if not finite.any() or np.any(parts[:, ~finite] != whole[~finite]):
        return False
    tolerance = TOLERANCE * max(np.abs(whole[finite]).max(), 1e-30)
    return bool(np.all(np.abs(parts[:, finite] - whole[finite]) <= tolerance))
