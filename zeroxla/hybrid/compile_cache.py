"""The compiled programs of an engine, by shape. Each is compiled at its first call."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from zeroxla.frontend.base import Tree
from zeroxla.hybrid.decode import DecodeShape
from zeroxla.hybrid.generate_programs import GeneratePrograms
from zeroxla.hybrid.request import Request
from zeroxla.hybrid.reshard import part_spec, rows_spec
from zeroxla.hybrid.sampling import Sampling
from zeroxla.mesh.batches import put_key
from zeroxla.mesh.processes.exchange import agree
from zeroxla.program.compat import mesh_context


class CompiledPrograms:
    """Runs `GeneratePrograms` on host arrays. Every program is compiled at its first call.

    Attributes:
      programs: the programs.
      mesh: the mesh (node, tensor, data).
    """

    def __init__(self, programs: GeneratePrograms) -> None:
        self.programs, self.mesh = programs, programs.mesh
        self._jitted: dict[Any, Any] = {}
        self._whole_rows = jax.jit(programs.whole_rows)
        self._copied = jax.jit(partial(jax.tree.map, jnp.copy))

    def generate(
        self, request: Request, leaves: list[jax.Array], model_state: Tree
    ) -> dict[str, np.ndarray]:
        """Run `GeneratePrograms.generate` on prompts, the same ones in every process.

        Args:
          request: the prompts, and how they are continued.
          leaves: the tensor-parallel copy of the model.
          model_state: the state's other collections.

        Raises:
          ValueError: the processes do not pass the same arguments.
        """
        self.check_alike(request)
        args = self._arguments(request, leaves, model_state)
        with mesh_context(self.mesh):
            return self._fetch(self._whole(self._generate(request.shape)(*args)))

    def stream(
        self, request: Request, leaves: list[jax.Array], model_state: Tree, num_turns: int
    ) -> Iterator[dict[str, np.ndarray]]:
        """Run `GeneratePrograms.begin`, then `advance` again and again; yield what each call draws.

        A call runs while the results of the one before are read. It ends when no row goes on.

        Args:
          request, leaves, model_state: as for `generate`. Processes pass the same ones.
          num_turns: the number of turns of a call.
        """
        shape = request.shape
        begin = self._program(("begin", shape), partial(self.programs.begin, shape=shape))
        advance = self._program(
            ("advance", shape, num_turns),
            partial(self.programs.advance, shape=shape, num_turns=num_turns),
            donate_argnums=5,  # the carry, whose cache is the largest array
        )
        args = self._arguments(request, leaves, model_state)
        with mesh_context(self.mesh):
            carry, drawn = advance(*args, begin(*args))
            drawn = self._whole(drawn)
        while True:
            with mesh_context(self.mesh):
                carry, ahead = advance(*args, carry)
                ahead = self._whole(ahead)
            found = self._fetch(drawn)
            yield found
            if not found["running"][: request.num_rows, -1].any():
                return
            drawn = ahead

    def rows(
        self, name: str, leaves: list[jax.Array], model_state: Tree, *rows_BL: np.ndarray
    ) -> np.ndarray:
        """Score whole rows, the same ones in every process.

        Args:
          name: the program: "logprobs", "logits" or "values".
          leaves, model_state: as in `generate`.
          *rows_BL: int32 tokens; for "logprobs" also int32 targets.

        Raises:
          ValueError: the processes do not pass the same tokens.
        """
        _check_alike(*rows_BL)
        program = self._rows(name, rows_BL[0].shape)
        with mesh_context(self.mesh):
            return self._fetch(self._whole(program(leaves, model_state, *self._put(rows_BL))))

    def copied(self, model_state: Tree) -> Tree:
        """Return a copy of the state's other collections, which no training step takes."""
        return self._copied(model_state)

    def check_alike(self, request: Request) -> None:
        """Check that all processes continue the same prompts in the same way.

        Raises:
          ValueError: they do not.
        """
        _check_alike(request.batch, jax.random.key_data(request.key), request.options)

    def trace_generate(self, shape: DecodeShape, sampling: Sampling) -> jax.stages.Traced:
        """Trace the program that `generate` runs for a shape."""
        number = jax.ShapeDtypeStruct((), jnp.int32)
        options = {"new": number, "eos": jax.ShapeDtypeStruct((1,), jnp.int32), "pad": number}
        rows = shape.rows * self.programs.copies
        batch = {"prompt": self._tokens(rows, shape.prompt), "length": self._tokens(rows)}
        key = jax.eval_shape(jax.random.key, 0)
        options = {**options, "numbers": sampling.numbers}
        model_state = self.programs.model.model_state
        with mesh_context(self.mesh):
            return self._generate(shape).trace(self._parts(), model_state, batch, key, options)

    def lower_logprobs(self, shape: tuple[int, int]) -> jax.stages.Lowered:
        """Lower the program that `rows` runs for "logprobs" of tokens of a shape."""
        model_state, rows = self.programs.model.model_state, self._tokens(*shape)
        with mesh_context(self.mesh):
            return self._rows("logprobs", shape).lower(self._parts(), model_state, rows, rows)

    def _put(self, tree: Any) -> Any:
        """Put host arrays, the same ones in each process, on the mesh, split by rows."""
        sharding = NamedSharding(self.mesh, rows_spec(self.mesh))

        def one(x: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(one, tree)

    def _arguments(self, request: Request, leaves: list[jax.Array], model_state: Tree) -> Any:
        """Return the arguments of the programs that continue prompts."""
        batch, key = self._put(request.batch), put_key(request.key, self.mesh)
        return leaves, model_state, batch, key, request.options

    def _whole(self, tree: Any) -> Any:
        """Return all rows as arrays that each process has whole."""
        return tree if jax.process_count() == 1 else self._whole_rows(tree)

    def _fetch(self, tree: Any) -> Any:
        """Return arrays that each process has whole as host arrays."""
        return jax.tree.map(np.asarray, tree)

    def _generate(self, shape: DecodeShape) -> Any:
        return self._program(shape, partial(self.programs.generate, shape=shape))

    def _rows(self, name: str, shape: tuple[int, int]) -> Any:
        return self._program((name, shape), getattr(self.programs, name))

    def _program(self, name: Any, function: Any, **options: Any) -> Any:
        if name not in self._jitted:
            self._jitted[name] = jax.jit(function, **options)
        return self._jitted[name]

    def _parts(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the tensor-parallel copy, as global arrays."""
        leaves, plan = jax.tree.leaves(self.programs.model.params), self.programs.plan
        found = []
        for x, row in zip(leaves, plan.rows, strict=True):
            shape = list(row.part_shape(plan.parts))
            if row.dim is not None:
                shape[row.dim] *= plan.parts
            sharding = NamedSharding(self.mesh, part_spec(row))
            found.append(jax.ShapeDtypeStruct(tuple(shape), x.dtype, sharding=sharding))
        return found

    def _tokens(self, *shape: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, rows_spec(self.mesh))
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)


def _check_alike(*arrays: Any) -> None:
    """Check that all processes pass the same arrays, since each computes only some of the rows.

    Raises:
      ValueError: their arrays differ.
    """
    if jax.process_count() == 1:
        return
    digest = hashlib.blake2b(digest_size=8)
    for x in map(np.asarray, jax.tree.leaves(arrays)):
        digest.update(f"{x.dtype}{x.shape}".encode() + x.tobytes())
    remedy = "pass the same prompts or tokens, key and options in every process"
    agree("rows to generate or score", {"arguments": digest.hexdigest()}, remedy)
