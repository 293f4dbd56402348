"""Every bad input gives an error that names the values seen and the remedy."""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.quick import quick_compilation  # noqa: F401
from tools.zoo.base import leaves, mse, vectors

import zeroxla
from zeroxla.models import GPT, MLP

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(0)


def loss(p, batch, key):
    return mse(jnp.tanh(batch["x"] @ p["a"]) @ p["b"], batch["y"])


def pair(width=8):
    return leaves(a=(6, width), b=(width, 3)), loss


@pytest.fixture(scope="module")
def mesh():
    return zeroxla.make_mesh(nodes=2, devices_per_node=4)


@pytest.fixture(scope="module")
def step(mesh):
    return zeroxla.make_step(pair(), mesh, optax.adam(0.1))


@pytest.fixture(scope="module")
def state(step):
    return step.init(KEY, vectors(16))


# batches


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            vectors(12),
            r"batch of 12 does not divide over 8 devices \(axes node=2, device=4\); use a multiple "
            r"of 8, or pad",
        ),
        (vectors(0), r"batch of 0 does not divide over 8 devices"),
        ({}, r"the batch \{\} holds no arrays; pass a pytree of arrays"),
        ({"x": np.float32(1)}, r"the batch leaf 'x' is a scalar; every array of a batch has the"),
        ([1, 2], r"the batch leaf '0' is a scalar"),
        (
            {"x": np.ones((16, 6)), "y": np.ones((8, 3))},
            r"different leading dims: \{'x': 16, 'y': 8\}",
        ),
        ({"x": np.array(["text"] * 8)}, r"the batch leaf 'x' has dtype <U4; a batch holds numbers"),
        (
            {"x": np.array([None] * 8)},
            r"the batch leaf 'x' has dtype object; a batch holds numbers",
        ),
    ],
)
def test_batches(step, state, batch, message):
    calls = [
        lambda: step.init(KEY, batch),
        lambda: step(state, batch),
        lambda: step.eval(state, batch),
        lambda: step.grad(state, batch),
        lambda: step.lower(state, batch),
        lambda: step.abstract_state(batch),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_batch_that_does_not_divide_over_micro_batches(mesh):
    step = zeroxla.make_step(pair(), mesh, config=zeroxla.ZeroConfig(accumulate=3))
    message = (
        r"batch of 32 does not divide over 8 devices .* and accumulate=3; use a multiple of 24"
    )
    with pytest.raises(ValueError, match=message):
        step.init(KEY, vectors(32))


def test_keys(step):
    with pytest.raises(ValueError, match=r"^0 is no PRNG key; pass jax.random.key\(0\)"):
        step.init(0, vectors(16))


# meshes


def test_meshes():
    ring = jax.make_mesh((8,), ("data",))
    with pytest.raises(
        ValueError,
        match=r"the mesh has the axes \('data',\) and needs \('node', 'device'\).*make_mesh",
    ):
        zeroxla.make_step(pair(), ring)
    with pytest.raises(ValueError, match="has pipe=2 and the model is not a pipeline"):
        zeroxla.make_step(pair(), zeroxla.make_mesh(pipe=2))


# options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"compute_dtype": "int8"},
            r"compute_dtype='int8' is not supported; use one of \('float32'",
        ),
        ({"compute_dtype": "float64"}, r"compute_dtype='float64' is not supported"),
        ({"compute_dtype": "half-ish"}, r"compute_dtype='half-ish' is not supported"),
        ({"reduce_dtype": "float8_e4m3fn"}, r"reduce_dtype='float8_e4m3fn' is not supported"),
        ({"accumulate": 0}, r"accumulate=0 must be a whole number of 1 or more"),
        ({"accumulate": 1.5}, r"accumulate=1.5 must be a whole number of 1 or more"),
        ({"accumulate": "2"}, r"accumulate='2' must be a whole number"),
        ({"unit_elements": 0}, r"unit_elements=0 must be a whole number of 1 or more"),
        ({"prefetch_bucket": -1}, r"prefetch_bucket=-1 must be a whole number of 0 or more"),
        ({"max_live_parameters": -1}, r"max_live_parameters=-1 must be"),
        ({"max_reuse_distance": math.nan}, r"max_reuse_distance=nan must be"),
        ({"persistence_threshold": -5}, r"persistence_threshold=-5 must be"),
        ({"model_persistence_cap": -5}, r"model_persistence_cap=-5 must be"),
        ({"loss_scale_window": 0}, r"loss_scale_window=0 must be a whole number of 1 or more"),
        ({"init_loss_scale": 0}, r"init_loss_scale=0 must be a finite number above 0"),
        ({"init_loss_scale": float("inf")}, r"init_loss_scale=inf must be a finite number"),
        ({"init_loss_scale": float("nan")}, r"init_loss_scale=nan must be a finite number"),
        ({"frozen": "("}, r"frozen='\(' is no regular expression: missing \)"),
        ({"frozen": ["fine", "["]}, r"frozen='\[' is no regular expression"),
    ],
)
def test_options(options, message):
    with pytest.raises(ValueError, match=message):
        zeroxla.ZeroConfig(**options)


