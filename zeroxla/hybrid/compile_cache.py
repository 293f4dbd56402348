"""The compiled programs of an engine, by shape, and the copy of a state's leaves they run on."""

from __future__ import annotations

import contextlib
import hashlib
import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from zeroxla.frontend.base import Tree
from zeroxla.hybrid.decode import DecodeShape
from zeroxla.hybrid.generate_programs import Generation
from zeroxla.hybrid.reshard import ROWS, StoredModel, part_spec
from zeroxla.hybrid.sampling import Sampling
from zeroxla.mesh.batches import put_key
from zeroxla.mesh.processes.exchange import agree
from zeroxla.offload.disk.disk_array import DiskArray
from zeroxla.program.compat import mesh_context
from zeroxla.step.state import TrainState


class Compiled:
    """Programs of a `Generation`, each compiled at its first call."""

    def __init__(self, generation: Generation) -> None:
        self.generation, self.mesh = generation, generation.mesh
        self._known: dict[Any, Any] = {}
        self._together = jax.jit(generation.whole_rows)

    def generate(
        self,
        shape: DecodeShape,
        leaves: list[jax.Array],
        model_state: Tree,
        batch: dict[str, np.ndarray],
        key: jax.Array,
        options: dict[str, Any],
    ) -> dict[str, np.ndarray]:
        """Run `Generation.generate` on prompts that all processes have alike.

        Raises:
          ValueError: they do not.
        """
        _check_alike(batch, jax.random.key_data(key), options)
        args = (leaves, model_state, self._put(batch), put_key(key, self.mesh), options)
        with mesh_context(self.mesh):
            return self._fetch(self._generate(shape)(*args))

    def rows(
        self, name: str, leaves: list[jax.Array], model_state: Tree, tokens_BL: np.ndarray
    ) -> np.ndarray:
        """Run a function of whole rows, which all processes have alike: logprobs, logits or
        values.

        Raises:
          ValueError: they do not.
        """
        _check_alike(tokens_BL)
        program = self._rows(name, tokens_BL.shape)
        with mesh_context(self.mesh):
            return self._fetch(program(leaves, model_state, self._put(tokens_BL)))

    def trace_generate(self, shape: DecodeShape, sampling: Sampling) -> jax.stages.Traced:
        """Trace what `generate` runs."""
        number = jax.ShapeDtypeStruct((), jnp.int32)
        options = dict.fromkeys(("new", "eos", "pad"), number)
        rows = shape.rows * self.generation.copies
        batch = {"prompt": self._tokens(rows, shape.prompt), "length": self._tokens(rows)}
        key = jax.eval_shape(jax.random.key, 0)
        options = {**options, "numbers": sampling.numbers}
        model_state = self.generation.model.model_state
        with mesh_context(self.mesh):
            return self._generate(shape).trace(self._parts(), model_state, batch, key, options)

    def lower_rows(self, name: str, shape: tuple[int, int]) -> jax.stages.Lowered:
        """Lower what `rows` runs."""
        model_state = self.generation.model.model_state
        with mesh_context(self.mesh):
            return self._rows(name, shape).lower(self._parts(), model_state, self._tokens(*shape))

    def _put(self, tree: Any) -> Any:
        """Return host arrays, the same ones in each process, split over their rows."""
        sharding = NamedSharding(self.mesh, ROWS)

        def one(x: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(one, tree)

    def _fetch(self, tree: Any) -> Any:
        """Return rows as host arrays, in every process."""
        if jax.process_count() > 1:
            tree = self._together(tree)
        return jax.tree.map(np.asarray, tree)

    def _generate(self, shape: DecodeShape) -> Any:
        return self._program(shape, partial(self.generation.generate, shape=shape))

    def _rows(self, name: str, shape: tuple[int, int]) -> Any:
        return self._program((name, shape), getattr(self.generation, name))

    def _program(self, known_by: Any, function: Any) -> Any:
        if known_by not in self._known:
            self._known[known_by] = jax.jit(function)
        return self._known[known_by]

    def _parts(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the copy."""
        leaves, plan = jax.tree.leaves(self.generation.model.params), self.generation.plan
        found = []
        for x, row in zip(leaves, plan.rows, strict=True):
            shape = list(row.part_shape(plan.parts))
            if row.dim is not None:
                shape[row.dim] *= plan.parts
            sharding = NamedSharding(self.mesh, part_spec(row))
            found.append(jax.ShapeDtypeStruct(tuple(shape), x.dtype, sharding=sharding))
        return found

    def _tokens(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(self.mesh, ROWS))


def _check_alike(*arrays: Any) -> None:
    """Check that all processes pass the same arrays: each computes some of the rows.

    Raises:
      ValueError: they do not.
    """
    if jax.process_count() == 1:
        return
    digest = hashlib.blake2b(digest_size=8)
    for x in map(np.asarray, jax.tree.leaves(arrays)):
        digest.update(f"{x.dtype}{x.shape}".encode() + x.tobytes())
    remedy = "pass the same prompts or tokens, key and options in every process"
    agree("rows to generate or score", {"arguments": digest.hexdigest()}, remedy)


class Copy:
    """The tensor-parallel copy of a state's leaves, made when it is needed.

    Attributes:
      stored: how the state has them.
      release: whether it is freed after each use.
    """

    def __init__(self, generation: Generation, stored: StoredModel, *, release: bool) -> None:
        self.stored, self.release = stored, release
        self._mesh = generation.mesh
        self._reshard = jax.jit(partial(generation.reshard, stored=stored))
        # Which leaves the parts are of, without keeping those alive.
        self._kept: tuple[list[weakref.ref[Any]], list[jax.Array]] | None = None

    @contextlib.contextmanager
    def of(self, state: TrainState) -> Iterator[tuple[list[jax.Array], float]]:
        """Give the parts of the state's leaves, and the seconds that they took; none where the copy
        is still there. Afterwards it is freed, unless it is to be kept."""
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
        with mesh_context(self._mesh):
            here = [x.read().result() if isinstance(x, DiskArray) else x for x in leaves]
            parts = jax.block_until_ready(self._reshard(here))
        self._kept = ([weakref.ref(x) for x in leaves], parts)
        return parts, time.perf_counter() - start

    def free(self) -> None:
        """Free the copy, if there is one."""
        if self._kept is not None:
            for x in self._kept[1]:
                x.delete()
        self._kept = None
