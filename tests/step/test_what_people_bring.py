"""Batches and parameters as people have them: mappings that JAX does not know, keys that are
missing, lists and tuples of parameters, wide dtypes, misspelt options, batches of another kind."""

import collections
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tools.quick import quick_compilation  # noqa: F401

import zeroxla

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(0)
BATCH = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype("float32")}


class Layer(NamedTuple):
    w: jax.Array
    b: jax.Array


def init(key, batch):
    first, second = jax.random.split(key)
    return [
        Layer(jax.random.normal(first, (4, 9)), jnp.zeros(9)),
        (jax.random.normal(second, (9, 3)), {0: jnp.zeros(3)}),
    ]


def loss(params, batch, key):
    (w, b), (v, c) = params
    assert isinstance(params[0], Layer)
    return jnp.mean((jnp.tanh(batch["x"] @ w + b) @ v + c[0]) ** 2)


@pytest.fixture(scope="module")
def step():
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    return zeroxla.make_step((init, loss), mesh, optax.sgd(0.1))


@pytest.fixture(scope="module")
def state(step):
    return step.init(KEY, BATCH)


def test_parameters_come_back_in_the_lists_and_tuples_they_came_in(step, state, tmp_path):
    params = zeroxla.full_params(state)
    value, grads = step.grad(state, BATCH)
    wanted, wanted_grads = jax.value_and_grad(loss)(params, BATCH, KEY)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert jax.tree.structure(grads) == jax.tree.structure(wanted_grads)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    again = zeroxla.init_from(step, params, KEY, BATCH)
    with zeroxla.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, again)
        checkpointer.wait()
        restored = checkpointer.restore(step.abstract_state(BATCH)).state
    jax.tree.map(np.testing.assert_array_equal, zeroxla.full_params(restored), params)


def test_mappings_that_jax_does_not_know_are_batches(step, state):
    batch = collections.UserDict(BATCH)
    assert step.eval(state, batch)["loss"] == step.eval(state, BATCH)["loss"]
    made = zeroxla.global_batch(batch, step.mesh)
    assert made.keys() == {"x"}
    step.abstract_state(collections.UserDict({"x": jax.ShapeDtypeStruct((8, 4), np.float32)}))


def test_a_key_that_the_batch_lacks_is_named(step, state):
    batch = {"y": BATCH["x"], "mask": np.ones(8)}
    message = r"reads 'x', which the batch does not have: its keys are 'y', 'mask'"
    for call in (lambda b: step.init(KEY, b), lambda b: step.eval(state, b)):
        with pytest.raises(ValueError, match=message.replace("'y', 'mask'", ".*'y'")):
            call(batch)
    with pytest.raises(ValueError, match=r"reads 'x'"):
        step(state, batch)

    with pytest.raises(KeyError, match="y"):  # it is no key that the batch lacks
        zeroxla.make_step((init, lambda p, b, k: {}["y"]), step.mesh).abstract_state(batch)


def test_misspelt_options_are_named():
    with pytest.raises(TypeError, match="'persistance'; did you mean 'persistence_threshold'"):
        zeroxla.ZeroConfig(persistance=3)
    with pytest.raises(TypeError, match=r"ZeroConfig has no option .*'accumulate'"):
        zeroxla.ZeroConfig.zeropp(acumulate=3)
    with pytest.raises(TypeError, match=r"make_step has no option .*did you mean 'optimizer'"):
        zeroxla.make_step((init, loss), None, optimiser=optax.sgd(0.1))


def test_another_kind_of_batch_is_said_once(state):
    step = zeroxla.make_step(
        (init, loss), zeroxla.make_mesh(nodes=2, devices_per_node=4), optax.sgd(0.1)
    )
    state = step.init(KEY, BATCH)
    twice = {"x": np.concatenate([BATCH["x"]] * 2)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = step(state, BATCH)
        step.eval(state, twice)  # the first evaluation
    with pytest.warns(UserWarning, match=r"x float32\[8,4\] -> float32\[16,4\]") as said:
        state, _ = step(state, twice)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(state, {**BATCH, "y": BATCH["x"]})
    assert len(said) == 1
    assert said[0].filename == __file__


def test_a_second_init_traces_and_compiles_nothing(step, state):
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        traced = []
        patch.setattr(jax, "eval_shape", lambda *args: traced.append(args))
        again = step.init(jax.random.key(1), BATCH)
    assert not traced
    first, second = (jax.tree.leaves(zeroxla.full_params(s))[0] for s in (state, again))
    assert np.abs(first - second).max() > 0.1


def test_wide_parameters_are_named():
    def wide(key, batch):
        return {"w": jnp.ones((4, 3), jnp.float64)}

    with jax.enable_x64(True):
        mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
        step = zeroxla.make_step((wide, lambda p, b, k: (b["x"] @ p["w"]).mean()), mesh)
        with pytest.warns(UserWarning, match=r"w \(float64\).* in float32"):
            step.abstract_state(BATCH)


def test_rngs_that_were_made_before_are_named():
    class Model(nnx.Module):
        def __init__(self, rngs=nnx.Rngs(42)):  # noqa: B008
            self.linear = nnx.Linear(4, 3, rngs=rngs)

    def mean(module, batch, *, train):
        return module.linear(batch["x"]).mean()

    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    with pytest.raises(ValueError, match=r"default of an argument.* make rngs inside"):
        zeroxla.make_step(lambda rngs: Model(), mesh, loss=mean)
