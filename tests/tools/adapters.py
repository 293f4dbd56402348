"""A batch, and a call of init and loss, for the tests of `zeroxla.frontend`."""

import jax
import jax.numpy as jnp
import numpy as np

KEY = jax.random.key(3)
X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def shapes(tree):
    return jax.tree.map(jnp.shape, tree)


def once(adapted, *, train=True, batch=X, key=KEY):
    """Call a model's init and then its loss, both jitted.

    Returns:
      (params, state, (loss, metrics, state after the loss)).
    """
    params, state = jax.jit(adapted.init)(KEY, batch)
    call = jax.jit(adapted.loss, static_argnames="train")
    return params, state, call(params, state, batch, key, train=train)
