"""Complex parameters, as state-space models have them: trained as pairs of floats, one leaf to the
user."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.reference import relative_errors, worst

import zeroxla

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(0)
WIDTH, STATES = 6, 16
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(16, 4, WIDTH)).astype(np.float32)}


def random(key, shape):
    return 0.3 * jax.random.normal(key, shape, jnp.complex64)


def recurrence(rate, into, out, x):
    """y[t] = Re(out h[t]), h[t] = rate h[t-1] + into x[t]."""
    u = jnp.einsum("blw,ws->bls", x.astype(into.dtype), into)
    rates = jnp.broadcast_to(rate, u.shape)

    def join(a, b):
        return a[0] * b[0], b[0] * a[1] + b[1]

    _, h = jax.lax.associative_scan(join, (rates, u), axis=1)
    return jnp.einsum("bls,sw->blw", h, out).real


class Space(nn.Module):
    @nn.compact
    def __call__(self, x):
        rate = self.param("rate", random, (STATES,))
        into = self.param("into", random, (WIDTH, STATES))
        out = self.param("out", random, (STATES, WIDTH))
        seen = self.variable("running", "response", lambda: jnp.zeros(STATES, jnp.complex64))
        if not self.is_initializing() and self.is_mutable_collection("running"):
            seen.value = 0.5 * seen.value + x.mean() * rate
        return nn.Dense(WIDTH)(recurrence(rate, into, out, x))


class SpaceNnx(nnx.Module):
    def __init__(self, rngs):
        self.rate = nnx.Param(random(rngs.params(), (STATES,)))
        self.into = nnx.Param(random(rngs.params(), (WIDTH, STATES)))
        self.out = nnx.Param(random(rngs.params(), (STATES, WIDTH)))
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs)])

    def __call__(self, x):
        return self.layers[0](recurrence(self.rate[...], self.into[...], self.out[...], x))


def loss(apply, batch, *, train):
    return jnp.mean((apply(batch["x"]) - batch["x"][:, ::-1]) ** 2)


def pair():
    def init(key, batch):
        keys = jax.random.split(key, 3)
        shapes = {"rate": (STATES,), "into": (WIDTH, STATES), "out": (STATES, WIDTH)}
        return {name: random(k, s) for (name, s), k in zip(shapes.items(), keys, strict=True)}

    return init, lambda params, batch, key: loss(
        lambda x: recurrence(x=x, **params), batch, train=True
    )


def difference(found, expected):
    """The worst relative difference of a leaf's real or imaginary part."""
    both = [
        jax.tree.map(lambda x: {"re": x.real, "im": x.imag}, tree) for tree in (found, expected)
    ]
    return worst(relative_errors(*both))[1]


def plain(kind):
    """Return loss(params, state) of the model as its users write it."""
    if kind == "pair":
        return lambda params, state: pair()[1](params, BATCH, KEY)
    if kind == "linen":
        return lambda params, state: loss(
            lambda x: Space().apply({"params": params, **state}, x), BATCH, train=True
        )

    def nnx_loss(params, state):
        module = SpaceNnx(nnx.Rngs(0))
        nnx.update(module, params)
        return loss(module, BATCH, train=True)

    return nnx_loss


MODELS = {"linen": Space(), "nnx": lambda rngs: SpaceNnx(rngs), "pair": pair()}


@pytest.fixture(scope="module")
def step_of(mesh24):
    """Steps by model and preset, made when asked for."""

    @functools.cache
    def get(kind, preset="zero3"):
        config = getattr(zeroxla.ZeroConfig, preset)(persistence_threshold=0, quantize_threshold=64)
        options = {} if kind == "pair" else {"loss": loss}
        return zeroxla.make_step(MODELS[kind], mesh24, optax.adam(1e-2), config=config, **options)

    return get


@pytest.mark.parametrize(
    ("kind", "preset"),
    thinned(
        [],
        slow=[
            ("linen", "zero3"),
            ("nnx", "zeropp"),
            ("pair", "zero3"),
            ("nnx", "zero3"),
            ("linen", "zeropp"),
            ("pair", "zeropp"),
        ],
        rows=True,
    ),
)
def test_gradients_are_those_of_plain_jax(step_of, kind, preset):
    step = step_of(kind, preset)
    state = step.init(KEY, BATCH)
    params = zeroxla.full_params(state)
    assert params["into"].dtype == np.complex64
    assert params["into"].shape == (WIDTH, STATES)
    value, found = step.grad(state, BATCH)
    expected_value, expected = jax.jit(jax.value_and_grad(plain(kind)))(
        params, jax.tree.map(np.asarray, state.model_state)
    )
    np.testing.assert_allclose(value, expected_value, rtol=2e-5 if preset == "zero3" else 2e-2)
    # The gradients of `zeropp` have 4 bits.
    tolerance = 2e-5 if preset == "zero3" else 0.15
    assert difference(found, jax.tree.map(jnp.conj, expected)) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "preset"),
    [(kind, preset) for preset in ("zero3", "zeropp") for kind in MODELS],
)
def test_they_are_trained(step_of, kind, preset):
    step = step_of(kind, preset)
    state, losses = step.init(KEY, BATCH), []
    for _ in range(5):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]


def test_state_of_complex_numbers_is_averaged(step_of):
    step = step_of("linen")
    state = step.init(KEY, BATCH)
    rate = zeroxla.full_params(state)["rate"]
    state, _ = step(state, BATCH)
    found = np.asarray(state.model_state["running"]["response"])
    np.testing.assert_allclose(found, BATCH["x"].mean() * rate, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_optimizers_see_two_real_matrices(step_of):
    """As with `optax.contrib.split_real_and_imaginary`, on the conjugate of jax.grad's gradient."""
    step = step_of("pair")
    state = step.init(KEY, BATCH)
    params = zeroxla.full_params(state)
    reference = optax.contrib.split_real_and_imaginary(optax.adam(1e-2))
    memory = reference.init(params)
    gradient_of = jax.jit(jax.grad(lambda params: plain("pair")(params, {})))
    for _ in range(3):
        state, _ = step(state, BATCH)
        gradient = jax.tree.map(jnp.conj, gradient_of(params))
        updates, memory = reference.update(gradient, memory, params)
        params = optax.apply_updates(params, updates)
    assert difference(zeroxla.full_params(state), params) < 2e-5


def test_a_checkpoint_keeps_them(step_of, tmp_path):
    step = step_of("linen")
    state, _ = step(step.init(KEY, BATCH), BATCH)
    with zeroxla.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        mesh = zeroxla.make_mesh(nodes=1, devices_per_node=4)
        other = zeroxla.make_step(Space(), mesh, optax.adam(1e-2), loss=loss)
        other.abstract_state(BATCH)
        restored = checkpoints.restore(other).state
    jax.tree.map(
        np.testing.assert_array_equal, zeroxla.full_params(restored), zeroxla.full_params(state)
    )


@pytest.mark.slow
def test_they_start_from_complex_arrays(step_of):
    step = step_of("linen")
    variables = Space().init(jax.random.key(7), BATCH["x"])
    state = step.init_from(variables, KEY, BATCH)
    jax.tree.map(np.testing.assert_array_equal, zeroxla.full_params(state), variables["params"])
