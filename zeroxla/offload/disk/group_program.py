"""The program of a sub-group of the update: what it reads, what it writes, on all rows or some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
from jax import lax
from jax.sharding import NamedSharding

from zeroxla.offload.memory_kinds import put, to_device
from zeroxla.offload.update.sub_groups import Pieces, SubGroup
from zeroxla.program.trace import Value, read

Arrays = Mapping[int, jax.Array]

GroupProgram = Callable[..., tuple[dict[int, jax.Array], dict[int, jax.Array], list[jax.Array]]]
"""A function of

* arrays: those that came for the sub-group, by their position among its `arrays`; of its rows,
* mine, others: what it reads besides, by their position among its `reads`; all rows,
* whole: arrays in memory of which it makes rows, by the position of the result,
* start: the first of these rows,

that returns the results by position, `whole` with its rows, and scalars that nobody needs."""


def group_program(pieces: Pieces, group: SubGroup, places: Sequence[NamedSharding]) -> GroupProgram:
    """Return the program of a sub-group, or of others that differ in their first row alone.

    Args:
      pieces: of the update.
      group: of these.
      places: the shardings, memories among them, of the first results.
    """
    program, rows = pieces.program, group.rows

    def placed(i: int, x: jax.Array) -> jax.Array:
        return put(x, places[i]) if i < len(places) else x

    def update(
        arrays: Arrays, mine: Arrays, others: Arrays, whole: Arrays, start: jax.Array
    ) -> tuple[dict[int, jax.Array], dict[int, jax.Array], list[jax.Array]]:
        def here(v: Value, x: jax.Array) -> jax.Array:
            if rows is not None and v in group.having:
                x = lax.dynamic_slice_in_dim(x, start, rows.count, rows.dim)
            return to_device(x)

        env = {group.arrays[k]: to_device(x) for k, x in arrays.items()}
        env |= {
            v: here(v, x) for k, x in (*mine.items(), *others.items()) for v in [group.reads[k]]
        }
        env |= {v: here(v, x) for i, x in whole.items() for v in [program.inputs[i]]}
        with jax.named_scope("update"):
            group.run(env)
        found = {i: placed(i, read(env, program.outputs[i])) for i in group.results}
        new = {}
        for i, x in whole.items():
            assert rows is not None
            new[i] = lax.dynamic_update_slice_in_dim(x, found.pop(i), start, rows.dim)
        # Shown, or how often they are used would change how XLA divides; see `SubGroup.scalars`.
        return found, {i: placed(i, x) for i, x in new.items()}, [env[v] for v in group.scalars]

    return update
