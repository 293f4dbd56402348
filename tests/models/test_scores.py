"""Attention with windows, segments, caps, slopes, sinks, dense and in blocks, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401

from zeroxla.models.attention import causal_attention
from zeroxla.models.decoder_layers import alibi_slopes
from zeroxla.models.head_losses import head_statistics
from zeroxla.models.losses import Head

pytestmark = pytest.mark.usefixtures("quick_compilation")
BLOCK, LENGTH, HEADS, GROUPS, WIDTH = 8, 29, 2, 3, 8
SEGMENTS = np.stack([np.repeat([1, 2, 3], [5, 17, 7]), np.repeat([1, 2, 0], [11, 9, 9])])
SINKS = np.random.default_rng(2).normal(size=(HEADS, GROUPS)).astype(np.float32)
SLOPES = alibi_slopes(HEADS * GROUPS).reshape(HEADS, GROUPS)

CASES = {
    "window of a block and more": {"window": 11},
    "window within a block": {"window": 3},
    "window of one": {"window": 1},
    "window beyond all": {"window": 100},
    "cap": {"softcap": 0.7},
    "scale": {"scale": 0.31},
    "slopes": {"slopes_KG": SLOPES},
    "segments": {"segments_BM": SEGMENTS},
    "sinks": {"sinks_KG": SINKS},
    "all": {
        **{"window": 9, "softcap": 1.3, "scale": 0.5},
        **{"slopes_KG": SLOPES, "segments_BM": SEGMENTS, "sinks_KG": SINKS},
    },
}
QUICK = ("all",)


def operands(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = [(2, LENGTH, HEADS, GROUPS, WIDTH)] + [(2, LENGTH, HEADS, WIDTH)] * 2
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def attention64(q, k, v, *, scale=WIDTH**-0.5, softcap=None, window=None, **arrays):
    """One query at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    slopes, segments = arrays.get("slopes_KG"), arrays.get("segments_BM")
    out = np.zeros_like(q)
    for b, i, h, g in np.ndindex(q.shape[:-1]):
        keys = [
            j
            for j in range(i + 1)
            if (window is None or i - j < window)
            and (segments is None or segments[b, i] == segments[b, j])
        ]
        scores = scale * k[b, keys, h] @ q[b, i, h, g]
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if slopes is not None:
            scores = scores - slopes[h, g] * (i - np.array(keys))
        if "sinks_KG" in arrays:  # one more key, whose value is 0
            scores = np.append(scores, np.float64(arrays["sinks_KG"][h, g]))
        weights = np.exp(scores - scores.max())
        weights, total = weights[: len(keys)], weights.sum()
        out[b, i, h, g] = weights / total @ v[b, keys, h]
    return out


@pytest.mark.parametrize("name", thinned(QUICK, slow=[n for n in CASES if n not in QUICK]))
def test_values_are_those_of_the_formula_and_blocks_have_its_gradient(name):
    """The gradient of the dense one is JAX's own. Sinks have one, too."""
    options = {key: x if np.isscalar(x) else jnp.asarray(x) for key, x in CASES[name].items()}
    inputs = operands()
    sinks = options.pop("sinks_KG", None)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=inputs[0].shape), jnp.float32)

    def run(block, **more):
        def loss(operands):
            *inputs, sinks = operands
            out = causal_attention(*inputs, block=block, sinks_KG=sinks, **{**options, **more})
            return jnp.sum(out * weights), out

        (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))((*inputs, sinks))
        return out, jax.tree.leaves(grads)

    dense, expected = run(LENGTH)
    np.testing.assert_allclose(dense, attention64(*inputs, **CASES[name]), rtol=0, atol=5e-6)
    traced = [{"window": jnp.int32(options["window"])}] if "window" in options else []
    for more in ({}, *traced):
        found, grads = run(BLOCK, **more)
        np.testing.assert_allclose(found, dense, rtol=0, atol=5e-6)
        for one, other in zip(grads, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=5e-5)


def test_values_may_be_of_another_width_than_keys():
    q, k, v = operands()
    dense = causal_attention(q, k, v, window=6)
    for block in (BLOCK, LENGTH):
        found = causal_attention(q, k, v[..., :3], block=block, window=6)
        np.testing.assert_allclose(found, dense[..., :3], atol=5e-6)


def test_a_window_counts_places_of_a_cache():
    q, k, v = operands()
    whole = causal_attention(q, k, v, window=6)
    last = causal_attention(q[:, -1:], k, v, window=6, start=LENGTH - 1)
    np.testing.assert_allclose(last, whole[:, -1:], rtol=0, atol=5e-6)


def num_pairs(window):
    """The number of pairs of blocks that a program goes through."""
    run = jax.jit(lambda *x: causal_attention(*x, block=4, window=window))
    text = run.lower(*operands()).as_text()
    return max(n for n in range(1, 65) if f"tensor<{n}x2xi32>" in text)


def test_blocks_outside_of_a_window_are_left_out():
    every = num_pairs(None)
    assert every == 8 * 9 // 2
    assert num_pairs(4) == 8 + 7
    assert num_pairs(LENGTH) == every


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"softcap": 2.0}, "a cap of scores"),
        ({"slopes_KG": SLOPES}, "slopes of scores"),
        ({"sinks_KG": SINKS}, "sinks of scores"),
        ({"segments_BM": SEGMENTS}, "segments"),
        ({"window": jnp.int32(3)}, "a window that differs between the turns of a loop"),
    ],
)
def test_what_cudnn_does_not_take_is_named(options, what):
    with pytest.raises(ValueError, match=f'backend="cudnn" does not take {what}; use "auto"'):
        causal_attention(*operands(jnp.bfloat16), backend="cudnn", **options)


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="window=0: a query sees at least its own position"):
        causal_attention(*operands(), window=0)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (8, [2.0**-i for i in range(1, 9)]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (1, [2**-8]),
    ],
)
def test_slopes_are_those_of_the_paper(heads, slopes):
    np.testing.assert_allclose(alibi_slopes(heads), slopes, rtol=1e-6)


@pytest.mark.parametrize("chunk", thinned([4], slow=[0, 11]))
def test_a_head_with_a_bias_a_scale_and_a_cap_in_chunks(chunk):
    keys = jax.random.split(jax.random.key(0), 6)
    x, head = jax.random.normal(keys[0], (2, 11, 8)), jax.random.normal(keys[1], (13, 8))
    bias, targets = jax.random.normal(keys[2], (13,)), jax.random.randint(keys[3], (2, 11), 0, 13)
    weights = [jax.random.normal(key, (2, 11)) for key in keys[4:]]

    def of_logits(x, head, bias):
        logprobs = jax.nn.log_softmax(1.5 * jnp.tanh(0.7 * (x @ head.T + bias) / 1.5))
        losses = -jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
        return losses, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)

    def in_chunks(x, head, bias):
        return head_statistics(x, Head(head, bias, 1.5, 0.7), targets, chunk, with_entropy=True)

    def with_gradients(function):
        def weighted(*args):
            found = function(*args)
            return sum(jnp.vdot(w, y) for w, y in zip(weights, found, strict=True)), found

        gradients, found = jax.jit(jax.grad(weighted, (0, 1, 2), has_aux=True))(x, head, bias)
        return *found, *gradients

    for a, b in zip(with_gradients(in_chunks), with_gradients(of_logits), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6)
