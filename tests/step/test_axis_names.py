"""Models that sum over devices by a name of their own, as those written for `pmap` do."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.lax import pmean  # bound before zeroxla traces a model
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla.models import GPT

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)


class Synced(nn.Module):
    """Batch statistics, and a mean and a place among the devices by hand."""

    axis: object

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, axis_name=self.axis)(nn.Dense(6)(x))
        if train and not self.is_initializing():
            x = x - centred(x, self.axis) / jax.lax.axis_size(self.axis)
            x = x * (1 + jax.lax.axis_index(self.axis))
            everybody = jax.lax.all_gather(x, axis_name=self.axis, tiled=True)
            x = x + jnp.max(everybody)
        return nn.Dense(2)(x)


def centred(x, axis):
    """A mean inside of a custom rule."""

    @jax.custom_vjp
    def mean(x):
        return pmean(x, axis)

    mean.defvjp(lambda x: (pmean(x, axis), None), lambda _, ct: (pmean(ct, axis),))
    return mean(x)


class SyncedNnx(nnx.Module):
    def __init__(self, axis, rngs):
        self.first = nnx.Linear(6, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, axis_name=axis, rngs=rngs)

    def __call__(self, x, train):
        return self.norm(self.first(x))


def loss(apply, batch, *, train):
    return jnp.mean(apply(batch, train) ** 2)


def run(model, mesh, **options):
    step = zeroxla.make_step(model, mesh, optax.sgd(0.5), loss=loss, **options)
    state, metrics = step(step.init(KEY, X), X)
    evaluated = step.eval(state, X)
    return jax.tree.map(np.asarray, (state.params, state.model_state, metrics["loss"], evaluated))


@pytest.mark.parametrize(
    "make", thinned([Synced], slow=[lambda axis: lambda rngs: SyncedNnx(axis, rngs)])
)
def test_a_name_of_the_models_own(mesh24, make):
    expected = run(make(("node", "device")), mesh24)
    found = run(make("batch"), mesh24, axis_names={"batch": ("node", "device")})
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
def test_a_name_for_one_axis_and_a_name_among_others(mesh24):
    expected = run(Synced("device"), mesh24)
    found = run(Synced("model"), mesh24, axis_names={"model": "device"})
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    expected = run(Synced(("node", "device")), mesh24)
    found = run(Synced(("hosts", "device")), mesh24, axis_names={"hosts": ["node"]})
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_statistics_are_those_of_the_whole_batch(mesh24):
    """Against flax on one device."""
    module = Synced("batch")
    step = zeroxla.make_step(
        module, mesh24, optax.sgd(0.0), loss=loss, axis_names={"batch": ("node", "device")}
    )
    state = step.init(KEY, X)
    params = zeroxla.full_params(state)
    state, _ = step(state, X)
    y = X @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
    statistics = state.model_state["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(statistics["mean"], 0.01 * y.mean(0), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(statistics["var"], 0.99 + 0.01 * y.var(0), rtol=1e-5)


@pytest.mark.parametrize("known", [None, {"hosts": "node"}])
def test_an_unknown_name_is_an_error_with_the_remedy(mesh24, known):
    step = zeroxla.make_step(Synced("batch"), mesh24, loss=loss, axis_names=known)
    message = r"uses the axis 'batch'.*pass make_step\(axis_names=\{'batch': \(.node., .device.\)"
    with pytest.raises(ValueError, match=message):
        step.init(KEY, X)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("batch", r"axis_names is 'batch' \(a str\), not a dict; pass such as \{"),
        ({"batch": ("data",)}, r"'batch' stands for \('data',\); a new name stands for one or"),
        ({"device": "node"}, r"'device' stands for \('node',\)"),
        ({"batch": ()}, r"'batch' stands for \(\)"),
    ],
)
def test_what_is_no_name(mesh24, names, message):
    with pytest.raises(ValueError, match=message):
        zeroxla.make_step(Synced("batch"), mesh24, loss=loss, axis_names=names)


@pytest.mark.parametrize(
    ("axes", "names"),
    [(("node", "device"), None), ("batch", {"batch": ("node", "device")})],
    ids=["own", "named"],
)
def test_collectives_in_a_loss_function(mesh24, axes, names):
    """A contrastive loss of the whole batch. It is called while parameters are made, too."""

    class Towers(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(x[:, :3]), nn.Dense(4)(x[:, 3:])

    def contrast(u, every, numbers):
        return optax.softmax_cross_entropy_with_integer_labels(u @ every.T, numbers).mean()

    def own(apply, x, *, train):
        u, v = apply(x)
        every = jax.lax.all_gather(v, axes, tiled=True)
        first = jax.lax.axis_index(axes) * len(u)
        assert jax.lax.psum(jnp.ones(()), axes).shape == ()
        return contrast(u, every, first + jnp.arange(len(u)))

    def whole(params):
        u, v = Towers().apply({"params": params}, X)
        return contrast(u, v, jnp.arange(len(u)))

    step = zeroxla.make_step(Towers(), mesh24, optax.sgd(0.1), loss=own, axis_names=names)
    state = step.init(KEY, X)
    wanted, wanted_grads = jax.value_and_grad(whole)(zeroxla.full_params(state))
    value, grads = step.grad(state, X)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(step.eval(state, X)["loss"], wanted, rtol=1e-5)
    assert step.model_flops() > 0
    step.describe()


def test_a_pipeline_knows_no_axes():
    mesh = zeroxla.make_mesh(nodes=2, pipe=2)

    def summed(apply, x, *, train):
        return jax.lax.pmean(apply(x).mean(), "node")

    layers = zeroxla.Pipeline.from_model(nn.Sequential([nn.Dense(4), nn.Dense(4)]), summed)
    with pytest.raises(ValueError, match=r"the axis 'node' where it has no meaning"):
        zeroxla.make_step(layers, mesh).init(KEY, X)
    with pytest.raises(ValueError, match=r"pipe=2: a pipeline cuts the trace .* use pipe=1"):
        zeroxla.make_step(
            zeroxla.Pipeline.from_model(GPT.tiny()),
            mesh,
            axis_names={"batch": ("node", "device")},
        )


def test_names_have_no_meaning_elsewhere(mesh24):
    run(Synced("batch"), mesh24, axis_names={"batch": ("node", "device")})
    with pytest.raises(NameError, match="unbound axis name: batch"):
        jax.make_jaxpr(lambda x: jax.lax.psum(x, "batch"))(X)
    summed = jax.vmap(lambda x: jax.lax.psum(x, "batch"), axis_name="batch")(X)
    np.testing.assert_allclose(summed, np.broadcast_to(X.sum(0), X.shape), rtol=1e-5, atol=1e-5)


def test_a_plan_takes_names_too():
    names = {"batch": ("node", "device")}
    found = zeroxla.plan(Synced("batch"), {"node": 2, "device": 4}, X, loss=loss, axis_names=names)
    assert found.num_parameters == 6 * 6 + 6 + 2 * 6 + 6 * 2 + 2
