"""Runs the optimizer's update over arrays in host memory, a few at a time, in one program.

Each sub-group of the update (see `pieces`) is moved in, computed and moved out before that
`buffers` sub-groups later is moved in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding

from zeroxla.offload.kinds import is_on_host, put, to_device
from zeroxla.offload.options import Offload
from zeroxla.offload.pieces import Pieces
from zeroxla.trace import Value, read, run

SCOPE = "offload"


def stream(
    update: Callable[..., Any],
    args: Sequence[Any],
    places: Sequence[NamedSharding],
    *,
    offload: Offload,
    mesh: Mesh,
) -> Any:
    """Call a function of arrays in either memory, each sub-group of which visits the device.

    Args:
      update: computes on the device; not told of memories.
      args: its arguments, pytrees of traced global arrays.
      places: the shardings, memories among them, of the first of the arrays that it returns; the
        others stay on the device.
      offload: says how large a sub-group is, and how many are there at a time.
      mesh: over all of whose devices arrays are split.

    Returns:
      What `update` returns, each array in its memory.
    """
    leaves, tree = jax.tree.flatten(tuple(args))
    on_host = [is_on_host(x) for x in leaves]
    if not any(on_host):
        return update(*args)
    shapes = tree.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
    pieces = Pieces.of(
        update,
        shapes,
        on_host,
        limit=offload.sub_group * mesh.size,
        layer_dims=[None] * len(places),
    )
    program = pieces.program
    env: dict[Value, Any] = dict(zip(program.inputs, leaves, strict=True))
    run(pieces.common, env)

    def stored(results: Sequence[int]) -> dict[int, jax.Array]:
        with jax.named_scope(SCOPE):
            found = {i: read(env, program.outputs[i]) for i in results}
            return {i: put(x, places[i]) if i < len(places) else x for i, x in found.items()}

    results = {i: env[v] for i, v in pieces.untouched.items()} | stored(pieces.shared)
    done: list[list[jax.Array]] = []
    for group in pieces.groups:
        earlier = done[-offload.buffers] if len(done) >= offload.buffers else []
        with jax.named_scope(SCOPE):
            moved = _after([env[v] for v in group.arrays], earlier)
            env.update(zip(group.arrays, map(to_device, moved), strict=True))
        run(group.equations, env)
        found = stored(group.results)
        done.append(list(found.values()))
        results |= found
    return pieces.tree.unflatten([results[i] for i in range(len(results))])


def _after(arrays: list[jax.Array], earlier: list[jax.Array]) -> list[jax.Array]:
    """Return the arrays, such that none is read before `earlier` are where they go."""
    if not earlier:
        return arrays
    return lax.optimization_barrier((arrays, earlier))[0]
