"""The optimizer's update of a sub-group where its arrays are: on the host."""

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


def run_stages(
    stages: Sequence[SideRun], env: Mapping[Value, Any], wanted: Sequence[Value]
) -> list[jax.Array]:
    """Compute a sub-group's equations, each stage on its side.

    Args:
      stages: in order.
      env: what they read.
      wanted: values.

    Returns:
      The arrays of these, each in the memory of the side that made it.
    """
    made = dict(env)
    moved: dict[tuple[Value, bool], jax.Array] = {}  # a value that both sides read moves once
    for i, stage in enumerate(stages):
        inside = dict.fromkeys(v for eq in stage.equations for v in eq.outputs)
        reads = [v for eq in stage.equations for v in eq.values if v not in inside]
        for v in reads:
            if (v, stage.on_host) not in moved:
                with jax.named_scope(SCOPE):
                    move = to_host if stage.on_host else to_device
                    moved[v, stage.on_host] = move(made[v])
        mine = {v: moved[v, stage.on_host] for v in reads}
        if stage.on_host:
            later = {v for other in stages[i + 1 :] for eq in other.equations for v in eq.values}
            made |= _on_host(stage, mine, [v for v in inside if v in later.union(wanted)])
        else:
            run(stage.equations, mine)
            made |= {v: mine[v] for v in inside}
    return [made[v] for v in wanted]


def _on_host(
    stage: SideRun, reads: Mapping[Value, jax.Array], wanted: Sequence[Value]
) -> dict[Value, jax.Array]:
    """Return the values of a stage that are wanted outside."""

    def compute(*args: jax.Array) -> list[jax.Array]:
        env = dict(zip(reads, args, strict=True))
        run(stage.equations, env)
        return [env[v] for v in wanted]

    # Traced as of arrays in device memory: not all of JAX's functions make their constants in the
    # host's, and none takes arrays in both.
    shapes = shapes_of(list(reads.values()))
    program, _ = trace(compat.compute_on_host(compute), *shapes)
    return dict(zip(wanted, program(*reads.values()), strict=True))


def check_host_compute(mesh: Mesh, *, joined: bool = False) -> None:
    """Check that a mesh's hosts can compute; nothing is known of an abstract one.

    Args:
      mesh: of the step.
      joined: whether they are to compute sums over arrays, too, which are split over devices.

    Raises:
      ValueError: the backend cannot compile it.

    Cost: the compilation of a few operations, once for a mesh.
    """
    if isinstance(mesh, AbstractMesh):
        return
    if (reason := _refusal(mesh, joined)) is not None:
        device = mesh.devices.flat[0]
        what = "the sums of this optimizer" if joined else "computation"
        raise ValueError(
            f"Offload(update='host') needs {what} on the host, which the backend of "
            f"{device.device_kind} ({device.platform}) with jax {jax.__version__} cannot compile: "
            f"{reason}; use Offload(update='device')"
        )


def host_joins(stages: Sequence[SideRun]) -> bool:
    """Return whether the host is to join elements of several devices."""
    return any(joins(eq) for stage in stages if stage.on_host for eq in stage.equations)


@functools.cache
def _refusal(mesh: Mesh, joined: bool) -> str | None:
    """Return the first line of what the backend says against a tiny update; None if nothing."""
    size = mesh.size * 2
    spec = PartitionSpec(mesh.axis_names)
    split = functools.partial(NamedSharding, mesh, spec)
    moments = jax.ShapeDtypeStruct((size,), jnp.float32, sharding=split(memory_kind=PINNED))
    gradient = jax.ShapeDtypeStruct((size,), jnp.float32, sharding=split())

    def compute(moments: jax.Array, gradient: jax.Array) -> list[jax.Array]:
        # As of a leaf whose last element is padding.
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
    except (RuntimeError, ValueError) as error:  # of the compiler; of what lowers to its programs
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None
