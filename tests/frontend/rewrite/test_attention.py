"""Attention that people write by hand is found, computes the same, and keeps no scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.attention_styles import CAUSAL, HEAD, HEADS, LENGTH, STYLES, batch_of
from tools.one_layer import ONLY, inputs, mixed, projected, scores_of
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.rewriting import Both

pytestmark = pytest.mark.usefixtures("quick_compilation")


def of_style(name, length=LENGTH):
    return Both.of_model(STYLES[name](), batch_of(2, length), **ONLY)


@pytest.mark.slow
@pytest.mark.parametrize("name", STYLES)
def test_a_style_is_found_and_computes_the_same(name):
    both, params, state = of_style(name)
    batch = batch_of(2, LENGTH)
    error = both.error(params, batch, state)
    findings = both.rewritten.newest.findings
    assert findings
    form = "causal attention" if name in CAUSAL else "attention"
    assert {x.becomes for x in findings} == {f"{form} by blocks of 16"}
    assert error < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", STYLES)
def test_temporaries_are_linear_in_length(name):
    both, params, state = of_style(name)
    short, long = (both.temporaries(params, batch_of(1, n), state) for n in (256, 512))
    assert long[0] > 3 * short[0]  # as it was written: scores
    assert long[1] < 2.4 * short[1]
    assert long[1] < long[0] / 3


def wrong_axis(q, k, v, batch, params):
    return mixed(jax.nn.softmax(scores_of(q, k), axis=-2), v)


def no_softmax(q, k, v, batch, params):
    scores = scores_of(q, k)
    return mixed(jnp.exp(scores) / (1 + jnp.exp(scores)), v)


def relu_probs(q, k, v, batch, params):
    return mixed(jax.nn.relu(scores_of(q, k)) / q.shape[1], v)


def two_axes(q, k, v, batch, params):
    return mixed(jax.nn.softmax(scores_of(q, k), axis=(-1, -2)), v)


def read_twice(q, k, v, batch, params):
    probs = jax.nn.softmax(scores_of(q, k))
    return mixed(probs, v) + probs.max()


def scores_read(q, k, v, batch, params):
    scores = scores_of(q, k)
    return mixed(jax.nn.softmax(scores), v) + 1e-3 * scores.std()


def squared(q, k, v, batch, params):
    return mixed(jax.nn.softmax(scores_of(q, k)) ** 2, v)


def plus_something(q, k, v, batch, params):
    """A sum with a small number besides: rows do not sum to one."""
    weights = jnp.exp(scores_of(q, k))
    return mixed(weights / (weights.sum(-1, keepdims=True) + 1), v)


def plus_something_afterwards(q, k, v, batch, params):
    weights = jnp.exp(scores_of(q, k))
    return mixed(weights, v) / (weights.sum(-1).swapaxes(1, 2) + 1)[..., None]


def another_sum(q, k, v, batch, params):
    """Divided by the sums over queries."""
    weights = jnp.exp(scores_of(q, k))
    return mixed(weights, v) / weights.sum(-2).swapaxes(1, 2)[..., None]


def masked_rows_are_zero(q, k, v, batch, params):
    """Rows that see nothing are NaN in the softmax, and zeros after it."""
    seen = (batch["x"][..., 0] > 0)[:, None, :, None] & jnp.ones((q.shape[1],) * 2, bool)
    probs = jax.nn.softmax(jnp.where(seen, scores_of(q, k), -jnp.inf))
    return mixed(jnp.where(seen, probs, 0), v)


def old_bits(q, k, v, batch, params):
    """Random bits of a generator that draws them all at once."""
    probs = jax.nn.softmax(scores_of(q, k))
    kept = jax.random.bernoulli(jax.random.key(0, impl="rbg"), 0.9, probs.shape)
    return mixed(jnp.where(kept, probs, 0), v)


AFTERWARDS = (plus_something_afterwards, another_sum)
NOT_FOUND = (
    wrong_axis,
    no_softmax,
    relu_probs,
    two_axes,
    squared,
    plus_something,
    plus_something_afterwards,
)


@pytest.mark.parametrize("attend", NOT_FOUND, ids=lambda f: f.__name__)
def test_what_is_no_attention_is_not_found(attend):
    params, batch = inputs()
    assert Both(projected(attend), **ONLY).findings(params, batch) == ()


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (read_twice, "reads scores or probabilities too"),
        (scores_read, "reads scores or probabilities too"),
        (masked_rows_are_zero, "a small instance computed something else"),
        (old_bits, "draws bits for all pairs"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_attention_that_stays_says_why(attend, reason):
    both = Both(projected(attend), **ONLY)
    params, batch = inputs()
    (finding,) = both.findings(params, batch)
    assert finding.becomes is None
    assert reason in finding.reason
    (loss, grads), (other_loss, other) = both.gradients(params, batch)
    assert loss == other_loss or (np.isnan(loss) and np.isnan(other_loss))
    jax.tree.map(np.testing.assert_array_equal, grads, other)


def test_short_attention_stays():
    def attend(q, k, v, batch, params):
        return mixed(jax.nn.softmax(scores_of(q, k)), v)

    both = Both(projected(attend), attention_block=LENGTH, loss=False, norms=False)
    (finding,) = both.findings(*inputs())
    assert finding.reason == f"it is not longer than a block of {LENGTH}"


@pytest.mark.slow
def test_a_mask_outside_of_a_loop_is_not_made_for_it():
    """The loop's constant, all pairs of positions, is computed by block inside, and not outside."""

    def loss(params, state, batch, key):
        seen = jnp.tril(jnp.ones((batch["x"].shape[1],) * 2, bool))[None, None]

        def layer(x, _):
            q, k, v = ((x @ params[n]).reshape(*x.shape[:2], HEADS, HEAD) for n in "qkv")
            y = mixed(jax.nn.softmax(jnp.where(seen, scores_of(q, k), -1e9)), v)
            return x + y.reshape(x.shape), None

        x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"], None, length=2)
        return jnp.mean(x**2), {}, state

    both = Both(loss, **ONLY)
    params, batch = inputs()
    del params["bias"]  # all pairs of positions too
    assert both.error(params, batch) < 3e-6
    (finding,) = both.rewritten.newest.findings
    assert finding.times == 2
    program = str(jax.make_jaxpr(both.rewritten)(params, None, batch, jax.random.key(0)))
    assert f"{LENGTH},{LENGTH}]" not in program


def test_a_long_chain_before_attention():
    """A program of thousands of equations is searched without recursion."""

    def attend(q, k, v, batch, params):
        for _ in range(700):
            q = jnp.sin(q) * q
        return mixed(jax.nn.softmax(scores_of(q, k)), v)

    (finding,) = Both(projected(attend), **ONLY).findings(*inputs())
    assert finding.becomes == "attention by blocks of 16"
