"""fp8 dots, whose scales and histories are overwritten with their gradients, beside flax's own
train state."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla

pytestmark = pytest.mark.usefixtures("quick_compilation")

COLLECTION = "_overwrite_with_gradient"
KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(16, 16)).astype(np.float32),
    "y": RNG.normal(size=(16, 8)).astype(np.float32),
}


class Layer(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, _):
        x = nn.Dense(32, dtype=self.dtype, dot_general_cls=nn.Fp8DotGeneral)(x)
        return nn.tanh(x), None


class Net(nn.Module):
    dtype: jnp.dtype = jnp.float32
    scanned: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        x, _ = Layer(self.dtype)(x, None)
        if self.scanned:
            layers = nn.scan(
                nn.remat(Layer) if self.remat else Layer,
                variable_axes={"params": 0, COLLECTION: 0},
                split_rngs={"params": True},
                length=3,
            )
            x, _ = layers(self.dtype)(x, None)
        return nn.Dense(8, dtype=self.dtype, dot_general_cls=nn.Fp8DotGeneral)(x)


class FromNnx(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(16, 32, rngs=rngs)
        dense = nn.Dense(8, dot_general_cls=nn.Fp8DotGeneral)
        self.second = nnx.bridge.ToNNX(dense, rngs=rngs).lazy_init(jnp.ones((2, 32)))

    def __call__(self, x):
        return self.second(nn.tanh(self.first(x)))


def loss(apply, batch, *, train):
    return jnp.mean((apply(batch["x"]) - batch["y"]).astype(jnp.float32) ** 2)


def difference(a, b):
    """The largest difference, relative to the leaf's largest element."""
    return max(
        float(np.max(np.abs(x - np.asarray(y))) / np.max(np.abs(y)))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


AXES = [
    pytest.param({"tensor": 2}, {}, id="tensor", marks=pytest.mark.slow),
    pytest.param(
        {"tensor": 2}, {"scanned": True, "remat": True}, id="tensor, remat", marks=pytest.mark.slow
    ),
    pytest.param({"expert": 2}, {"scanned": True}, id="expert", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("axes", "options"), AXES)
def test_axes_that_split_the_work_on_a_row_leave_the_histories(axes, options):
    """A conversion keeps the value of an array, so what is overwritten is not summed."""
    test_it_trains_as_with_flaxs_train_state(
        zeroxla.make_mesh(nodes=2, **axes),
        Net(**options),
        zeroxla.ZeroConfig(persistence_threshold=0),
        1e-6,
    )


@pytest.mark.parametrize(
    ("net", "config", "tolerance"),
    thinned(
        [(Net(), zeroxla.ZeroConfig(), 1e-6)],
        slow=[
            (Net(scanned=True, remat=True), zeroxla.ZeroConfig(persistence_threshold=0), 1e-6),
            (Net(scanned=True), zeroxla.ZeroConfig(persistence_threshold=0), 1e-6),
            # Of numbers with 3 bits, one that is rounded the other way differs by up to a quarter.
            (Net(dtype=jnp.bfloat16), zeroxla.ZeroConfig(compute_dtype="bfloat16"), 0.1),
        ],
        rows=True,
    ),
    ids=["whole", "remat", "scanned", "bfloat16"],
)
def test_it_trains_as_with_flaxs_train_state(mesh24, net, config, tolerance):
    step = zeroxla.make_step(net, mesh24, optax.sgd(0.1), loss=loss, config=config)
    state = step.init(KEY, BATCH)
    before = jax.tree.map(np.asarray, state.model_state)
    start = {"params": zeroxla.full_params(state), **before}
    flaxs = TrainState.create(apply_fn=net.apply, params=start, tx=optax.sgd(0.1))

    @jax.jit
    def reference(state):
        def whole(variables):
            return loss(lambda x: net.apply(variables, x), BATCH, train=True)

        value, gradients = jax.value_and_grad(whole)(state.params)
        return state.apply_gradients(grads=gradients), value

    for _ in range(3):
        state, metrics = step(state, BATCH)
        flaxs, expected = reference(flaxs)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=tolerance)
    expected = dict(flaxs.params)
    assert difference(zeroxla.full_params(state), expected.pop("params")) < tolerance
    assert difference(state.model_state, expected) < tolerance
    assert difference(before, expected) > 0.5  # they did change


def test_micro_batches_and_a_skipped_step(mesh24):
    """Each micro-batch takes the scales that the one before left; a step that is skipped leaves
    them as they were."""
    config = zeroxla.ZeroConfig(accumulate=2)
    step = zeroxla.make_step(Net(), mesh24, optax.sgd(0.1), loss=loss, config=config)
    state = step.init(KEY, BATCH)
    before = jax.tree.map(np.asarray, state.model_state)
    state, _ = step(state, BATCH)
    layer = state.model_state[COLLECTION]["Layer_0"]["Dense_0"]["Fp8DirectDotGeneralOp_0"]
    rows = BATCH["x"].reshape(8, 2, -1)[:, 1]  # each device's second micro-batch
    np.testing.assert_allclose(layer["input_amax_history"][0], np.abs(rows).max())
    assert (
        layer["input_scale"]
        != before[COLLECTION]["Layer_0"]["Dense_0"]["Fp8DirectDotGeneralOp_0"]["input_scale"]
    )
    kept = jax.tree.map(np.asarray, state.model_state)
    state, metrics = step(state, {**BATCH, "y": BATCH["y"] * np.inf})
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, state.model_state, kept)


@pytest.mark.slow
def test_a_linen_layer_inside_of_nnx(mesh24):
    step = zeroxla.make_step(lambda rngs: FromNnx(rngs), mesh24, optax.sgd(0.1), loss=loss)
    state, _ = step(step.init(KEY, BATCH), BATCH)
    scales = state.model_state["second"]["Fp8DirectDotGeneralOp_0"]
    kernel = zeroxla.full_params(step.init(KEY, BATCH))["second"]["kernel"]
    np.testing.assert_allclose(scales["kernel_amax_history"][0], np.abs(kernel).max())
