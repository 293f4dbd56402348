"""Blocks that are masked are left out, and queries that see nothing compute what they did."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.attention_styles import LENGTH
from tools.one_layer import ONLY, inputs, mixed, projected, scores_of
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.rewriting import Both

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize(
    ("left", "fill"),
    thinned(
        [(0, -1e9), (5, -jnp.inf)],
        slow=[(5, -jnp.inf), (0, -jnp.inf), (5, -1e9), (20, -1e9), (20, -jnp.inf)],
        rows=True,
    ),
)
def test_causal_blocks_are_left_out_beside_padding(left, fill):
    """Queries that padding leaves no key have equal weights for all keys, or NaN: then all blocks
    run."""

    def attend(q, k, v, batch, params):
        seen = jnp.tril(jnp.ones((q.shape[1],) * 2, bool)) & batch["seen"][:, None, None, :]
        return mixed(jax.nn.softmax(jnp.where(seen, scores_of(q, k), fill)), v)

    both = Both(projected(attend), **ONLY)
    params, batch = inputs()
    batch["seen"] = (np.arange(LENGTH)[None] >= left) & (np.arange(LENGTH)[None] < [[44], [30]])
    (loss, grads), (other_loss, other) = both.gradients(params, batch)
    (finding,) = both.rewritten.newest.findings
    assert finding.becomes == "attention by blocks of 16"
    assert finding.reason == "3 of 9 blocks run only if a query keeps no key"
    assert np.isnan(loss) == np.isnan(other_loss) == (left > 0 and np.isinf(fill))
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_masked_blocks_do_not_run_where_each_query_keeps_a_key():
    """Values of masked keys are NaN: products with them would be, too."""
    length = 32

    def attend(q, k, v, batch, params):
        seen = jnp.tril(jnp.ones((length, length), bool)) & batch["seen"][:, None, None, :]
        probs = jax.nn.softmax(jnp.where(seen, scores_of(q, k), -1e9))
        return mixed(probs, v * batch["factor"][:, :, None, None])[:, : length // 2]

    both = Both(projected(attend), **ONLY)
    params, batch = inputs(length)
    batch["seen"] = np.ones((2, length), bool)
    batch["factor"] = np.ones((2, length), np.float32)
    loss, _ = both.gradients(params, batch)[1]
    batch["factor"][:, length // 2 :] = np.nan  # keys that the first half of the queries masks
    (written, _), (rewritten, _) = both.gradients(params, batch)
    assert np.isnan(written)
    assert rewritten == loss


def all_masked(fill):
    def attend(q, k, v, batch, params):
        seen = batch["seen"][:, None, :, None] & batch["seen"][:, None, None, :]
        return mixed(jax.nn.softmax(jnp.where(seen, scores_of(q, k), fill)), v)

    return attend


@pytest.mark.parametrize("fill", thinned([], slow=[-jnp.inf, -1e9, jnp.finfo(jnp.float32).min]))
def test_rows_that_see_nothing_compute_the_same(fill):
    """They are NaN, or have equal weights for all keys."""
    both = Both(projected(all_masked(fill)), **ONLY)
    params, batch = inputs()
    batch["seen"] = np.arange(LENGTH)[None, :] < np.array([[LENGTH - 5], [LENGTH]])
    (loss, grads), (other_loss, other) = both.gradients(params, batch)
    assert both.rewritten.newest.findings[0].becomes == "attention by blocks of 16"
    assert np.isnan(loss) == np.isnan(other_loss) == np.isinf(fill)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
