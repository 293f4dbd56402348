"""Models of Equinox and Haiku, as pairs, beside the libraries' own gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.quick import quick_compilation  # noqa: F401
from tools.reference import relative_errors, worst

import zeroxla

pytestmark = pytest.mark.usefixtures("quick_compilation")

eqx = pytest.importorskip("equinox", reason="Equinox is not installed (extra: dev)")
hk = pytest.importorskip("haiku", reason="Haiku is not installed (extra: dev)")

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(16, 5, 8)).astype(np.float32),
    "y": RNG.normal(size=(16, 5, 8)).astype(np.float32),
}


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    scale: jax.Array
    slope: float = 0.5

    def __init__(self, key):
        self.norm = eqx.nn.LayerNorm(8)
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=key)
        self.scale = jnp.ones(8)

    def __call__(self, x):
        y = jax.vmap(self.norm)(x)
        return x + self.slope * self.scale * self.attention(y, y, y)


def equinox_pair():
    def make(key):
        return [Block(k) for k in jax.random.split(key, 2)]

    shapes = eqx.filter_eval_shape(make, KEY)
    rest = eqx.filter(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct), inverse=True)

    def loss(params, batch, key):
        def run(x):
            for block in eqx.combine(params, rest):
                x = block(x)
            return x

        return jnp.mean((jax.vmap(run)(batch["x"]) - batch["y"]) ** 2)

    return (lambda key, batch: eqx.filter(make(key), eqx.is_array)), loss


def haiku_pair():
    def forward(x):
        x = hk.Linear(8)(hk.LayerNorm(-1, True, True)(x))
        x = x + hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling())(x, x, x)
        return hk.dropout(hk.next_rng_key(), 0.0, x)

    model = hk.transform(forward)

    def loss(params, batch, key):
        return jnp.mean((model.apply(params, key, batch["x"]) - batch["y"]) ** 2)

    return (lambda key, batch: model.init(key, batch["x"])), loss


@pytest.mark.parametrize("make", [equinox_pair, haiku_pair])
def test_gradients_are_the_librarys_own(make):
    mesh = zeroxla.make_mesh(nodes=1, devices_per_node=2)
    init, loss = make()
    config = zeroxla.ZeroConfig(persistence_threshold=0)
    step = zeroxla.make_step((init, loss), mesh, optax.sgd(0.1), config=config)
    state = step.init(KEY, BATCH)
    own = init(KEY, BATCH)
    value, gradient = jax.jit(jax.value_and_grad(loss))(own, BATCH, KEY)
    found_value, found = step.grad(state, BATCH)
    np.testing.assert_allclose(found_value, value, rtol=1e-6)
    leaves = {leaf.size for leaf in jax.tree.leaves(own)}
    assert leaves == {leaf.size for leaf in jax.tree.leaves(found)}
    assert len(jax.tree.leaves(own)) == len(jax.tree.leaves(found))
    errors = relative_errors(by_path(found), by_path(gradient))
    assert worst(errors)[1] < 5e-6, worst(errors)


def by_path(tree):
    """The state's dicts and the library's own tree name their leaves alike."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in leaves}
