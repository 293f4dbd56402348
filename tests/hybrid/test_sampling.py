"""Tokens are drawn from the distribution that the options say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.quick import quick_compilation  # noqa: F401

from zeroxla.hybrid.sampling import Sampling, log_probs, sample

pytestmark = pytest.mark.usefixtures("quick_compilation")

NUM_DRAWS = 20_000
LOGITS = np.array([2.0, 1.5, 1.5, 0.3, 0.0, -0.5, -1.0, -2.0, -4.0, 1.9], np.float32)


def expected(temperature, top_k, top_p):
    """Return the probabilities, in float64, by the definitions."""
    logits = LOGITS.astype(np.float64) / temperature
    order = sorted(range(logits.size), key=lambda i: (-logits[i], i))
    left = order if top_k is None else order[:top_k]
    weights = np.exp(logits[left] - logits[left].max())
    weights /= weights.sum()
    reached, kept = 0.0, []
    for i, weight in zip(left, weights, strict=True):
        if reached < top_p:
            kept.append((i, weight))
        reached += weight
    probs = np.zeros(logits.size)
    for i, weight in kept:
        probs[i] = weight
    return probs / probs.sum()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 4])
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_frequencies_are_those_of_the_options(temperature, top_k, top_p):
    options = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(NUM_DRAWS))
    logits = jnp.broadcast_to(LOGITS, (NUM_DRAWS, LOGITS.size))
    drawn = jax.jit(sample, static_argnames=("greedy", "filtered"))(
        keys, logits, options.numbers, greedy=False, filtered=options.is_filtered
    )
    counts = np.bincount(np.asarray(drawn), minlength=LOGITS.size)
    probs = expected(temperature, top_k, top_p)
    assert not counts[probs == 0].any()
    possible = probs > 0
    wanted = probs[possible] * NUM_DRAWS
    chi_square = ((counts[possible] - wanted) ** 2 / wanted).sum()
    # The 99.9 % quantile for 9 degrees of freedom; fewer tokens have fewer.
    assert chi_square < 27.9, (counts, wanted)


def test_greedy_takes_the_first_of_the_likeliest():
    logits = jnp.array([[0.0, 3.0, 3.0], [1.0, 0.0, -1.0]])
    keys = jax.random.split(jax.random.key(0), 2)
    numbers = Sampling(temperature=0).numbers
    drawn = sample(keys, logits, numbers, greedy=True, filtered=False)
    assert drawn.tolist() == [1, 0]
    assert drawn.dtype == jnp.int32


def test_log_probabilities_are_those_of_the_model_itself():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 7)) * 30, jnp.float32)
    tokens = jnp.array([0, 3, 6])
    exact = np.asarray(logits, np.float64)
    exact -= exact.max(-1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(log_probs(logits, tokens), exact[np.arange(3), tokens], atol=1e-5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 must be 0 or more"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0 must be a whole number"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_options_out_of_range_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        Sampling(**options)
