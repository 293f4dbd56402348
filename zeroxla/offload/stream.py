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

from zeroxla.offload.host_update import SCOPE, check_host_compute, host_joins, run_stages
from zeroxla.offload.kinds import HOST_KINDS, is_on_host, put, to_device
from zeroxla.offload.options import Offload
from zeroxla.offload.pieces import Pieces, SubGroup
from zeroxla.offload.sides import stages_of
from zeroxla.trace import Value, read, run


def stream(
    update: Callable[..., Any],
    args: Sequence[Any],
    places: Sequence[NamedSharding],
    *,
    offload: Offload,
    mesh: Mesh,
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

    Returns:
      What `update` returns, each array in its memory.

    Raises:
      ValueError: the host is to compute what it cannot.
    """
    leaves, tree = jax.tree.flatten(tuple(args))
    on_host = [is_on_host(x) for x in leaves]
    if not any(on_host):
        return update(*args)
    shapes = tree.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
    pieces = Pieces.of(update, shapes, on_host, limit=offload.sub_group * mesh.size)
    program = pieces.program
    env: dict[Value, Any] = dict(zip(program.inputs, leaves, strict=True))
    run(pieces.common, env)

    def goes_to_host(i: int) -> bool:
        return i < len(places) and places[i].memory_kind in HOST_KINDS

    def stored(i: int) -> jax.Array:
        x = read(env, program.outputs[i])
        if goes_to_host(i):
            return jax.device_put(x, places[i])
        return put(to_device(x), places[i]) if i < len(places) else to_device(x)

    def visit(group: SubGroup, earlier: list[jax.Array]) -> None:
        """Compute a sub-group on the device."""
        with jax.named_scope(SCOPE):
            moved = _after([env[v] for v in group.arrays], earlier)
            env.update(zip(group.arrays, map(to_device, moved), strict=True))
        run(group.equations, env)

    def stay(group: SubGroup, earlier: list[jax.Array]) -> None:
        """Compute a sub-group on the host, as far as that takes the fewest bytes there and back."""
        stages = stages_of(program, group, goes_to_host)
        if host_joins(stages):
            check_host_compute(mesh, offload.memory_kind, joined=True)
        made = [v for i in group.results if isinstance(v := program.outputs[i], Value)]
        sent = [v for v in group.reads if v.aval.shape]
        waited = zip(sent, _after([env[v] for v in sent], earlier), strict=True)
        mine = run_stages(stages, env | dict(waited), made)
        env.update(zip(made, mine, strict=True))

    compute = stay if offload.update == "host" else visit
    with jax.named_scope(SCOPE):
        results = {i: stored(i) for i in pieces.shared}
    results |= {i: env[v] for i, v in pieces.untouched.items()}
    done: list[list[jax.Array]] = []
    for group in pieces.groups:
        compute(group, done[-offload.buffers] if len(done) >= offload.buffers else [])
        with jax.named_scope(SCOPE):
            found = {i: stored(i) for i in group.results}
        done.append(list(found.values()))
        results |= found
    return pieces.tree.unflatten([results[i] for i in range(len(results))])


def _after(arrays: list[jax.Array], earlier: list[jax.Array]) -> list[jax.Array]:
    """Return the arrays, such that none is read before `earlier` are where they go."""
    if not earlier:
        return arrays
    return lax.optimization_barrier((arrays, earlier))[0]
