"""A function in two calls: some of its results at once, and the others later.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.pipeline.split_program import SplitProgram, split
from zeroxla.program import compat
from zeroxla.program.shapes import shapes_of
from zeroxla.program.trace import trace
from zeroxla.wire.vectors import as_words, from_words


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SplitCall:
    """A function in two calls, which compute each value once.

    Attributes:
      program: the function, split.
      at_once, later: the tree structures of the results of the two calls.
      kept: the shapes of what the first call leaves to the second one, keys as words.
      kept_as: the same as a pytree, before keys are made words.
    """

    program: SplitProgram
    at_once: Any
    later: Any
    kept: tuple[jax.ShapeDtypeStruct, ...]
    kept_as: Any

    @staticmethod
    def make(
        fun: Callable[..., tuple[Any, Any]],
        args: Sequence[Any],
        by_data: str | None,
        *,
        unknown: Collection[int] = (),
        early: bool = False,
    ) -> SplitCall:
        """Trace a function and split it.

        Args:
          fun: (*args) -> (results at once, results later).
          args: its arguments, or their shapes.
          by_data: as in `SplitProgram`. The function's own ties are none by data.
          unknown: the numbers of the arguments that only the second call is given.
          early: as of `split`.
        """
        traced, _ = trace(fun, *args, opened=compat.backward_jaxpr)
        at_once, later = jax.eval_shape(fun, *args)
        num, more = (len(jax.tree.leaves(x)) for x in (at_once, later))
        inputs = iter(traced.inputs)
        by_argument = [[next(inputs) for _ in jax.tree.leaves(arg)] for arg in args]
        both = split(
            traced,
            range(num),
            range(num, num + more),
            by_data,
            unknown=[v for i in unknown for v in by_argument[i]],
            early=early,
        )
        _, kept = jax.eval_shape(lambda flat: both.run_first(_env(both, flat)), _flat(args))
        return SplitCall(
            program=both,
            at_once=jax.tree.structure(at_once),
            later=jax.tree.structure(later),
            kept=tuple(shapes_of(jax.eval_shape(_as_arrays, kept))),
            kept_as=kept,
        )

    def first(self, args: Sequence[Any]) -> tuple[Any, list[jax.Array]]:
        """Return the results at once, and what the second call needs of this one. Arguments that
        are not known yet may have any value."""
        found, kept = self.program.run_first(_env(self.program, _flat(args)))
        return self.at_once.unflatten(found), _as_arrays(kept)

    def second(self, args: Sequence[Any], kept: Sequence[jax.Array]) -> Any:
        """Return the other results."""
        leaves, tree = jax.tree.flatten(self.kept_as)
        values = [
            from_words(x, like) if _is_key(like) else x
            for x, like in zip(kept, leaves, strict=True)
        ]
        env = _env(self.program, _flat(args))
        return self.later.unflatten(self.program.run_second(env, tree.unflatten(values)))


def _flat(args: Sequence[Any]) -> list[Any]:
    return jax.tree.leaves(tuple(args))


def _env(both: SplitProgram, flat: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(both.program.inputs, flat, strict=True))


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _as_arrays(tree: Any) -> list[jax.Array]:
    """Return the arrays of a pytree, keys as words."""
    return [as_words(x) if _is_key(x) else x for x in jax.tree.leaves(tree)]
