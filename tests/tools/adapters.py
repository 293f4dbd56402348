"""What the tests of the adapters share."""

import jax
import jax.numpy as jnp
import numpy as np

KEY = jax.random.key(3)
X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def shapes(tree):
    return jax.tree.map(jnp.shape, tree)


def once(adapted, *, train=True, batch=X, key=KEY):
    """Initialise and call the loss once, both jitted: (params, state, (loss, metrics, state))."""
    params, state = jax.jit(adapted.init)(KEY, batch)
    call = jax.jit(adapted.loss, static_argnames="train")
    return params, state, call(params, state, batch, key, train=train)
