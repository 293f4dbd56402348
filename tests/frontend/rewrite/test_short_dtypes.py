"""Rewrites of models that compute in 16 bits; XLA on the CPU needs its usual passes for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.one_layer import ONLY, inputs, mixed, projected, scores_of
from tools.quick import thinned
from tools.rewriting import Both


def attend(q, k, v, batch, params):
    scores = scores_of(q, k).astype(jnp.float32) + 0.1
    return mixed(jax.nn.softmax(scores).astype(v.dtype), v)


def causal(q, k, v, batch, params):
    seen = jnp.tril(jnp.ones((q.shape[1],) * 2, bool))
    return mixed(jax.nn.softmax(jnp.where(seen, scores_of(q, k), -1e4)), v)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", thinned([jnp.bfloat16], slow=[jnp.float16]))
@pytest.mark.parametrize("attention", thinned([attend], slow=[causal]))
def test_errors_are_those_of_the_dtype(attention, dtype):
    both = Both(projected(attention), **ONLY)
    params, batch = jax.tree.map(lambda x: np.asarray(x, dtype), inputs())
    exact = Both(projected(attention), **ONLY).gradients(*inputs())[0][1]
    (_, written), (_, rewritten) = both.gradients(params, batch)
    assert both.rewritten.newest.rewritten

    def error(found):
        return max(
            float(np.linalg.norm(np.float32(found[n]) - exact[n]) / np.linalg.norm(exact[n]))
            for n in "qkv"
        )

    assert error(rewritten) < 1.5 * error(written)
