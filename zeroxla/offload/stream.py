"""Runs the optimizer's update over arrays in host memory, a few at a time.

The update is traced, and its program says which results follow from which arrays. Results that
follow from the same offloaded arrays are one piece: for most optimizers a leaf with its moments.
Pieces are packed into sub-groups, and each sub-group is moved in, computed and moved out before
that `buffers` sub-groups later is moved in. What all share (a norm, a schedule) is computed first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding

from zeroxla.offload.kinds import is_on_host, put, to_device
from zeroxla.offload.options import Offload
from zeroxla.trace import Atom, Program, Value, closure, read, run, trace

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
    shapes = tree.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
    program, out_tree = trace(update, *shapes)
    env: dict[Value, Any] = dict(zip(program.inputs, leaves, strict=True))
    offloaded = [v for v, x in env.items() if is_on_host(x)]
    shared, pieces = _pieces(program, offloaded)
    _compute(program, env, shared)
    results: dict[int, jax.Array] = {i: read(env, program.outputs[i]) for i in shared}
    done: list[list[jax.Array]] = []
    limit = offload.sub_group * mesh.size
    for inputs, outputs in _packed(pieces, limit):
        earlier = done[-offload.buffers] if len(done) >= offload.buffers else []
        with jax.named_scope(SCOPE):
            moved = _after([env[v] for v in inputs], earlier)
            env.update(zip(inputs, map(to_device, moved), strict=True))
        _compute(program, env, outputs)
        found = {i: read(env, program.outputs[i]) for i in outputs}
        done.append(list(found.values()))
        results.update(found)
    with jax.named_scope(SCOPE):
        results.update({i: put(results[i], place) for i, place in enumerate(places)})
    return out_tree.unflatten([results[i] for i in range(len(results))])


def _pieces(
    program: Program, offloaded: Sequence[Value]
) -> tuple[list[int], list[tuple[list[Value], list[int]]]]:
    """Return the results that need nothing that is offloaded, and for each set of offloaded arrays
    that belong together, those and their results; by position."""
    makers = {v: eq for eq in program.equations for v in eq.outputs}
    group = {v: v for v in offloaded}  # each points on to another of its set, the last to itself

    def last(v: Value) -> Value:
        while group[v] is not v:
            v = group[v]
        return v

    needs: list[list[Value]] = []
    for atom in program.outputs:
        mine = [v for v in _roots(atom, makers) if v in group]
        for v in mine[1:]:
            group[last(v)] = last(mine[0])
        needs.append(mine)
    shared = [i for i, mine in enumerate(needs) if not mine]
    sets: dict[Value, tuple[list[Value], list[int]]] = {}
    for v in offloaded:
        sets.setdefault(last(v), ([], []))[0].append(v)
    for i, mine in enumerate(needs):
        if mine:
            sets[last(mine[0])][1].append(i)
    return shared, [piece for piece in sets.values() if piece[1]]


def _packed(
    pieces: Sequence[tuple[list[Value], list[int]]], limit: int
) -> list[tuple[list[Value], list[int]]]:
    """Return consecutive pieces joined while their arrays have at most `limit` elements."""
    packed: list[tuple[list[Value], list[int]]] = []
    size = 0
    for inputs, outputs in pieces:
        more = sum(math.prod(v.aval.shape) for v in inputs)
        if packed and size + more <= limit:
            packed[-1][0].extend(inputs)
            packed[-1][1].extend(outputs)
            size += more
        else:
            packed.append((list(inputs), list(outputs)))
            size = more
    return packed


def _roots(atom: Atom, makers: Any) -> list[Value]:
    return closure([atom], makers)[1] if isinstance(atom, Value) else []


def _compute(program: Program, env: dict[Value, Any], outputs: Sequence[int]) -> None:
    """Run the equations that some results still need."""
    makers = {v: eq for eq in program.equations for v in eq.outputs if v not in env}
    atoms = [program.outputs[i] for i in outputs]
    equations, _ = closure([a for a in atoms if isinstance(a, Value)], makers)
    run(equations, env)


def _after(arrays: list[jax.Array], earlier: list[jax.Array]) -> list[jax.Array]:
    """Return the arrays, such that none is read before `earlier` are computed."""
    if not earlier:
        return arrays
    return lax.optimization_barrier((arrays, earlier))[0]
