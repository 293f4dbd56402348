"""Continuing a text: the window slides, and each byte is the one the model would choose."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zeroxla.cli.train.sample import continue_text

LENGTH = 5


def logits(params, tokens_BL):
    """A causal model: at each position, a random table's row for a hash of all that it sees."""
    seen_BL = jnp.cumsum(tokens_BL * (1 + jnp.arange(tokens_BL.shape[1])), axis=1)
    return params[seen_BL % params.shape[0]]


@pytest.fixture
def params():
    return jax.random.normal(jax.random.key(0), (97, 256))


def by_hand(params, start, num_bytes):
    """Greedy continuation by one forward pass over the last LENGTH bytes, written plainly."""
    text = list(start)
    for _ in range(num_bytes):
        window = np.array(text[-LENGTH:])
        seen = (window * (1 + np.arange(len(window)))).sum()
        text.append(int(np.argmax(np.asarray(params)[seen % 97])))
    return text[len(start) :]


@pytest.mark.parametrize("prompt", [b"a", b"abcd", b"abcde", b"much longer than the window"])
def test_greedy_equals_forward_passes_by_hand(params, prompt):
    sampled = continue_text(
        logits,
        params,
        prompt,
        num_tokens=12,
        length=LENGTH,
        temperature=0,
        key=jax.random.key(0),
    )
    assert sampled == by_hand(params, prompt, 12)


def test_temperature_samples_from_the_softmax():
    # Two likely bytes, three to one: the share of the first among many is near 3/4.
    params = jnp.full((97, 256), -1e9).at[:, 65].set(jnp.log(3.0)).at[:, 66].set(0.0)
    sampled = continue_text(
        logits, params, b"x", num_tokens=400, length=LENGTH, temperature=1, key=jax.random.key(1)
    )
    assert set(sampled) == {65, 66}
    assert 0.65 < sampled.count(65) / 400 < 0.85