def test_options_take_dtypes_and_numbers_of_any_make():
    config = zeroxla.ZeroConfig(
        compute_dtype=jnp.bfloat16,
        reduce_dtype=np.dtype("float16"),
        accumulate=np.int64(2),
        max_live_parameters=1e9,
    )
    assert (config.compute_dtype, config.reduce_dtype) == ("bfloat16", "float16")


def test_a_frozen_pattern_without_effect_warns(mesh):
    config = zeroxla.ZeroConfig(frozen=["^a$", "encoder"])
    step = zeroxla.make_step(pair(), mesh, config=config)
    with pytest.warns(UserWarning, match=r"'encoder'.* matches no leaf and has no effect"):
        step.init(KEY, vectors(16))


# models


def test_a_loss_that_is_not_a_scalar(mesh):
    vector = leaves(w=(6, 3)), lambda p, batch, key: jnp.mean(batch["x"] @ p["w"], axis=1)
    message = r"the loss has shape \(2,\) and dtype float32; it must be a floating scalar: return"
    with pytest.raises(ValueError, match=message):
        zeroxla.make_step(vector, mesh).init(KEY, vectors(16))
    count = leaves(w=(6, 3)), lambda p, batch, key: jnp.sum(p["w"] > 0)
    with pytest.raises(ValueError, match=r"shape \(\) and dtype int32; it must be a floating"):
        zeroxla.make_step(count, mesh).init(KEY, vectors(16))


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_leaves_that_are_not_floating(mesh, dtype):
    """Also where the loss would fail first, were they taken for floats: as an index."""

    def init(key, batch):
        return {"w": jnp.ones((6, 3)), "order": jnp.arange(6).astype(dtype)}

    def loss(p, batch, key):
        return mse(batch["x"][:, p["order"]] @ p["w"], batch["y"])

    message = (
        rf"the leaf 'order' has dtype {dtype}; parameters must be floating.*another collection"
    )
    with pytest.raises(ValueError, match=message):
        zeroxla.make_step((init, loss), mesh).init(KEY, vectors(16))


@pytest.mark.parametrize("name", ["loss", "grad_norm", "finite", "skipped", "learning_rate"])
def test_metrics_whose_name_the_step_uses(mesh, name):
    def own(p, batch, key):
        return loss(p, batch, key), {name: jnp.float32(3)}

    step = zeroxla.make_step((pair()[0], own), mesh)
    with pytest.raises(ValueError, match=rf"metrics? .*{name}"):
        step(step.init(KEY, vectors(16)), vectors(16))


def test_metrics_of_any_other_name_are_kept(mesh):
    def own(p, batch, key):
        return loss(p, batch, key), {"bad": jnp.float32(3), "squares": 4, "total": True}

    step = zeroxla.make_step((pair()[0], own), mesh)
    _, metrics = step(step.init(KEY, vectors(16)), vectors(16))
    assert [float(metrics[n]) for n in ("bad", "squares", "total")] == [3, 4, 1]


