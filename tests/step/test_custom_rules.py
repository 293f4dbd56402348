"""Functions with a derivative of their own, that close over arrays or index constants in backward,
as JAX's `odeint` does: they train as in plain JAX, over every axis."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.ode import odeint
from tools.quick import quick_compilation  # noqa: F401

import zeroxla

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(0)
BATCH = {
    name: np.random.default_rng(i).normal(size=(8, 6)).astype(np.float32)
    for i, name in enumerate(("x", "y"))
}


def solved(x, w):
    return odeint(lambda y, t, w: jnp.tanh(y @ w), x, jnp.array([0.0, 1.0]), w, rtol=1e-2)[-1]


def indexed(x, w):
    """Backward reads a constant at a traced place."""
    times = jnp.array([1.0, 2.0, 3.0])

    @jax.custom_vjp
    def f(x, w, times):
        return x @ w * times.sum()

    def backward(kept, ct):
        x, w, times = kept
        total = jax.lax.fori_loop(0, 3, lambda i, a: a + times[i], 0.0)
        return ct @ w.T * total, x.T @ ct * total, jnp.zeros(3)

    f.defvjp(lambda *args: (f(*args), args), backward)
    return f(x, w, times)


def closed_over(x, w, *, made=lambda w: np.linspace(0, 1, 6, dtype="float32")):
    """Rules that close over an array, in a scan of remat."""
    scale = made(w)

    @jax.custom_vjp
    def f(x):
        return jnp.tanh(x) * scale

    f.defvjp(lambda x: (f(x), x), lambda x, ct: (ct * scale / jnp.cosh(x) ** 2,))

    @jax.custom_jvp
    def g(x):
        return jnp.sin(x) * scale

    g.defjvps(lambda t, y, x: t * jnp.cos(x) * scale)

    def turn(x, _):
        return jax.checkpoint(lambda x: g(f(x @ w)))(x), None

    return jax.lax.scan(turn, x, length=2)[0]


class Model(nn.Module):
    kind: object

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            w = self.param(f"w{i}", nn.initializers.normal(0.3), (6, 6))
            x = nn.Dense(6, name=f"dense{i}")(self.kind(x, w))
        return x


def loss(apply, batch, *, train):
    return jnp.mean((apply(batch["x"]) - batch["y"]) ** 2)


def made(kind, axis):
    if axis == "pipe":
        mesh = zeroxla.make_mesh(pipe=2, nodes=1, devices_per_node=4)
        model = zeroxla.Pipeline.from_model(Model(kind), loss)
        return zeroxla.make_step(model, mesh, optax.sgd(0.1), microbatches=2)
    axes = {axis: 2, "devices_per_node": 2} if axis else {"devices_per_node": 4}
    config = zeroxla.ZeroConfig(persistence_threshold=0)
    mesh = zeroxla.make_mesh(nodes=2, **axes)
    return zeroxla.make_step(Model(kind), mesh, optax.sgd(0.1), loss=loss, config=config)


def gradients(kind, axis):
    step = made(kind, axis)
    state = step.init(KEY, BATCH)
    return state, step.grad(state, BATCH)


@pytest.mark.parametrize(
    ("kind", "axis"),
    [
        *((kind, axis) for kind in (solved, closed_over) for axis in (None, "pipe")),
        (closed_over, "tensor"),
        pytest.param(solved, "tensor", marks=pytest.mark.slow),
        *((indexed, axis) for axis in (None, "pipe")),
    ],
)
def test_gradients_are_those_of_plain_jax(kind, axis):
    state, (value, grads) = gradients(kind, axis)

    def expected(params, x, y):
        return jnp.mean((Model(kind).apply({"params": params}, x) - y) ** 2)

    # The steps that odeint takes depend on its rows.
    num_slices = 2 if axis == "tensor" else 8
    slices = [x.reshape(num_slices, -1, 6) for x in (BATCH["x"], BATCH["y"])]

    @jax.jit
    def of_slices(params):
        return jax.lax.map(lambda xy: jax.value_and_grad(expected)(params, *xy), slices)

    values, wanted = of_slices(zeroxla.full_params(state))
    np.testing.assert_allclose(value, values.mean(), rtol=1e-4 if kind is solved else 1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b.mean(0))
        assert np.abs(a - b).max() <= (1e-3 if kind is solved else 1e-5) * np.abs(b).max()


@pytest.mark.parametrize("axis", [None, "tensor", "pipe"])
def test_a_rule_that_closes_over_what_the_model_computes_is_named(axis):
    def kind(x, w):
        return closed_over(x, w, made=lambda w: jax.lax.stop_gradient(jnp.abs(w).mean(0)))

    message = r"the function f \(step/test_custom_rules.py:\d+\) .* closes over an array"
    with pytest.raises(ValueError, match=message):
        gradients(kind, axis)


def test_a_rule_that_closes_over_what_is_trained_is_named():
    def kind(x, w):
        @jax.custom_vjp
        def f(x):
            return x @ w

        f.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
        return f(x)

    with pytest.raises(ValueError, match=r"function f .* that a gradient reaches"):
        gradients(kind, None)
