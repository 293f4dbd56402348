"""The copy of a state's leaves in the tensor-parallel layout, made when it is needed."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax

from zeroxla.hybrid.generate_programs import GeneratePrograms
from zeroxla.hybrid.reshard import StoredModel
from zeroxla.offload.disk.disk_array import DiskArray
from zeroxla.program.compat import mesh_context
from zeroxla.step.state import TrainState, check_is_state


class TensorCopy:
    """Makes and frees the tensor-parallel copy of a state's leaves.

    Attributes:
      stored: how the state stores the leaves.
      release: whether the copy is freed after each use.
    """

    def __init__(self, programs: GeneratePrograms, stored: StoredModel, *, release: bool) -> None:
        self.stored, self.release = stored, release
        self._mesh = programs.mesh
        self._reshard = jax.jit(partial(programs.reshard, stored=stored))
        # The leaves that the copy was made from, and the copy. Weak references keep no leaf alive.
        self._kept: tuple[list[weakref.ref[Any]], list[jax.Array]] | None = None

    def check(self, state: TrainState) -> None:
        """Check that a state is stored as the engine's step stores it.

        Raises:
          ValueError: it is no state, or one of another step.
        """
        check_is_state(state)
        if state.placements[0] != self.stored.order.placements:
            raise ValueError(
                "the state is stored otherwise than the engine's step stores it; make the engine "
                "from the step that this state belongs to"
            )

    @contextlib.contextmanager
    def of(self, state: TrainState) -> Iterator[tuple[list[jax.Array], float]]:
        """Give the copy of a state's leaves, and the seconds that it took to make.

        A copy that is still there is used again, in 0 seconds. When the context ends the copy is
        freed if `release` is set.
        """
        try:
            yield self._parts(state)
        finally:
            if self.release:
                self.free()

    def _parts(self, state: TrainState) -> tuple[list[jax.Array], float]:
        leaves = jax.tree.leaves(state.params)
        if self._kept is not None and all(r() is x for r, x in zip(self._kept[0], leaves)):
            return self._kept[1], 0.0
        self.free()
        start = time.perf_counter()
        here = [x.read().result() if isinstance(x, DiskArray) else x for x in leaves]
        here = self.stored.order.apply(here)
        with mesh_context(self._mesh):
            parts = jax.block_until_ready(self._reshard(here))
        self._kept = ([weakref.ref(x) for x in leaves], parts)
        return parts, time.perf_counter() - start

    def free(self) -> None:
        """Free the copy, if there is one."""
        if self._kept is not None:
            for x in self._kept[1]:
                x.delete()
        self._kept = None
