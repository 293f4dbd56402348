"""Models with `jax.checkpoint` under the option `jax_remat3`, by which JAX implements it anew."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.reference import relative_errors, worst

import zeroxla
from zeroxla.inspect import comms

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(8)(nn.tanh(nn.Dense(16)(x))), None


class Net(nn.Module):
    scanned: bool
    policy: object = None

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, policy=self.policy)
        if self.scanned:
            x, _ = nn.scan(
                block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )()(x, None)
            return x
        for _ in range(3):
            x, _ = block()(x)
        return x


def loss(apply, batch, *, train):
    return jnp.mean(apply(batch) ** 2)


def measure(net, mesh, remat3):
    """Return parameters, gradients, and what the program gathers and reduces."""
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", remat3)
    try:
        config = zeroxla.ZeroConfig(persistence_threshold=0, unit_elements=100)
        step = zeroxla.make_step(net, mesh, optax.sgd(0.1), loss=loss, config=config)
        state = step.init(jax.random.key(0), X)
        gradients = step.grad(state, X)[1]
        return zeroxla.full_params(state), gradients, str(comms(step.lower(state, X), mesh))
    finally:
        jax.config.update("jax_remat3", before)


POLICY = jax.checkpoint_policies.dots_saveable


@pytest.mark.parametrize(
    ("scanned", "policy"),
    thinned([(True, POLICY)], slow=[(False, None), (True, None), (False, POLICY)], rows=True),
)
def test_gradients_and_collectives_are_the_same(mesh24, scanned, policy):
    net = Net(scanned, policy)
    params, expected, collectives = measure(net, mesh24, remat3=False)
    _, found, same = measure(net, mesh24, remat3=True)
    assert same == collectives
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    plain = jax.jit(jax.grad(lambda p: loss(lambda x: net.apply({"params": p}, x), X, train=True)))(
        params
    )
    errors = relative_errors(found, plain)
    assert worst(errors)[1] < 5e-6, worst(errors)
