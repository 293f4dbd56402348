"""Tracing: a function becomes a flat program that computes the same, under every transformation."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tools.quick import quick_compilation  # noqa: F401

from zeroxla.program.trace import Value, active_values, closure, flatten_behind, trace
from zeroxla.program.walk import local_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

W = jnp.linspace(-1, 1, 9).reshape(3, 3)
X = jnp.arange(6.0).reshape(2, 3) / 6
TABLE = np.arange(3.0, dtype=np.float32)


@jax.custom_vjp
def ruled(w, x):
    return x @ w


ruled.defvjp(lambda w, x: (x @ w, (w, x)), lambda saved, ct: (2 * saved[1].T @ ct, ct @ saved[0].T))


def everything(w, x):
    """Jit in jit, remat, scan, cond, while, custom rules, closed-over arrays, several results."""
    y = jax.jit(lambda x: jax.jit(jnp.tanh)(x) + TABLE)(x)
    y = jax.checkpoint(lambda y: jax.nn.gelu(y @ w))(y)
    y, sums = lax.scan(lambda y, row: (y * row, y.sum()), y, w)
    y = ruled(w, jax.nn.relu(y))
    y = lax.cond(y.sum() > 0, lambda y: y @ w, lambda y: -y, y)
    n = lax.while_loop(lambda n: n < 3, lambda n: n + 1, 0)
    return {"loss": y.sum() + sums.sum(), "n": n, "x": x, "one": 1.0}


def test_a_program_computes_what_the_function_does():
    program, tree = trace(everything, W, X)
    expected = everything(W, X)
    for run in (program, jax.jit(lambda *args: program(*args))):
        found = tree.unflatten(run(W, X))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
    names = {eq.name for eq in program.equations}
    assert {"scan", "cond"} <= names
    assert not names & {"jit", "pjit"}
    # The scan, the rule and the checkpoint stay one equation each.
    assert "dot_general" not in names - {"cond"}


def test_a_program_can_be_differentiated_and_batched():
    program, tree = trace(everything, W, X)

    def loss(w):
        return tree.unflatten(program(w, X))["loss"]

    expected = jax.grad(lambda w: everything(w, X)["loss"])
    np.testing.assert_allclose(jax.grad(loss)(W), expected(W), rtol=1e-5)
    many = jnp.stack([W, 2 * W])
    np.testing.assert_allclose(jax.vmap(loss)(many), [loss(w) for w in many], rtol=1e-5)


def test_a_program_traces_from_shapes_alone():
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (W, X)]
    program, tree = trace(everything, *shapes)
    assert [v.aval.shape for v in program.inputs] == [(3, 3), (2, 3)]
    jax.tree.map(np.testing.assert_allclose, tree.unflatten(program(W, X))["x"], X)


def test_what_nothing_reads_is_dropped_and_effects_stay():
    seen = []

    def function(w, x):
        jnp.linalg.inv(w)
        jax.debug.callback(lambda x: seen.append(float(x)), x.sum())
        return jax.jit(lambda x: (x + 1, jnp.exp(x)))(x)[0]

    program, _ = trace(function, W, X)
    names = [eq.name for eq in program.equations]
    assert "exp" not in names
    assert len(names) == 3
    jax.block_until_ready(program(W, X))
    jax.effects_barrier()
    assert seen == [pytest.approx(float(X.sum()))]


def test_a_function_called_twice_gives_values_of_its_own():
    twice = jax.jit(jnp.sin)
    program, _ = trace(lambda x: twice(twice(x)), X)
    outputs = [v for eq in program.equations for v in eq.outputs]
    assert len(outputs) == len(set(outputs)) == 2


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 1), reason="closed calls bind otherwise")
def test_a_closed_call_is_inlined():
    call = jex.primitives.closed_call_p.bind
    body = jax.make_jaxpr(jnp.sin)(X)
    program, _ = trace(lambda x: call(2 * x, call_jaxpr=body), X)
    assert [eq.name for eq in program.equations] == ["mul", "sin"]


def test_effects_and_collectives_are_pinned():
    def function(x):
        jax.debug.callback(lambda x: None, x)
        return lax.psum(jnp.sin(x), "rows") + lax.pmax(x, "rows")

    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("rows")
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = local_of(trace(mapped, X)[0])
    pinned = {eq.name for eq in program.equations if eq.is_pinned}
    assert {"psum", "pmax"} <= pinned
    assert {eq.name for eq in program.equations} - pinned == {"sin", "add"}


def test_equations_keep_their_named_scopes():
    def function(x):
        with jax.named_scope("outer"):
            return jax.jit(lambda x: jnp.sin(x))(x)

    program, _ = trace(function, X)
    assert "outer" in str(program.equations[0].name_stack)
    text = jax.jit(lambda x: program(x)).lower(X).compile().as_text()
    assert "outer" in text


def test_equations_may_run_before_a_jaxpr():
    scaled, _ = trace(lambda w: 2 * w, W)
    inner = jax.make_jaxpr(lambda x, w: x @ w)(X, W)
    x = Value(inner.in_avals[0])
    inputs = [*scaled.inputs, x]
    program = flatten_behind(inner, inputs, scaled.equations, [x, scaled.outputs[0]])
    np.testing.assert_allclose(program(W, X)[0], X @ (2 * W), rtol=1e-6)


def test_the_closure_of_a_value_is_what_it_needs():
    program, _ = trace(lambda a, b, c: jnp.sin(a) * jnp.cos(b) + c, X, X, X)
    producers = {v: eq for eq in program.equations for v in eq.outputs}
    product = next(eq for eq in program.equations if eq.name == "mul")
    equations, roots = closure(product.outputs, producers)
    assert [eq.name for eq in equations][-1] == "mul"
    assert {eq.name for eq in equations} == {"sin", "cos", "mul"}
    assert set(roots) == set(program.inputs[:2])
    # Values that nothing makes are their own roots.
    assert closure(program.inputs, producers)[0] == []


def names_of_active(function, *args, of=(0,)):
    program, _ = trace(function, *args)
    active = active_values(program.equations, [program.inputs[i] for i in of], program.outputs)
    return {eq.name for eq in program.equations if not active.isdisjoint(eq.outputs)}


def test_a_gradient_flows_where_input_and_output_are_both_reached():
    def function(w, x):
        side = jnp.exp(w).sum() * 0.0  # Reached from w; the first output does not need it.
        still = lax.stop_gradient(jnp.sin(w))
        return jnp.cos(w @ x.T) + still.sum() + jnp.log(x).sum(), jnp.argmax(side)

    found = names_of_active(function, W, X)
    assert {"dot_general", "cos"} <= found
    assert not found & {"sin", "stop_gradient", "log", "exp", "argmax"}
    assert "log" in names_of_active(function, W, X, of=(1,))


@pytest.mark.parametrize("name", ["sign", "floor", "ceil", "round"])
def test_no_gradient_crosses_a_step_function(name):
    found = names_of_active(lambda w: getattr(jnp, name)(jnp.sin(w)).sum(), W)
    assert "sin" not in found
    assert "reduce_sum" not in found
