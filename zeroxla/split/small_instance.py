"""A small instance of programs over the same leaves, to try on one device what they compute.

Loops have one turn, and every class of dims that can be cut is cut to `SIZE` elements, or a few
more: so many heads, so wide a hidden layer, so many words. The leaves are random.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.program.trace import Value
from zeroxla.split.atoms import Atom, Dims, expand, shares, size_of
from zeroxla.split.part_program import PartProgram
from zeroxla.split.split_axis import SplitAxis

SIZE = 3
"""The size that dims are cut to; if it does not divide a dim, the dim is cut to 2 * SIZE - 1."""

MOST_ELEMENTS = 2**28
"""The most elements of all leaves of a small instance: 1 GiB in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SmallInstance:
    """Runs programs on small random leaves.

    Attributes:
      axis: cuts dims to their small sizes.
      leaves: the random leaves.
    """

    axis: SplitAxis
    leaves: list[np.ndarray]

    @staticmethod
    def of(programs: Sequence[PartProgram], leaves: Sequence[Dims]) -> SmallInstance | None:
        """Make the instance; the leaves' dims serve for nothing else afterwards.

        Args:
          programs: programs over the same leaves.
          leaves: the dims of each leaf.

        Returns:
          None if the leaves would have more than `MOST_ELEMENTS` elements.
        """
        _choose(programs, leaves)
        axis = SplitAxis(parts=1, small=SIZE)
        shapes = [tuple(map(axis.dim_size, dims)) for dims in leaves]
        if sum(map(math.prod, shapes)) > MOST_ELEMENTS:
            return None
        generator = np.random.default_rng(0)
        values = programs[0].flow.program.inputs
        arrays = [_leaf(generator, *x) for x in zip(values, shapes, strict=False)]
        return SmallInstance(axis=axis, leaves=arrays)

    def run(
        self, program: PartProgram, leaves: Sequence[jax.Array], carry: Any, *others: Any
    ) -> tuple[Any, Any]:
        """Run a program on `leaves`, a small carry, and its other arguments whole."""
        return program(self.axis, leaves, carry, *others)

    def zeros(self, program: PartProgram) -> Any:
        """Return a small carry of zeros."""
        shapes = program.carry_shapes(self.axis)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _choose(programs: Sequence[PartProgram], leaves: Sequence[Dims]) -> None:
    """Mark the classes that are cut: of those that nothing needs whole, the ones that most elements
    of leaves lie along. No two of them occur in one array."""
    covered: dict[Atom, float] = {}
    for dims in leaves:
        size = math.prod(size_of(expand(dim)) for dim in dims)
        for atom, share in shares(dims).items():
            covered[atom] = covered.get(atom, 0) + share * size
    arrays = [atoms & covered.keys() for program in programs for atoms in program.flow.atoms()]
    for atom in sorted(covered, key=lambda atom: -covered[atom]):
        meets = any(other.chosen for found in arrays if atom in found for other in found)
        stays = atom.needed_whole or atom.is_loop or atom.size <= 2 * SIZE - 1
        atom.chosen = not (stays or meets)


def _leaf(generator: np.random.Generator, value: Value, shape: tuple[int, ...]) -> np.ndarray:
    """Return a random leaf, scaled so that products of many elements stay near 1."""
    if not value.is_float:
        return generator.integers(0, 2, shape).astype(value.aval.dtype)
    scale = max(shape) ** -0.5 if len(shape) > 1 else 1.0
    drawn = generator.standard_normal(shape, np.float32)
    return (np.float32(scale) * drawn).astype(value.aval.dtype)
