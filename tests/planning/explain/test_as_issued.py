"""The clock that follows the compiler closely in loops whose gathers run a turn ahead.

A device of one of 4 computes here a product of [256,256] in `PRODUCT_S`, and memory takes nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec
from tools.devices import made_device

from zeroxla.mesh.machines import Link
from zeroxla.planning.target import Target
from zeroxla.planning.timeline import Clock
from zeroxla.program import compat
from zeroxla.program.trace import trace
from zeroxla.program.walk import local_of

FLOPS_PER_S = 2.5e11
PRODUCT_S = 2 * 256**3 / FLOPS_PER_S
LINK = Link(name="wire", bytes_per_s=1e9, latency_s=0.0, of="device", source="a test")
TARGET = Target(device=made_device(FLOPS_PER_S), links={"device": LINK}, mesh_shape={"device": 4})
X = jax.ShapeDtypeStruct((256, 256), jnp.float32)


def seconds_of(function, *shapes, as_issued):
    mesh, whole = AbstractMesh((4,), ("device",)), PartitionSpec()
    mapped = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    program = local_of(trace(mapped, *shapes, opened=compat.forward_jaxpr)[0])
    clock = Clock(TARGET, ahead=True, as_issued=as_issued)
    clock.run(program, [0.0] * len(program.inputs))
    return clock.timeline().seconds


def gather(x):
    with jax.named_scope("gather"):
        return lax.all_gather(x, "device", tiled=True)


def gather_s(rows):
    """The time of a gather of so many rows of 256 numbers from each device."""
    return 3 * rows * 256 * 4 / 1e9


@pytest.mark.parametrize("as_issued", [False, True])
def test_what_a_reduce_has_brought_holds_nothing_up(as_issued):
    def step(x, y, small):
        with jax.named_scope("reduce"):
            shard = lax.psum_scatter(x, "device", tiled=True)
            put = shard @ jnp.tile(x, (1, 4))  # as long as a product
        return put, (y + gather(small)[0]) @ y

    reduce_s, own_s = gather_s(64), gather_s(4)
    assert own_s < PRODUCT_S
    small = jax.ShapeDtypeStruct((4, 256), jnp.float32)
    waits_s = own_s if as_issued else PRODUCT_S
    found = seconds_of(step, X, X, small, as_issued=as_issued)
    assert found == pytest.approx(reduce_s + waits_s + PRODUCT_S)


@pytest.mark.parametrize("as_issued", [False, True])
def test_a_gather_may_take_its_link_before_the_reduce_of_the_turn_before(as_issued):
    def step(x, shards):
        def turn(c, shard):
            shard, c = lax.optimization_barrier((shard, c))
            y = c @ jnp.tile(gather(shard), (8, 1))
            with jax.named_scope("reduce"):
                return y, lax.psum_scatter(y[:32], "device", tiled=True)

        return lax.scan(turn, x, shards)

    each_s = gather_s(8)  # of the reduce, too
    assert 2 * each_s < PRODUCT_S
    shards = jax.ShapeDtypeStruct((9, 8, 256), jnp.float32)
    found = seconds_of(step, X, shards, as_issued=as_issued)
    turn_s = PRODUCT_S if as_issued else PRODUCT_S + 2 * each_s
    assert found == pytest.approx(9 * turn_s + (2 * each_s if as_issued else 0))


def test_a_gather_runs_one_turn_ahead_and_no_more():
    def step(x, shards):
        def turn(c, shard):
            shard, c = lax.optimization_barrier((shard, c))
            return c @ gather(shard)[:256], None

        for _ in range(100):
            x = x @ x
        return lax.scan(turn, x, shards)[0]

    each_s = gather_s(256)
    assert PRODUCT_S < each_s < 30 * PRODUCT_S
    shards = jax.ShapeDtypeStruct((3, 256, 256), jnp.float32)
    found = seconds_of(step, X, shards, as_issued=True)
    # The first one is hidden by what runs before the loop. The others begin with the turn before.
    assert found == pytest.approx(101 * PRODUCT_S + 2 * each_s)


def test_what_is_computed_from_leaves_alone_does_not_run_ahead():
    def step(x, shards):
        def turn(c, shard):
            shard, c = lax.optimization_barrier((shard, c))
            whole = jnp.tile(gather(shard), (8, 1))
            square = whole @ whole
            with jax.named_scope("reduce"):
                part = lax.psum_scatter(square, "device", tiled=True)
            return c @ whole, part

        return lax.scan(turn, x, shards)

    gather_ahead_s, reduce_s = gather_s(8), gather_s(64)
    assert PRODUCT_S < reduce_s < 2 * PRODUCT_S - gather_ahead_s
    shards = jax.ShapeDtypeStruct((3, 8, 256), jnp.float32)
    found = seconds_of(step, X, shards, as_issued=True)
    # The last square is reduced beside the last product, and beyond it.
    assert found == pytest.approx(gather_ahead_s + 5 * PRODUCT_S + reduce_s)
