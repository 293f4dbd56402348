"""The walk through a program: which equations it meets, where, and how often they run."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from zeroxla.program import compat
from zeroxla.program.trace import trace
from zeroxla.program.walk import local_of, walk

X = jnp.ones(2)


def nested(x):
    def inner(x, _):
        return lax.cond(x.sum() > 0, jnp.sin, lambda x: jnp.cos(jnp.exp(x)), x), None

    def outer(x, _):
        with jax.named_scope("outer"):
            return lax.scan(inner, jnp.tanh(x), length=3)[0], None

    x = lax.scan(outer, x, length=5)[0]
    x = lax.while_loop(lambda x: x.sum() < 3, lambda x: x * jnp.log(x), x)
    return jax.checkpoint(jnp.sqrt)(x)


@pytest.mark.smoke
def test_each_equation_is_met_with_its_loops_and_branches():
    program, _ = trace(nested, X, opened=compat.forward_jaxpr)
    met = {visit.equation.name: visit for visit in walk(program, "cpu")}
    counts = {name: met[name].count for name in ("tanh", "sin", "cos", "log", "sqrt")}
    assert counts == {"tanh": 5, "sin": 15, "cos": 15, "log": 1, "sqrt": 1}
    assert met["tanh"].path == "scan/outer/tanh"
    assert met["sin"].path == "scan/outer/scan/cond/sin"
    assert met["tanh"].branches == ()
    ((first, which),) = met["sin"].branches
    ((same, other),) = met["exp"].branches
    assert (first, {which, other}) == (same, {0, 1})


def test_a_walk_takes_the_branch_of_its_platform():
    def function(x):
        return lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.cos, default=jnp.tan)

    program, _ = trace(function, X)
    for platform, name in (("cpu", "sin"), ("gpu", "cos"), ("tpu", "tan")):
        names = [visit.equation.name for visit in walk(program, platform)]
        assert set(names) & {"sin", "cos", "tan"} == {name}


def test_each_device_runs_the_body_of_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    mapped = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    program, _ = trace(lambda x: mapped(2 * x), X)
    assert [eq.name for eq in local_of(program).equations] == ["sin"]
    assert [visit.path for visit in walk(program, "cpu")][-1] == "shard_map/sin"
