"""Attention is found whatever its scores are made of, and wherever it is normalised."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tools.attention_styles import LENGTH
from tools.one_layer import ONLY, inputs, mixed, projected, scores_of
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.rewriting import KEY, Both

from zeroxla.program import compat
from zeroxla.program.trace import trace
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.known_attention import ring_way

pytestmark = pytest.mark.usefixtures("quick_compilation")


def learned_bias(q, k, v, batch, params):
    return mixed(jax.nn.softmax(scores_of(q, k) + params["bias"]), v)


def relative_table(q, k, v, batch, params):
    """A learned bias by distance, looked up for each pair."""
    places = jnp.arange(q.shape[1])
    distance = jnp.clip(places[None] - places[:, None], -4, 3) + 4
    bias = jnp.moveaxis(params["table"][distance], -1, 0)
    return mixed(jax.nn.softmax(scores_of(q, k) + bias), v)


def learned_factor(q, k, v, batch, params):
    probs = jax.nn.softmax(scores_of(q, k) * params["factor"]) * params["factor"]
    return mixed(probs, v)


def zeros_after(q, k, v, batch, params):
    """Probabilities that are set to zero after the softmax, where nothing is masked for good."""
    seen = jnp.tril(jnp.ones((q.shape[1],) * 2, bool))
    probs = jax.nn.softmax(jnp.where(seen, scores_of(q, k), -1e9))
    return mixed(jnp.where(seen, probs, 0), v)


def one_over(q, k, v, batch, params):
    weights = jnp.exp(scores_of(q, k))
    return mixed(weights * (1 / weights.sum(-1, keepdims=True)), v)


def other_length(q, k, v, batch, params):
    """Queries of every second position."""
    return mixed(jax.nn.softmax(scores_of(q[:, ::2], k)), v)


def divided_afterwards(q, k, v, batch, params):
    """Exponentials times values, divided by their sum."""
    scores = scores_of(q, k)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return mixed(weights, v) / jnp.moveaxis(weights.sum(-1), 1, 2)[..., None]


def divided_and_moved(q, k, v, batch, params):
    """The same with a mask, one over the sum, and heads that are moved last of all."""
    seen = jnp.tril(jnp.ones((q.shape[1],) * 2, bool))
    weights = jnp.where(seen, jnp.exp(scores_of(q, k)), 0)
    heads_first = weights @ jnp.swapaxes(v, 1, 2)
    return jnp.swapaxes(heads_first * (1 / weights.sum(-1, keepdims=True)), 1, 2)


def dropped_and_divided(q, k, v, batch, params):
    """Dropout acts on the weights in the product, and not on those in the sum."""
    weights = jnp.exp(scores_of(q, k))
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, weights.shape)
    total = weights.sum(-1).swapaxes(1, 2)
    return mixed(jnp.where(kept, weights / 0.9, 0), v) / total[..., None]


def jaxs_own(q, k, v, batch, params):
    return jax.nn.dot_product_attention(q, k, v, bias=params["bias"][None])


def jaxs_own_with_lengths(q, k, v, batch, params):
    lengths = jnp.array([q.shape[1] - 9, q.shape[1]], jnp.int32)
    return jax.nn.dot_product_attention(
        q, k[:, :, :2], v[:, :, :2], is_causal=True, key_value_seq_lengths=lengths
    )


def nnxs_function(q, k, v, batch, params):
    return nnx.dot_product_attention(q, k, v, bias=params["bias"][None])


FOUND = {
    f.__name__: f
    for f in (
        *(learned_bias, relative_table, learned_factor, zeros_after, one_over, other_length),
        *(divided_afterwards, divided_and_moved, dropped_and_divided),
        *(jaxs_own, jaxs_own_with_lengths, nnxs_function),
    )
}
QUICK_FOUND = [("divided_and_moved", 41)]


@pytest.mark.parametrize(
    ("name", "length"),
    thinned(
        QUICK_FOUND,
        slow=[(x, n) for x in FOUND for n in (LENGTH, 41) if (x, n) not in QUICK_FOUND],
        rows=True,
    ),
)
def test_gradients_of_what_scores_are_made_of(name, length):
    both = Both(projected(FOUND[name]), **ONLY)
    params, batch = inputs(length)
    assert both.error(params, batch) < 1e-6
    (finding,) = both.rewritten.newest.findings
    form = "causal attention" if name == "divided_and_moved" else "attention"
    assert finding.becomes == f"{form} by blocks of 16"


@pytest.mark.parametrize("batch_has_a_mask", thinned([False], slow=[True]))
def test_jaxs_own_causal_attention_is_causal(batch_has_a_mask):
    def attend(q, k, v, batch, params):
        mask = (batch["x"][:, None, None, :, 0] > 0) if batch_has_a_mask else None
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)

    both = Both(projected(attend), **ONLY)
    params, batch = inputs()
    assert both.error(params, batch) < 1e-6
    (finding,) = both.rewritten.newest.findings
    form = "attention" if batch_has_a_mask else "causal attention"
    assert finding.becomes == f"{form} by blocks of 16"


def causal(q, k, v, batch, params):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def test_causal_attention_has_a_way_around_a_ring():
    """The rewritten attention is known to a split over `context`, as the models' own is."""
    both = Both(projected(causal), **ONLY)
    params, batch = inputs()
    program, _ = trace(lambda p, b: both.rewritten(p, None, b, KEY)[0], params, batch)
    flow = DimsFlow.of(program, [], compat.inlined_jaxpr)
    known = [eq for eq in flow.program.equations if eq in flow.rules]
    assert any(ring_way(eq, flow, 2, AxisCosts()) is not None for eq in known)
