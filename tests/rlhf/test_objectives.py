"""The actor's loss of a model that computes log-probabilities by itself: the same, and smaller."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tools.quick import quick_compilation, thinned  # noqa: F401

from zeroxla import rlhf
from zeroxla.models import GPT, Llama

ROWS, LENGTH = 4, 13


def settings(algorithm):
    return rlhf.Settings(
        algorithm=algorithm, prompt_length=4, new_tokens=9, rows=ROWS, group=2, entropy=0.1
    )


def batch(vocab, length=LENGTH):
    draw = np.random.default_rng(0)
    targets = (ROWS, length - 1)
    return {
        "tokens": draw.integers(0, vocab, (ROWS, length), dtype=np.int32),
        "mask": (draw.random(targets) < 0.7).astype(np.float32),
        "logprobs": draw.normal(-3, 0.1, targets).astype(np.float32),
        "ref_logprobs": draw.normal(-3, 0.1, targets).astype(np.float32),
        "advantages": draw.normal(size=(ROWS,)).astype(np.float32),
    }


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("algorithm", thinned(["ppo"], slow=["grpo"]))
def test_loss_and_gradient_are_those_of_the_logits(algorithm):
    model = nnx.jit(lambda: Llama.tiny(loss_chunk=5)(nnx.Rngs(0)))()
    graph, params = nnx.split(model, nnx.Param)
    columns = batch(64)
    if algorithm == "ppo":
        columns["advantages"] = np.random.default_rng(1).normal(size=(ROWS, LENGTH - 1))

    def loss(params, whole):
        merged = nnx.merge(graph, params)
        apply = (lambda tokens: merged(tokens)) if whole else merged
        return rlhf.actor_loss(settings(algorithm))(apply, columns, train=True)[0]

    found, wanted = (
        jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, whole)
        for whole in (False, True)
    )
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-6), found[1], wanted[1]
    )


@pytest.mark.slow
def test_no_array_of_all_logits_exists():
    vocab, length = 8192, 257
    model = GPT.tiny(vocab=vocab, length=length, layers=1, width=16, heads=2, loss_chunk=16)
    columns = batch(vocab, length)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), columns["tokens"]))["params"]

    def temporaries(whole):
        def loss(params):
            bound = model.bind({"params": params})
            apply = (lambda tokens: bound(tokens)) if whole else bound
            return rlhf.actor_loss(settings("grpo"))(apply, columns, train=True)[0]

        compiled = jax.jit(jax.grad(loss)).lower(params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = ROWS * (length - 1) * vocab * jnp.float32.dtype.itemsize
    assert temporaries(whole=True) > logits
    assert temporaries(whole=False) < logits / 2
