"""Which line of the model a collective works for."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec
from tools.devices import made_device

from zeroxla.planning.explain.origins import Origins
from zeroxla.planning.target import Target
from zeroxla.program import compat
from zeroxla.program.primitives import HLO_KINDS
from zeroxla.program.trace import trace
from zeroxla.program.walk import local_of, scope_path

TARGET = Target(device=made_device(1e9), links={}, mesh_shape={"device": 4})
X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def scopes_of(function):
    """The scope that each collective of a function works for."""
    mesh, whole = AbstractMesh((4,), ("device",)), PartitionSpec()
    mapped = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    program = local_of(trace(mapped, X, opened=compat.forward_jaxpr)[0])
    flow = SimpleNamespace(sources={}, targets={})
    names = Origins(target=TARGET, flow=flow, leaf_names=[], units=[], program=program)
    collectives = [eq for eq in program.equations if eq.name in HLO_KINDS]
    origins = [names.of(eq, scope_path(eq, ""), None) for eq in collectives]
    assert all(origin.line.startswith("explain/test_origins.py:") for origin in origins)
    return [origin.scope for origin in origins]


def gather(x):
    with jax.named_scope("gather"):
        return lax.all_gather(x, "device", tiled=True)


def reduce(x):
    with jax.named_scope("reduce"):
        return lax.psum_scatter(x, "device", scatter_dimension=1)


def within(scope, function, x):
    with jax.named_scope(scope):
        return function(x)


def read_twice(x):
    whole = gather(x)
    return within("first", jnp.sin, whole), within("second", jnp.cos, whole)


def behind_a_barrier_and_a_cast(x):
    one, other = lax.optimization_barrier((gather(x), gather(2 * x)))
    made = within("first", jnp.sin, other.astype(jnp.bfloat16))
    return made, within("second", jnp.cos, one)


def made_and_read(x):
    y = within("made", lambda x: x @ x, x)
    return within("read", jnp.sin, reduce(y[:, :4]))


@pytest.mark.parametrize(
    ("function", "scopes"),
    [
        (read_twice, ["first"]),
        (behind_a_barrier_and_a_cast, ["second", "first"]),
        (made_and_read, ["made"]),
    ],
)
def test_a_gather_is_for_its_first_reader_and_a_reduce_for_its_maker(function, scopes):
    assert scopes_of(function) == scopes