def test_a_model_without_a_loss(mesh):
    with pytest.raises(
        ValueError, match=r"Dense has no method loss\(batch, \*, train\) and no loss="
    ):
        zeroxla.make_step(nn.Dense(3), mesh)
    with pytest.raises(TypeError, match=r"model is the class GPT, not a model; pass GPT\(\.\.\.\)"):
        zeroxla.make_step(GPT, mesh)


# states


def test_a_state_that_is_none(step):
    with pytest.raises(
        ValueError, match=r"the state is a dict, not a TrainState; make it with step"
    ):
        step({"params": 0}, vectors(16))


def test_an_optimizer_state_from_another_optimizer(step, mesh, state):
    other = zeroxla.make_step(pair(), mesh, optax.sgd(0.1, momentum=0.9)).init(KEY, vectors(16))
    mixed = dataclasses.replace(state, opt_state=other.opt_state)
    for call in (step, step.eval, step.grad):
        with pytest.raises(
            ValueError,
            match=r"does not fit this step's optimizer(.|\n)*ScaleByAdamState(.|\n)*TraceSt",
        ):
            call(mixed, vectors(16))


def test_an_optimizer_state_from_another_model(step, mesh, state):
    """The same tree, other shapes."""
    wide = zeroxla.make_step(pair(16), mesh, optax.adam(0.1)).init(KEY, vectors(16))
    mixed = dataclasses.replace(state, opt_state=wide.opt_state)
    message = (
        r"'0/mu/a' has the shape \(6, 16\) and this model needs \(6, 8\); it belongs to another"
    )
    with pytest.raises(ValueError, match=message):
        step(mixed, vectors(16))


def test_a_state_of_another_model(mesh):
    """Without optimizer state, only the parameters can tell."""
    step = zeroxla.make_step(pair(), mesh, optax.sgd(0.1))
    for other, message in [
        (
            pair(16),
            r"another model: 2 leaves differ, first 'a', .* \(6, 16\) and should have \(6, 8\)",
        ),
        ((leaves(c=(6, 3)), lambda p, batch, key: p["c"].sum()), r"another model: 3 leaves differ"),
    ]:
        foreign = zeroxla.make_step(other, mesh, optax.sgd(0.1)).init(KEY, vectors(16))
        with pytest.raises(ValueError, match=message):
            step(foreign, vectors(16))


def test_frozen_leaves_changed_after_init(step, state):
    config = zeroxla.ZeroConfig(frozen="^a$")
    with pytest.raises(ValueError, match=r"with_config\(frozen=\['\^a\$'\]\) of a step"):
        step.with_config(config)
    other = zeroxla.make_step(pair(), step.mesh, step.optimizer, config=config)
    with pytest.raises(ValueError, match=r"does not fit this step's optimizer, model and frozen"):
        other(state, vectors(16))


def test_a_refused_call_leaves_the_state_alone(step, state):
    """Nothing is lost: the state was not donated."""
    with pytest.raises(ValueError, match="does not divide"):
        step(state, vectors(12))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    assert np.isfinite(float(step.eval(state, vectors(16))["loss"]))


def test_an_image_model_gets_tokens(mesh):
    """The error names what the model misses, and what the batch has."""
    step = zeroxla.make_step(MLP.tiny(), mesh)
    with pytest.raises(ValueError, match=r"'image', which the batch does not have: .* 'tokens'"):
        step.init(KEY, {"tokens": np.zeros((8, 5), np.int32)})


@pytest.mark.parametrize("frozen", [".*", ["^a$", "^b$"]])
def test_nothing_to_train(frozen, mesh):
    step = zeroxla.make_step(pair(), mesh, config=zeroxla.ZeroConfig(frozen=frozen))
    with pytest.raises(ValueError, match=r"matches all 2 leaves of the model, so nothing would"):
        step.init(jax.random.key(0), vectors(16))
