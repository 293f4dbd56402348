"""`run_sides`: computes a sub-group's update where its arrays are, on the host."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from zeroxla.config.offload import PINNED
from zeroxla.offload.memory_kinds import to_device, to_host
from zeroxla.offload.update.host_cut import SideRun, joins
from zeroxla.program import compat
from zeroxla.program.shapes import shapes_of
from zeroxla.program.trace import Value, run, trace

SCOPE = "offload"


def run_sides(
    runs: Sequence[SideRun], env: Mapping[Value, Any], wanted: Sequence[Value]
) -> list[jax.Array]:
    """Compute a sub-group's equations, each run on its side.

    Args:
      runs: the runs, in order.
      env: the values that they read and do not make.
      wanted: the values to return.

    Returns:
      The arrays of the wanted values, each in the memory of the side that made it.
    """
    made = dict(env)
    moved: dict[tuple[Value, bool], jax.Array] = {}  # a value that both sides read moves once
    for i, side in enumerate(runs):
        inside = dict.fromkeys(v for eq in side.equations for v in eq.outputs)
        reads = [v for eq in side.equations for v in eq.values if v not in inside]
        for v in reads:
            if (v, side.on_host) not in moved:
                with jax.named_scope(SCOPE):
                    move = to_host if side.on_host else to_device
                    moved[v, side.on_host] = move(made[v])
        mine = {v: moved[v, side.on_host] for v in reads}
        if side.on_host:
            later = {v for other in runs[i + 1 :] for eq in other.equations for v in eq.values}
            made |= _on_host(side, mine, [v for v in inside if v in later.union(wanted)])
        else:
            run(side.equations, mine)
            made |= {v: mine[v] for v in inside}
    return [made[v] for v in wanted]


def _on_host(
    side: SideRun, reads: Mapping[Value, jax.Array], wanted: Sequence[Value]
) -> dict[Value, jax.Array]:
    """Compute a run on the host, and return the wanted values."""

    def compute(*args: jax.Array) -> list[jax.Array]:
        env = dict(zip(reads, args, strict=True))
        run(side.equations, env)
        return [env[v] for v in wanted]

    # This is traced for arrays in device memory: not all of JAX's functions make their constants in
    # host memory, and none takes arrays in both memories.
    shapes = shapes_of(list(reads.values()))
    program, _ = trace(compat.compute_on_host(compute), *shapes)
    return dict(zip(wanted, program(*reads.values()), strict=True))


def check_host_compute(mesh: Mesh, *, joined: bool = False) -> None:
    """Check that a mesh's hosts can compute. An abstract mesh passes.

    Args:
      mesh: the step's mesh.
      joined: whether the hosts also compute sums over arrays, which are split over devices.

    Raises:
      ValueError: the backend cannot compile it.

    Cost: compiles a few operations, once for each mesh.
    """
    if isinstance(mesh, AbstractMesh):
        return
    if (reason := host_refusal(mesh, joined)) is not None:
        device = mesh.devices.flat[0]
        what = "the sums of this optimizer" if joined else "computation"
        raise ValueError(
            f"Offload(update='host') needs {what} on the host, which the backend of "
            f"{device.device_kind} ({device.platform}) with jax {jax.__version__} cannot compile: "
            f"{reason}; use Offload(update='device')"
        )


def host_joins(runs: Sequence[SideRun]) -> bool:
    """Return whether the host is to combine elements of several devices."""
    return any(joins(eq) for side in runs if side.on_host for eq in side.equations)


@functools.cache
def host_refusal(mesh: Mesh, joined: bool) -> str | None:
    """Return the first line of the backend's error for a tiny update; None if it compiles."""
    size = mesh.size * 2
    spec = PartitionSpec(mesh.axis_names)
    split = functools.partial(NamedSharding, mesh, spec)
    moments = jax.ShapeDtypeStruct((size,), jnp.float32, sharding=split(memory_kind=PINNED))
    gradient = jax.ShapeDtypeStruct((size,), jnp.float32, sharding=split())

    def compute(moments: jax.Array, gradient: jax.Array) -> list[jax.Array]:
        # This leaf's last element is padding.
        new = 0.5 * moments[:-1] + gradient[:-1]
        new = new / jnp.sqrt(jnp.sum(new * new)) if joined else jnp.sqrt(new)
        return [jnp.pad(new, (0, 1))]

    def update(moments: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        shapes = [jax.ShapeDtypeStruct((size,), jnp.float32)] * 2
        program, _ = trace(compat.compute_on_host(compute), *shapes)
        (new,) = program(moments, to_host(gradient))
        return jax.device_put(new, split(memory_kind=PINNED)), to_device(new)

    try:
        jax.jit(update, donate_argnums=0).lower(moments, gradient).compile()
    except (RuntimeError, ValueError) as error:  # from the compiler; from the lowering
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None
