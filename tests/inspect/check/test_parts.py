"""The parts of `zeroxla.check` that read a program, on programs that are traced for it."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import zeroxla
from zeroxla.inspect.check.collectives import check_collectives
from zeroxla.inspect.check.repeats import first_difference
from zeroxla.inspect.check.varying_values import find_partings
from zeroxla.inspect.check.whole_leaves import check_whole_leaves
from zeroxla.program.trace import trace
from zeroxla.program.walk import body_of

BOTH = ("node", "device")
MESH = zeroxla.make_mesh(nodes=2)
ROWS = jax.ShapeDtypeStruct((16, 4), jnp.float32)


def on_devices(fun):
    """The program of a function that all devices run, each on rows of its own."""
    mapped = jax.shard_map(
        fun, mesh=MESH, in_specs=PartitionSpec(BOTH), out_specs=PartitionSpec(BOTH), check_vma=False
    )
    return trace(mapped, ROWS)[0]


def branch(decision, x, axes=BOTH):
    """Exchange values over axes in one of two branches."""
    return jax.lax.cond(decision > 0, lambda x: jax.lax.pmean(x, axes), lambda x: x, x)


def alike(x):
    return jax.lax.cond(
        x.sum() > 0, lambda x: jax.lax.psum(x, BOTH), lambda x: -jax.lax.psum(x, BOTH), x
    )


def agreed_in_nodes(x, axes):
    return branch(jax.lax.pmax(x.sum(), "device"), x, axes)


def in_groups(x):
    pairs = [[0, 1], [2, 3]]
    seen = jax.lax.all_gather(jax.lax.pmax(x.sum(), "node"), "device", axis_index_groups=pairs)
    return branch(seen.sum(), x, "device")


def after_a_loop(x):
    """The sum begins equal on all devices, and each adds its own rows."""
    total = jax.lax.fori_loop(0, 3, lambda i, total: total + x.sum(), 0.0)
    return branch(total, x)


def own_turns(x):
    return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + jax.lax.pmean(x, "node"), x)


PARTINGS = [
    (lambda x: branch(x.sum(), x), {"node", "device"}, True),
    (lambda x: branch(jax.lax.pmax(x.sum(), BOTH), x), None, None),
    (alike, {"node", "device"}, False),
    (lambda x: agreed_in_nodes(x, "device"), None, None),
    (lambda x: agreed_in_nodes(x, "node"), {"node"}, True),
    (lambda x: branch(jax.lax.axis_index("node"), x), {"node"}, True),
    (in_groups, {"device"}, True),
    (after_a_loop, {"node", "device"}, True),
    (own_turns, {"node"}, True),
]


@pytest.mark.parametrize(("fun", "axes", "differs"), PARTINGS)
def test_where_devices_part(fun, axes, differs):
    (mapped,) = on_devices(fun).equations
    body = body_of(mapped.params["jaxpr"])
    found = find_partings(body, [frozenset(BOTH)] * len(body.inputs), "cpu")
    if axes is None:
        assert found == []
    else:
        (parting,) = found
        assert (set(parting.axes), parting.differs) == (axes, differs)


def test_branches_with_the_same_collectives_are_a_notice():
    result = check_collectives(SimpleNamespace(mesh=MESH, step_program=on_devices(alike)))
    assert result.verdict == "notice"
    assert "check/test_parts.py:" in result.found


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda x, y: jnp.sin(x) * y, None),
        (lambda x, y: jnp.cos(x) * y, "became cos float32[3] from float32[3]"),
        (lambda x, y: jnp.sin(y) * x, "sin at check/test_parts.py:"),
        (lambda x, y: jnp.sin(x) * y + 1, "it has 2 equations, and then 3"),
        (lambda x, y: jnp.sin(x), "it has 2 equations, and then 1"),
    ],
)
def test_how_two_traces_differ(other, words):
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    first, second = (trace(fun, shape, shape)[0] for fun in (lambda x, y: jnp.sin(x) * y, other))
    found = first_difference(first, second)
    assert found is None if words is None else words in found
    if words and words.startswith("sin"):
        assert found.endswith("reads other values than before")


@pytest.mark.parametrize(("size", "verdict"), [(20, "ok"), (30, "notice")])
def test_a_large_model_state_is_a_notice(size, verdict):
    split = SimpleNamespace(elements=100, placement=SimpleNamespace(dim=0))

    class Leaves(list):
        leaves = (split,)

    result = check_whole_leaves(
        SimpleNamespace(
            layout=Leaves([split]),
            mesh=MESH,
            model_state={"stats": {"mean": np.ones(size)}},
            programs={True: trace(lambda x: x + 1, 1.0)[0]},
        )
    )
    assert result.verdict == verdict
    if verdict == "notice":
        assert "(model state) whole, 30% of the size of the parameters" in result.found
        assert "stats/mean 30" in result.found
