"""The copy of a state's leaves in the tensor-parallel layout, made when it is needed."""

from __future__ import annotations

import contextlib
import dataclasses
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


@dataclasses.dataclass(eq=False, slots=True)
class _Copy:
    """A copy of a state's leaves.

    Attributes:
      leaves: the leaves that it was made from. Weak references keep no leaf alive.
      parts: the copy itself.
      users: the number of those that compute with it.
      is_kept: whether it stays when nobody does.
    """

    leaves: list[weakref.ref[Any]]
    parts: list[jax.Array]
    users: int = 0
    is_kept: bool = True

    def is_of(self, leaves: list[Any]) -> bool:
        """Return whether it is there, and the copy of these leaves."""
        return bool(self.parts) and all(r() is x for r, x in zip(self.leaves, leaves))

    def free_if_unused(self) -> None:
        """Free the copy, unless it is kept or in use."""
        if not self.users and not self.is_kept:
            for x in self.parts:
                x.delete()
            self.parts = []


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
        self._newest: _Copy | None = None

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
    def of(self, params: Any) -> Iterator[tuple[list[jax.Array], float]]:
        """Give the copy of a state's parameters, and the seconds that it took to make.

        A copy that is still there is used again, in 0 seconds. When the context ends the copy is
        freed if `release` is set, or if one of other parameters has been made since; but not as
        long as another context uses it.
        """
        copy, seconds = self._copy_of(jax.tree.leaves(params))
        del params  # which a training step may take meanwhile
        copy.users += 1
        try:
            yield copy.parts, seconds
        finally:
            copy.users -= 1
            copy.is_kept = copy.is_kept and not self.release
            copy.free_if_unused()

    def _copy_of(self, leaves: list[Any]) -> tuple[_Copy, float]:
        found = self._newest
        if found is not None and found.is_of(leaves):
            return found, 0.0
        self.free()
        start = time.perf_counter()
        here = [x.read().result() if isinstance(x, DiskArray) else x for x in leaves]
        here = self.stored.order.apply(here)
        with mesh_context(self._mesh):
            parts = jax.block_until_ready(self._reshard(here))
        self._newest = _Copy([weakref.ref(x) for x in leaves], parts)
        return self._newest, time.perf_counter() - start

    def free(self) -> None:
        """Free the copy, if there is one, as soon as nobody uses it."""
        if self._newest is not None:
            self._newest.is_kept = False
            self._newest.free_if_unused()
        self._newest = None
