"""A stage's backward in two parts: the gradients of its inputs first, those of its leaves later.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zeroxla.pipeline.split_program import SplitProgram, split
from zeroxla.pipeline.stage import StageProgram
from zeroxla.program import compat
from zeroxla.program.shapes import shapes_of
from zeroxla.program.trace import trace
from zeroxla.wire.vectors import as_words, from_words


class AtOnce(NamedTuple):
    """What the first part of a backward returns.

    Attributes:
      of_inputs: the gradients of the stage's floating inputs.
      sums: on the last stage the weighted sums of loss and metrics, None on the others.
      state: on the last stage the new model state, [] on the others.
    """

    of_inputs: list[jax.Array]
    sums: Any
    state: list[jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SplitBackward:
    """Runs a stage's backward in two parts, which compute each value once.

    Attributes:
      program: the backward, split.
      result: the tree structure of `AtOnce`.
      kept: the shapes of what the first part leaves to the second one, keys as words.
      kept_as: the same as a pytree, before keys are made words.
    """

    program: SplitProgram
    result: Any
    kept: tuple[jax.ShapeDtypeStruct, ...]
    kept_as: Any

    @staticmethod
    def make(program: StageProgram, args: Sequence[Any], by_data: str | None) -> SplitBackward:
        """Trace a stage's backward and split it.

        Args:
          program: the stage, whose own ties are none by data.
          args: the arguments of `StageProgram.backward`, or their shapes.
          by_data: as in `SplitProgram`.
        """

        def backward(*args: Any) -> tuple[AtOnce, list[jax.Array]]:
            of_leaves, of_inputs, sums, state = program.backward(*args)
            return AtOnce(of_inputs, sums, state if program.stage.is_last else []), of_leaves

        traced, _ = trace(backward, *args, opened=compat.backward_jaxpr)
        at_once, of_leaves = jax.eval_shape(backward, *args)
        num = len(jax.tree.leaves(at_once))
        both = split(traced, range(num), range(num, num + len(of_leaves)), by_data)
        _, kept = jax.eval_shape(lambda flat: both.run_first(_env(both, flat)), _flat(args))
        return SplitBackward(
            program=both,
            result=jax.tree.structure(at_once),
            kept=tuple(shapes_of(jax.eval_shape(_as_arrays, kept))),
            kept_as=kept,
        )

    def at_once(self, args: Sequence[Any]) -> tuple[AtOnce, list[jax.Array]]:
        """Run the first part; return its results, and what it leaves to the second one."""
        found, kept = self.program.run_first(_env(self.program, _flat(args)))
        return self.result.unflatten(found), _as_arrays(kept)

    def later(self, args: Sequence[Any], kept: Sequence[jax.Array]) -> list[jax.Array]:
        """Run the second part; return the gradients of the leaves."""
        leaves, tree = jax.tree.flatten(self.kept_as)
        values = [
            from_words(x, like) if _is_key(like) else x
            for x, like in zip(kept, leaves, strict=True)
        ]
        env = _env(self.program, _flat(args))
        return self.program.run_second(env, tree.unflatten(values))


def _flat(args: Sequence[Any]) -> list[Any]:
    return jax.tree.leaves(tuple(args))


def _env(both: SplitProgram, flat: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(both.program.inputs, flat, strict=True))


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _as_arrays(tree: Any) -> list[jax.Array]:
    """Return the arrays of a pytree, keys as words."""
    return [as_words(x) if _is_key(x) else x for x in jax.tree.leaves(tree)]
