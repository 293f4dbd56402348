"""Front ends: plain pairs, the rules for all kinds of model, and bad input."""

import collections
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tools.adapters import KEY, X, once, shapes
from tools.quick import quick_compilation  # noqa: F401

from zeroxla.frontend import Adapted, adapt
from zeroxla.models import GPT, MLP

pytestmark = pytest.mark.usefixtures("quick_compilation")

Affine = collections.namedtuple("Affine", ["w", "b"])


def init_pair(key, batch):
    return {"layers": [Affine(jnp.ones((4, 4)), jnp.zeros(4)), (jnp.ones(4),)], "gain": 2.0}


def pair_loss(params, batch, key):
    (w, b), (v,) = params["layers"]
    assert isinstance(params["layers"][0], Affine)
    y = params["gain"] * (batch @ w + b) @ v
    return y.mean() + jax.random.normal(key), {"sum": y.sum()}


def test_pair_takes_any_pytree_of_parameters():
    adapted = adapt((init_pair, pair_loss))
    params, state, (loss, metrics, new_state) = once(adapted)
    assert shapes(params) == {
        "gain": (),
        "layers": {"0": {"w": (4, 4), "b": (4,)}, "1": {"0": (4,)}},
    }
    assert state == new_state == {}
    expected, more = pair_loss(init_pair(KEY, X), X, KEY)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["sum"], more["sum"], rtol=1e-5)


def test_pair_loss_works_in_another_process_than_init():
    params, _ = adapt((init_pair, pair_loss)).init(KEY, X)
    loss, _, _ = jax.jit(partial(adapt((init_pair, pair_loss)).loss, train=False))(
        params, {}, X, KEY
    )
    assert jnp.isfinite(loss)


def test_pair_with_a_single_array():
    adapted = adapt((lambda key, batch: jnp.ones(4), lambda w, batch, key: (batch @ w).mean()))
    params, _, (loss, _, _) = once(adapted)
    assert shapes(params) == {"param": (4,)}
    np.testing.assert_allclose(loss, X.sum(axis=1).mean(), rtol=1e-5)


def test_pair_whose_paths_collide_is_an_error():
    def init(key, batch):
        return {"a": {"0": jnp.ones(1)}, "b": Twice(jnp.ones(1), jnp.ones(1))}

    with pytest.raises(ValueError, match="same path as text: b/x"):
        adapt((init, lambda params, batch, key: 0.0)).init(KEY, X)


class Twice:
    """A pytree whose two children have the same key."""

    def __init__(self, first, second):
        self.children = (first, second)


jax.tree_util.register_pytree_with_keys(
    Twice,
    lambda twice: (tuple((jax.tree_util.GetAttrKey("x"), c) for c in twice.children), None),
    lambda _, children: Twice(*children),
)


class Returns(nn.Module):
    """A module whose loss returns what it is told to."""

    what: str

    @nn.compact
    def loss(self, batch, *, train):
        y = nn.Dense(1)(batch)
        return {
            "vector": y[:, 0],
            "integer": y.sum().astype(int),
            "dict": {"loss": y.mean()},
            "none": None,
            "list metrics": (y.mean(), [y.mean()]),
            "vector metric": (y.mean(), {"y": y[:, 0]}),
            "nested metric": (y.mean(), {"y": {"a": 1.0}}),
            "float": 0.0,
        }[self.what]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("vector", r"shape \(6,\) and dtype float32; it must be a floating scalar"),
        ("integer", r"shape \(\) and dtype int32; it must be a floating scalar"),
        ("dict", r"returned a dict; expected a floating scalar or \(scalar, metrics\)"),
        ("none", "returned a NoneType"),
        ("list metrics", "metrics are a list; expected a dict"),
        ("vector metric", r"metric 'y' has shape \(6,\)"),
        ("nested metric", "metric 'y' is a dict"),
    ],
)
def test_a_loss_that_is_no_floating_scalar_is_an_error(what, message):
    adapted = adapt(Returns(what))
    params, state = jax.eval_shape(adapted.init, KEY, X)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(partial(adapted.loss, train=True), params, state, X, KEY)


def test_a_python_float_is_a_loss():
    *_, (loss, metrics, _) = once(adapt(Returns("float")))
    assert loss == 0
    assert loss.dtype == jnp.float32
    assert metrics == {}


@pytest.mark.parametrize(
    ("model", "name"),
    [(nn.Dense(3), "Dense"), (lambda rngs: nnx.Linear(2, 2, rngs=rngs), "Linear")],
)
def test_a_module_without_a_loss_is_an_error(model, name):
    with pytest.raises(ValueError, match=rf"{name} has no method loss\(batch, \*, train\)"):
        adapt(model)


def test_a_loss_with_another_signature_is_an_error():
    with pytest.raises(
        ValueError, match=r"loss= has the signature \(apply, batch\), but is called"
    ):
        adapt(nn.Dense(3), lambda apply, batch: 0.0)
    with pytest.raises(ValueError, match=r"loss has the signature \(params, batch\)"):
        adapt((init_pair, lambda params, batch: 0.0))
    with pytest.raises(ValueError, match=r"init has the signature \(key\)"):
        adapt((lambda key: 0.0, pair_loss))

    class Short(nn.Module):
        def loss(self, batch):
            return 0.0

    with pytest.raises(ValueError, match=r"Short.loss has the signature \(batch\)"):
        adapt(Short())


def test_two_losses_are_an_error():
    with pytest.raises(ValueError, match="give one loss"):
        adapt((init_pair, pair_loss), lambda apply, batch, *, train: 0.0)


@pytest.mark.parametrize("model", [3, "gpt", None, (init_pair,), {"init": init_pair}])
def test_an_unknown_kind_of_model_is_an_error(model):
    with pytest.raises(TypeError, match=r"expected a flax.linen module instance, `lambda rngs"):
        adapt(model)


def test_a_class_and_a_function_of_something_else_are_errors():
    with pytest.raises(TypeError, match=r"model is the class GPT.*pass GPT\(\.\.\.\)"):
        adapt(GPT)
    with pytest.raises(TypeError, match="returned a Dense; expected `lambda rngs"):
        adapt(lambda rngs: nn.Dense(3))


def test_adapted_is_compared_by_identity():
    first, second = adapt(MLP.tiny()), adapt(MLP.tiny())
    assert isinstance(first, Adapted)
    assert first == first
    assert first != second
    assert len({first, second, first}) == 2


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_statistics_synchronised_by_axis_name(kind):
    class Synced(nn.Module):
        @nn.compact
        def loss(self, batch, *, train):
            norm = nn.BatchNorm(use_running_average=not train, momentum=0.0, axis_name="device")
            return norm(batch).mean()

    class SyncedNNX(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(4, momentum=0.0, axis_name="device", rngs=rngs)

        def loss(self, batch, *, train):
            return self.norm(batch).mean()

    adapted = adapt(Synced() if kind == "linen" else lambda rngs: SyncedNNX(rngs))
    params, state = jax.eval_shape(adapted.init, KEY, X)
    params, state = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), (params, state))

    def per_device(params, state, batch):
        new = adapted.loss(params, state, batch, KEY, train=True)[2]
        return jax.tree.map(lambda leaf: leaf[None], new)

    P = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=(P(), P(), P("device")),
        out_specs=P("device"),
        check_vma=False,
    )
    means = [
        leaf
        for path, leaf in jax.tree.leaves_with_path(jax.jit(run)(params, state, X))
        if "mean" in str(path)
    ]
    (mean,) = means
    np.testing.assert_allclose(mean, np.broadcast_to(X.mean(axis=0), (2, 4)), atol=1e-6)
