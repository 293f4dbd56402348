"""Runs the optimizer's update over arrays in host memory, a few at a time, in one program.

Each sub-group of the update (see `pieces`) is moved in, computed and moved out before that
`buffers` sub-groups later is moved in. Where the host updates, its arrays stay, and what it is told
of gradients goes to them instead (see `sides`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding

from zeroxla.config.offload import PINNED, Offload
from zeroxla.offload.memory_kinds import is_on_host, put, to_device
from zeroxla.offload.update.host_cut import stages_of
from zeroxla.offload.update.on_host import SCOPE, check_host_compute, host_joins, run_stages
from zeroxla.offload.update.rows import Rows
from zeroxla.offload.update.sub_groups import Pieces, SubGroup
from zeroxla.program.shapes import shapes_of
from zeroxla.program.trace import Value, read, run


def stream(
    update: Callable[..., Any],
    args: Sequence[Any],
    places: Sequence[NamedSharding],
    *,
    offload: Offload,
    mesh: Mesh,
    layer_dims: Sequence[int | None] | None = None,
) -> Any:
    """Call a function of arrays in either memory, each sub-group of which visits the device, or is
    computed on the host.

    Args:
      update: computes; not told of memories.
      args: its arguments, pytrees of traced global arrays.
      places: the shardings, memories among them, of the first of the arrays that it returns; the
        others stay on the device.
      offload: says how large a sub-group is, how many are there at a time, and who computes.
      mesh: over all of whose devices arrays are split.
      layer_dims: of the arrays of `places`, the first of `args`: the dim of their layers, None if
        they have none. None: none has.

    Returns:
      What `update` returns, each array in its memory.

    Raises:
      ValueError: the host is to compute what it cannot.
    """
    leaves, tree = jax.tree.flatten(tuple(args))
    on_host = [is_on_host(x) for x in leaves]
    if not any(on_host):
        return update(*args)
    shapes = tree.unflatten(shapes_of(leaves))
    on_hosts = offload.update == "host"
    if on_hosts or layer_dims is None:
        layer_dims = [None] * len(places)
    pieces = Pieces.of(
        update,
        shapes,
        on_host,
        limit=offload.sub_group * mesh.size,
        layer_dims=layer_dims,
    )
    program = pieces.program
    env: dict[Value, Any] = dict(zip(program.inputs, leaves, strict=True))
    run(pieces.common, env)
    written: dict[Value, jax.Array] = {}  # row by row, by what they are the next values of

    def goes_to_host(i: int) -> bool:
        return i < len(places) and places[i].memory_kind == PINNED

    def stored(i: int, x: jax.Array) -> jax.Array:
        if goes_to_host(i):
            return jax.device_put(x, places[i])
        return put(to_device(x), places[i]) if i < len(places) else to_device(x)

    def visit(group: SubGroup, earlier: list[jax.Array]) -> dict[Value, Any]:
        """Compute a sub-group on the device."""
        mine = dict(env)
        if group.rows is not None:
            # Rows are read of what rows before them were written into: all happens in one place.
            for v in (*group.arrays, *group.reads):
                if v in group.having:
                    mine[v] = group.rows.cut(written[v] if v in written else env[v])
        with jax.named_scope(SCOPE):
            moved = _after([mine[v] for v in group.arrays], earlier)
            mine.update(zip(group.arrays, map(to_device, moved), strict=True))
        group.run(mine)
        return mine

    def stay(group: SubGroup, earlier: list[jax.Array]) -> dict[Value, Any]:
        """Compute a sub-group on the host, as far as that takes the fewest bytes there and back."""
        stages = stages_of(program, group, goes_to_host)
        if host_joins(stages):
            check_host_compute(mesh, joined=True)
        made = [v for i in group.results if isinstance(v := program.outputs[i], Value)]
        sent = [v for v in group.reads if v.aval.shape]
        waited = zip(sent, _after([env[v] for v in sent], earlier), strict=True)
        mine = run_stages(stages, env | dict(waited), made)
        return env | dict(zip(made, mine, strict=True))

    def joined(group: SubGroup, rows: Rows, found: dict[int, jax.Array]) -> dict[int, jax.Array]:
        """Write rows where they belong; return the results when all are there."""
        for i, x in found.items():
            v = program.inputs[i]
            into = written[v] if v in written else env[v]
            written[v] = lax.dynamic_update_slice_in_dim(into, x, rows.start, rows.dim)
        return {i: written[program.inputs[i]] for i in found} if group.is_last else {}

    compute = stay if on_hosts else visit
    with jax.named_scope(SCOPE):
        results = {i: stored(i, read(env, program.outputs[i])) for i in pieces.shared}
    results |= {i: env[v] for i, v in pieces.untouched.items()}
    done: list[list[jax.Array]] = []
    for group in pieces.groups:
        mine = compute(group, done[-offload.buffers] if len(done) >= offload.buffers else [])
        with jax.named_scope(SCOPE):
            found = {i: stored(i, read(mine, program.outputs[i])) for i in group.results}
            done.append(list(found.values()))
            results |= found if group.rows is None else joined(group, group.rows, found)
    return pieces.tree.unflatten([results[i] for i in range(len(results))])


def _after(arrays: list[jax.Array], earlier: list[jax.Array]) -> list[jax.Array]:
    """Return the arrays, such that none is read before `earlier` are where they go."""
    if not earlier:
        return arrays
    return lax.optimization_barrier((arrays, earlier))[0]
