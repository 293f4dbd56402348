"""`stream`: runs the optimizer's update over arrays in host memory, one sub-group after another.

All of it is one compiled program. Each sub-group (see `sub_groups`) is moved in, computed and moved
out before the sub-group that comes `buffers` later is moved in. If the host updates, its arrays
stay there, and the gradients that it needs are sent to it instead (see `host_cut`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding

from zeroxla.config.offload import PINNED, Offload
from zeroxla.offload.memory_kinds import is_on_host, put, to_device
from zeroxla.offload.update.host_cut import side_runs
from zeroxla.offload.update.on_host import SCOPE, check_host_compute, host_joins, run_sides
from zeroxla.offload.update.rows import Rows
from zeroxla.offload.update.sub_groups import RunEquations, SubGroup, SubGroups
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
    run_of: Callable[[SubGroups], RunEquations] | None = None,
) -> Any:
    """Call a function of arrays in either memory, inside a compiled program, in sub-groups. Each
    sub-group visits the device, or is computed on the host.

    Args:
      update: the function. It need not know about memories.
      args: its arguments, pytrees of traced global arrays.
      places: the shardings of the first arrays that it returns, memories included. The others stay
        on the device.
      offload: the size and number of sub-groups, and whether the device or the host updates.
      mesh: the mesh over all of whose devices arrays are split.
      layer_dims: the dim of the layers in each array of `places`, which are the first of `args`;
        None for an array without layers. If the whole argument is None, no array has any.
      run_of: (cut update) -> the function with which the device computes a sub-group,
        and what comes before all of them. None runs equations one by one.

    Returns:
      The results of `update`, each array in its memory.

    Raises:
      ValueError: the host is to compute something that it cannot.
    """
    leaves, tree = jax.tree.flatten(tuple(args))
    on_host = [is_on_host(x) for x in leaves]
    if not any(on_host):
        return update(*args)
    host_updates = offload.update == "host"
    if host_updates or layer_dims is None:
        layer_dims = [None] * len(places)
    sub_groups = SubGroups.of(
        update,
        tree.unflatten(shapes_of(leaves)),
        on_host,
        limit=offload.sub_group * mesh.size,
        layer_dims=layer_dims,
    )
    env: dict[Value, Any] = dict(zip(sub_groups.program.inputs, leaves, strict=True))
    run_whole = run if run_of is None else run_of(sub_groups)
    run_whole(sub_groups.common, env)
    streamed = _Stream(sub_groups, places, mesh, env, run_whole)
    compute = streamed.on_host if host_updates else streamed.on_device
    results = streamed.without_groups()
    moved_out: list[list[jax.Array]] = []  # the results of each sub-group so far
    for group in sub_groups.groups:
        earlier = moved_out[-offload.buffers] if len(moved_out) >= offload.buffers else []
        values = compute(group, earlier)
        with jax.named_scope(SCOPE):
            found = streamed.results_of(group, values)
            moved_out.append(list(found.values()))
            results |= found if group.rows is None else streamed.write(group, group.rows, found)
    return sub_groups.tree.unflatten([results[i] for i in range(len(results))])


@dataclasses.dataclass(frozen=True, slots=True)
class _Stream:
    """The steps of `stream` while a program is traced.

    Attributes:
      sub_groups: the update.
      places, mesh: as in `stream`.
      env: the update's inputs, and the values that are computed before the sub-groups.
      run_whole: computes the equations of a sub-group on the device.
      written: for inputs that are updated row by row, their next values so far.
    """

    sub_groups: SubGroups
    places: Sequence[NamedSharding]
    mesh: Mesh
    env: dict[Value, Any]
    run_whole: RunEquations
    written: dict[Value, jax.Array] = dataclasses.field(default_factory=dict)

    def without_groups(self) -> dict[int, jax.Array]:
        """Return the results that belong to no sub-group, by position."""
        shared, outputs = self.sub_groups.shared, self.sub_groups.program.outputs
        with jax.named_scope(SCOPE):
            found = {i: self._stored(i, read(self.env, outputs[i])) for i in shared}
        return found | {i: self.env[v] for i, v in self.sub_groups.untouched.items()}

    def on_device(self, group: SubGroup, earlier: list[jax.Array]) -> dict[Value, Any]:
        """Compute a sub-group on the device, and return its values. Its arrays move there once
        `earlier` are where they belong."""
        mine = dict(self.env)
        if group.rows is not None:
            # Rows are read from the array that earlier rows were written into, so that XLA can
            # update it in place.
            for v in (*group.arrays, *group.reads):
                if v in group.row_values:
                    mine[v] = group.rows.cut(self._latest(v))
        with jax.named_scope(SCOPE):
            moved = _after([mine[v] for v in group.arrays], earlier)
            mine.update(zip(group.arrays, map(to_device, moved), strict=True))
        group.run(mine, self.run_whole)
        return mine

    def on_host(self, group: SubGroup, earlier: list[jax.Array]) -> dict[Value, Any]:
        """Compute a sub-group on the host, except for equations whose values cross over with fewer
        bytes, and return its values. Nothing is sent before `earlier` are where they belong."""
        program = self.sub_groups.program
        runs = side_runs(program, group, self._goes_to_host)
        if host_joins(runs):
            check_host_compute(self.mesh, joined=True)
        made = [v for i in group.results if isinstance(v := program.outputs[i], Value)]
        sent = [v for v in group.reads if v.aval.shape]
        waited = zip(sent, _after([self.env[v] for v in sent], earlier), strict=True)
        mine = run_sides(runs, self.env | dict(waited), made)
        return self.env | dict(zip(made, mine, strict=True))

    def results_of(self, group: SubGroup, values: dict[Value, Any]) -> dict[int, jax.Array]:
        """Return a sub-group's results by position, each in its place."""
        outputs = self.sub_groups.program.outputs
        return {i: self._stored(i, read(values, outputs[i])) for i in group.results}

    def write(
        self, group: SubGroup, rows: Rows, found: dict[int, jax.Array]
    ) -> dict[int, jax.Array]:
        """Write rows of results where they belong. Return the results once all rows are written,
        and nothing before."""
        inputs = self.sub_groups.program.inputs
        for i, x in found.items():
            v = inputs[i]
            self.written[v] = lax.dynamic_update_slice_in_dim(
                self._latest(v), x, rows.start, rows.dim
            )
        return {i: self.written[inputs[i]] for i in found} if group.is_last else {}

    def _latest(self, v: Value) -> jax.Array:
        return self.written[v] if v in self.written else self.env[v]

    def _goes_to_host(self, i: int) -> bool:
        return i < len(self.places) and self.places[i].memory_kind == PINNED

    def _stored(self, i: int, x: jax.Array) -> jax.Array:
        """Return result `i` in its place."""
        if self._goes_to_host(i):
            return jax.device_put(x, self.places[i])
        x = to_device(x)
        return put(x, self.places[i]) if i < len(self.places) else x


def _after(arrays: list[jax.Array], earlier: list[jax.Array]) -> list[jax.Array]:
    """Return the arrays behind a barrier: none is read before `earlier` are computed and moved."""
    if not earlier:
        return arrays
    return lax.optimization_barrier((arrays, earlier))[0]
