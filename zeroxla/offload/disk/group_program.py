"""`group_program`: the program that updates one sub-group, on all rows of its arrays or on some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
from jax import lax
from jax.sharding import NamedSharding

from zeroxla.offload.memory_kinds import put, to_device
from zeroxla.offload.update.sub_groups import RunEquations, SubGroup, SubGroups
from zeroxla.program.trace import Value, read, run

Arrays = Mapping[int, jax.Array]

GroupProgram = Callable[..., tuple[dict[int, jax.Array], dict[int, jax.Array], list[jax.Array]]]
"""A function that updates a sub-group.

Args:
  arrays: the rows that came of the sub-group's `arrays`, by position.
  mine, others: the sub-group's `reads`, by position, with all rows.
  whole: arrays in memory into which the sub-group writes its rows, by the position of the result.
  start: the number of the first of these rows.

Returns:
  The results by position, `whole` with the new rows, and scalars that nobody needs."""


def group_program(
    sub_groups: SubGroups,
    group: SubGroup,
    places: Sequence[NamedSharding],
    run_whole: RunEquations = run,
) -> GroupProgram:
    """Return the program of a sub-group. Others that differ only in their first row share it.

    Args:
      sub_groups: the update.
      group: one of its sub-groups.
      places: the shardings of the first results, memories included.
      run_whole: see `SubGroup.run`.
    """
    program, rows = sub_groups.program, group.rows

    def placed(i: int, x: jax.Array) -> jax.Array:
        return put(x, places[i]) if i < len(places) else x

    def update(
        arrays: Arrays, mine: Arrays, others: Arrays, whole: Arrays, start: jax.Array
    ) -> tuple[dict[int, jax.Array], dict[int, jax.Array], list[jax.Array]]:
        def here(v: Value, x: jax.Array) -> jax.Array:
            if rows is not None and v in group.row_values:
                x = lax.dynamic_slice_in_dim(x, start, rows.count, rows.dim)
            return to_device(x)

        env = {group.arrays[k]: to_device(x) for k, x in arrays.items()}
        env |= {
            v: here(v, x) for k, x in (*mine.items(), *others.items()) for v in [group.reads[k]]
        }
        env |= {v: here(v, x) for i, x in whole.items() for v in [program.inputs[i]]}
        with jax.named_scope("update"):
            group.run(env, run_whole)
        found = {i: placed(i, read(env, program.outputs[i])) for i in group.results}
        new = {}
        for i, x in whole.items():
            assert rows is not None
            new[i] = lax.dynamic_update_slice_in_dim(x, found.pop(i), start, rows.dim)
        # Scalars are returned because how often they are used changes how XLA divides by them; see
        # `SubGroup.scalars`.
        return found, {i: placed(i, x) for i, x in new.items()}, [env[v] for v in group.scalars]

    return update
