"""Blockwise attention against the dense one, and the memory of both attention and loss."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla.models import GPT, Llama
from zeroxla.models.attention import causal_attention, dense_attention
from zeroxla.models.blockwise import Dropout, blockwise_attention
from zeroxla.models.head_losses import head_statistics

pytestmark = pytest.mark.usefixtures("quick_compilation")
BLOCK = 8


def operands(length, *, num_keys=None, heads=2, groups=3, width=8, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(2, length, heads, groups, width)] + [(2, num_keys or length, heads, width)] * 2
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def padding(length, missing):
    """A mask of rows whose first tokens are missing."""
    return jnp.asarray(np.arange(length) >= np.array(missing)[:, None], jnp.int32)


CASES = {
    "whole blocks": (32, {}),
    "a short last block": (29, {}),
    "one block and one": (9, {}),
    "padding": (29, {"mask_BM": padding(29, [0, 11])}),
    "a row without a token": (24, {"mask_BM": padding(24, [3, 24])}),
    "many groups": (20, {"heads": 1, "groups": 5}),
    "ordinary heads": (20, {"heads": 4, "groups": 1}),
}


QUICK = ("padding", "a row without a token")


@pytest.mark.smoke
@pytest.mark.parametrize("name", thinned(QUICK, slow=[n for n in CASES if n not in QUICK]))
def test_values_and_gradients_are_those_of_dense_attention(name):
    length, options = CASES[name]
    options = dict(options)
    mask = options.pop("mask_BM", None)
    inputs = operands(length, **options)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=inputs[0].shape), jnp.float32)
    if mask is not None:
        weights = weights * (mask != 0)[:, :, None, None, None]

    def of(attention):
        def loss(q, k, v):
            out = attention(q, k, v)
            return jnp.sum(out * weights), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*inputs)

    (_, found), grads = of(lambda q, k, v: blockwise_attention(q, k, v, mask, 0, None, BLOCK))
    (_, wanted), expected = of(lambda q, k, v: dense_attention(q, k, v, mask, 0, None))
    # What a query that sees no token gets means nothing, and its gradient must not reach others.
    counts = np.ones(wanted.shape[:2], bool) if mask is None else np.asarray(mask) != 0
    np.testing.assert_allclose(found[counts], wanted[counts], rtol=0, atol=5e-6)
    if mask is None or bool(counts.any(axis=1).all()):
        for one, other in zip(grads, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=5e-5)
    assert all(np.isfinite(g).all() for g in (found, *grads))


@pytest.mark.parametrize("start", thinned([5], slow=[0]))
def test_a_cache_has_more_places_than_there_are_queries(start):
    q, k, v = operands(19, num_keys=40)
    mask = padding(40, [0, 4])
    traced = jax.jit(lambda s: blockwise_attention(q, k, v, mask, s, None, BLOCK))
    wanted = dense_attention(q, k, v, mask, start, None)
    np.testing.assert_allclose(traced(start), wanted, rtol=0, atol=5e-6)


def test_half_precision_rounds_no_more_than_dense_attention():
    exact = dense_attention(*operands(40), None, 0, None)
    half = operands(40, dtype=jnp.bfloat16)
    errors = [
        float(jnp.linalg.norm(out.astype(jnp.float32) - exact) / jnp.linalg.norm(exact))
        for out in (
            jax.jit(lambda *x: blockwise_attention(*x, None, 0, None, BLOCK))(*half),
            jax.jit(lambda *x: dense_attention(*x, None, 0, None))(*half),
        )
    ]
    assert errors[0] < 1.05 * errors[1]


def test_dropout_is_the_same_in_backward():
    inputs = operands(24)
    dropout = Dropout(0.25, jax.random.key(3))

    @jax.jit
    def loss(q, k, v):
        return jnp.sum(blockwise_attention(q, k, v, None, 0, dropout, BLOCK) ** 2)

    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*inputs)
    for i, grad in enumerate(grads):
        direction = jnp.asarray(np.random.default_rng(i).normal(size=grad.shape), jnp.float32)
        ends = []
        for sign in (-1, 1):
            moved = list(inputs)
            moved[i] = moved[i] + sign * 1e-2 * direction
            ends.append(loss(*moved))
        slope = (ends[1] - ends[0]) / 2e-2
        scale = float(jnp.linalg.norm(grad) * jnp.linalg.norm(direction))
        np.testing.assert_allclose(jnp.sum(grad * direction), slope, atol=1e-4 * scale)


@pytest.mark.slow
@pytest.mark.parametrize("draws", thinned([500], slow=[4000]))
def test_dropout_keeps_the_mean(draws):
    inputs = operands(24)

    def mean_of(key):
        return blockwise_attention(*inputs, None, 0, Dropout(0.25, key), BLOCK)

    outs = jax.jit(jax.vmap(mean_of))(jax.random.split(jax.random.key(0), draws))
    wanted = dense_attention(*inputs, None, 0, None)
    error = 5 * outs.std(axis=0) / draws**0.5
    assert (jnp.abs(outs.mean(axis=0) - wanted) <= error + 1e-6).mean() > 0.999


def test_bad_arguments_are_named():
    q, k, v = operands(16)
    with pytest.raises(ValueError, match=r"backend='flash': take auto, blockwise or cudnn"):
        causal_attention(q, k, v, backend="flash")
    with pytest.raises(ValueError, match=r'"cudnn" does not take float32, only bfloat16 and'):
        causal_attention(q, k, v, backend="cudnn")
    half = operands(16, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r'does not take a mask of padding; use "auto"'):
        causal_attention(*half, mask_BM=padding(16, [0, 1]), backend="cudnn")
    with pytest.raises(ValueError, match=r"does not take dropout"):
        causal_attention(*half, dropout=Dropout(0.1, jax.random.key(0)), backend="cudnn")
    with pytest.raises(ValueError, match=r"block=0: attention takes 1 query"):
        causal_attention(q, k, v, block=0)
    with pytest.raises(ValueError, match=r"loss_chunk=-1: give a number of positions"):
        loss_of(GPT.tiny(loss_chunk=-1), tokens(2, 9))


def tokens(rows, length, vocab=64):
    rng = np.random.default_rng(0)
    return {"tokens": jnp.asarray(rng.integers(0, vocab, (rows, length)), jnp.int32)}


def loss_of(model, batch):
    """Return (loss, gradients) of a linen model with the parameters of its seed."""
    init = jax.jit(functools.partial(model.init, train=False, method="loss"))
    params = init({"params": jax.random.key(0)}, batch)["params"]

    def loss(params):
        return model.apply({"params": params}, batch, train=False, method="loss")[0]

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize("masked", thinned([True], slow=[False]))
@pytest.mark.parametrize("chunk", thinned([], slow=[7, 29]))
def test_a_loss_in_chunks_is_the_loss(chunk, masked):
    batch = tokens(3, 30)
    if masked:
        batch["mask"] = padding(29, [0, 7, 20])
    whole, grads = loss_of(GPT.tiny(loss_chunk=0), batch)
    found, in_chunks = loss_of(GPT.tiny(loss_chunk=chunk), batch)
    np.testing.assert_allclose(found, whole, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-7), in_chunks, grads)


@pytest.mark.parametrize("chunk", thinned([0, 3], slow=[5, 11]))
def test_losses_and_entropies_of_a_head_are_those_of_its_logits(chunk):
    keys = jax.random.split(jax.random.key(0), 5)
    x, head = jax.random.normal(keys[0], (2, 11, 8)), jax.random.normal(keys[1], (13, 8))
    targets = jax.random.randint(keys[2], (2, 11), 0, 13)
    weights = [jax.random.normal(key, (2, 11)) for key in keys[3:]]

    def of_logits(x, head):
        logits = x @ head.T
        entropies = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=-1)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets), entropies

    def in_chunks(x, head):
        return head_statistics(x, head, targets, chunk, with_entropy=True)

    def with_gradients(function):
        def weighted(x, head):
            found = function(x, head)
            return sum(jnp.vdot(w, y) for w, y in zip(weights, found)), found

        gradients, found = jax.jit(jax.grad(weighted, (0, 1), has_aux=True))(x, head)
        return *found, *gradients

    for a, b in zip(with_gradients(in_chunks), with_gradients(of_logits), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6)


def test_backward_holds_one_gradient_of_the_head():
    """However many chunks there are; the head is larger than the logits of a chunk."""
    x, head = jnp.zeros((1, 256, 64), jnp.bfloat16), jnp.zeros((4096, 64), jnp.bfloat16)

    def temporaries(chunk):
        def loss(x, head):
            return head_statistics(x, head, jnp.zeros((1, 256), jnp.int32), chunk)[0].sum()

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, head).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits, gradient = 16 * 4096 * 4, head.size * 4
    assert temporaries(16) < 3 * gradient + 4 * logits
    assert temporaries(8) < temporaries(32)


def test_targets_give_their_losses_and_none_the_logits():
    batch = tokens(2, 21)["tokens"]
    model = Llama.tiny(loss_chunk=6)(nnx.Rngs(0))
    logits = nnx.jit(lambda model, x: model(x))(model, batch[:, :-1])
    losses = nnx.jit(lambda model, x, y: model(x, targets_BL=y))(model, batch[:, :-1], batch[:, 1:])
    wanted = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


MODELS = {
    "gpt, scanned": lambda **options: GPT.tiny(**options),
    "gpt, unrolled": lambda **options: GPT.tiny(scan=False, remat=True, **options),
    "llama": lambda **options: Llama.tiny(**options),
}


@pytest.mark.parametrize("name", thinned([], slow=MODELS))
def test_a_step_with_blocks_is_the_step_without(name):
    """On 2 x 4 devices, with every leaf split, and several blocks and chunks in a sequence."""
    mesh = zeroxla.make_mesh(nodes=2)
    batch = tokens(8, 31)
    config = zeroxla.ZeroConfig(persistence_threshold=0)
    with_blocks, without = (
        zeroxla.make_step(MODELS[name](**options), mesh, optax.sgd(0.5), config=config)
        for options in ({"attention_block": 8, "loss_chunk": 12}, {})
    )
    state = with_blocks.init(jax.random.key(0), batch)
    (loss, found), (wanted, gradients) = (x.grad(state, batch) for x in (with_blocks, without))
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), found, gradients)


@pytest.mark.parametrize("scan", thinned([True], slow=[False]))
def test_memory_grows_with_the_length_and_not_with_its_square(scan):
    temporaries = {}
    for length in (256, 1024):
        model = GPT(
            vocab=256,
            length=length,
            layers=2,
            width=64,
            heads=8,
            scan=scan,
            attention_block=128,
            loss_chunk=128,
        )
        batch = {"tokens": jax.ShapeDtypeStruct((1, length + 1), jnp.int32)}
        params = jax.eval_shape(
            lambda b, model=model: model.init(
                {"params": jax.random.key(0)}, b, train=False, method="loss"
            )["params"],
            batch,
        )

        def loss(params, batch, model=model):
            return model.apply({"params": params}, batch, train=False, method="loss")[0]

        lowered = jax.jit(jax.value_and_grad(loss)).lower(params, batch)
        temporaries[length] = lowered.compile().memory_analysis().temp_size_in_bytes
        text = lowered.as_text()
        assert not re.search(rf"\b{length}x(1x)?{length}xf32", text), "scores"
        assert not re.search(rf"\b{length}x256xf32", text), "logits"
    assert temporaries[1024] <= 1.15 * 4 * temporaries[256]
