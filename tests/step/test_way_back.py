"""Trained parameters go back into the plain model that they came from."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.zoo.base import mse, vectors

import zeroxla
from zeroxla.models import GPT, Llama
from zeroxla.step.state import as_in_model

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(0)
TOKENS = {"tokens": np.arange(72).reshape(8, 9) % 64}


class Layers(nnx.Module):
    """Eleven layers in a list with a gap, and a dict with a whole number and one without."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(11)])
        self.layers[1] = nnx.Dropout(0.0, rngs=rngs)
        self.last = nnx.Dict({"3": nnx.Linear(6, 3, rngs=rngs)})

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.last["3"](x)

    def loss(self, batch, *, train):
        return mse(self(batch["x"]), batch["y"])


def trained(model, batch):
    step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=2), optax.sgd(0.1))
    state, _ = step(step.init(KEY, batch), batch)
    return step, state


@pytest.mark.slow
def test_an_nnx_module_with_lists_is_updated(tmp_path):
    step, state = trained(lambda rngs: Layers(rngs), batch := vectors(16))
    params = zeroxla.full_params(state)
    assert set(params["layers"]) == {0, *range(2, 11)}
    assert list(params["last"]) == ["3"]
    module = Layers(nnx.Rngs(1))
    nnx.update(module, params)
    module.eval()
    expected = step.adapted.apply(params, state.model_state, batch["x"])
    np.testing.assert_array_equal(module(batch["x"]), expected)
    assert float(module.loss(batch, train=False)) == pytest.approx(
        float(step.eval(state, batch)["loss"]), rel=1e-5
    )

    # Gradients have the same keys.
    assert jax.tree.structure(step.grad(state, batch)[1]) == jax.tree.structure(params)

    # Also from a checkpoint.
    with zeroxla.Checkpointer(tmp_path, asynchronous=False) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore(step).state
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, zeroxla.full_params(restored), params)


class Normed(nnx.Module):
    """Layers of nnx whose statistics and scales have tuples as names."""

    def __init__(self, rngs):
        self.first = nnx.SpectralNorm(nnx.Linear(6, 6, rngs=rngs), rngs=rngs)
        self.last = nnx.WeightNorm(nnx.Linear(6, 3, rngs=rngs), rngs=rngs)

    def __call__(self, x, train):
        return self.last(jnp.tanh(self.first(x, update_stats=train)))

    def loss(self, batch, *, train):
        return mse(self(batch["x"], train), batch["y"])


@pytest.mark.slow
def test_an_nnx_module_with_tuples_as_names_is_updated():
    step, state = trained(lambda rngs: Normed(rngs), batch := vectors(16))
    module = Normed(nnx.Rngs(1))
    for part in (zeroxla.full_params(state), as_in_model(state.model_state, state)):
        nnx.update(module, jax.tree.map(jnp.asarray, part))
    module.eval()
    expected = float(step.eval(state, batch)["loss"])
    assert float(module.loss(batch, train=False)) == pytest.approx(expected, rel=1e-5)
    # The next step's loss, too: it begins from the statistics of the first one.
    expected = float(module.loss(batch, train=True))
    assert float(step(state, batch)[1]["loss"]) == pytest.approx(expected, rel=1e-5)


class Means(nn.Module):
    """A linen module with batch statistics."""

    @nn.compact
    def loss(self, batch, *, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(batch["x"]))
        return mse(nn.Dense(3)(jnp.tanh(x)), batch["y"]), {}


@pytest.mark.parametrize(
    ("model", "batch"), thinned([(Means(), vectors(16))], slow=[(GPT.tiny(), TOKENS)], rows=True)
)
def test_a_linen_module_takes_them_as_its_variables(model, batch):
    step, state = trained(model, batch)
    variables = {"params": zeroxla.full_params(state), **state.model_state}
    loss, _ = model.apply(variables, batch, train=False, method=model.loss)
    assert float(loss) == pytest.approx(float(step.eval(state, batch)["loss"]), rel=1e-5)


@pytest.mark.slow
def test_merged_adapters_go_back_too():
    def build(rngs):
        return Llama(
            vocab=64, layers=2, width=32, heads=4, kv_heads=2, hidden=64, scan=False, rngs=rngs
        )

    model = zeroxla.lora(build, rank=2, targets="q_proj/kernel")
    step, state = trained(model, TOKENS)
    module = build(nnx.Rngs(1))
    nnx.update(module, model.merge(zeroxla.full_params(state)))
    module.eval()
    loss, _ = module.loss(TOKENS, train=False)
    assert float(loss) == pytest.approx(float(step.eval(state, TOKENS)["loss"]), rel=1e-5)
