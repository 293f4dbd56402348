"""The models' caches: filled in pieces of any length, with left padding, and in another dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tools.hybrid_models import ParallelGPT
from tools.quick import quick_compilation, thinned  # noqa: F401

from zeroxla.frontend import adapt
from zeroxla.models import GPT, Llama, Mixtral

pytestmark = pytest.mark.usefixtures("quick_compilation")
TOKENS = jax.random.randint(jax.random.key(1), (3, 12), 0, 48)
MODELS = {
    "gpt": lambda: GPT.tiny(),
    "gpt listed": lambda: GPT.tiny(scan=False),
    "llama": lambda: Llama.tiny(),
    "llama listed": lambda: Llama.tiny(scan=False),
    "mixtral": lambda: Mixtral.tiny(routing="ragged"),
    "parallel": lambda: ParallelGPT(),
}


QUICK = ["gpt"]
SLOW = [name for name in MODELS if name not in QUICK]


@pytest.fixture(scope="module", params=thinned(QUICK, slow=SLOW))
def model(request):
    adapted = adapt(MODELS[request.param]())
    batch = {"tokens": jnp.zeros((2, 9), jnp.int32)}
    params, state = jax.jit(adapted.init)(jax.random.key(0), batch)
    whole = jax.jit(functools.partial(adapted.apply, params, state))
    return adapted, whole, jax.jit(functools.partial(adapted.caching.apply, params, state))


def names(adapted):
    """What the model calls positions and mask."""
    known = adapted.signature.parameters
    return [next(n for n in known if word in n) for word in ("position", "mask")]


def empty(adapted, dtype=None):
    """A cache of 16 places for the rows of TOKENS."""
    tokens = jnp.zeros((3, 16), jnp.int32)
    return adapted.caching.empty(3, 16, dtype, lambda model: model(tokens))


@pytest.mark.parametrize("pieces", thinned([[5, 1, 6]], slow=[[12], [1] * 12]))
def test_pieces_give_the_logits_of_the_whole(model, pieces):
    adapted, whole, apply = model
    cache, found, start = empty(adapted), [], 0
    for length in pieces:
        logits, cache = apply(cache, TOKENS[:, start : start + length])
        found.append(logits)
        start += length
    np.testing.assert_allclose(jnp.concatenate(found, 1), whole(TOKENS), atol=1e-5)


def test_left_padded_rows_give_the_logits_of_rows_alone(model):
    adapted, whole, apply = model
    pads = jnp.array([0, 4, 9])
    padded = jax.vmap(jnp.roll)(TOKENS, pads)
    mask = (jnp.arange(16) >= pads[:, None]).astype(jnp.int32)
    positions = jnp.maximum(jnp.arange(12) - pads[:, None], 0)
    position_name, mask_name = names(adapted)
    cache = empty(adapted)
    for part in (slice(0, 7), slice(7, 12)):
        arguments = {position_name: positions[:, part], mask_name: mask}
        logits, cache = apply(cache, padded[:, part], **arguments)
    for i, pad in enumerate(pads.tolist()):
        num = min(5, 12 - pad)
        alone = whole(TOKENS)[i, : 12 - pad]  # causal: what follows does not matter
        np.testing.assert_allclose(logits[i, -num:], alone[-num:], atol=1e-5)


def test_a_cache_keeps_its_dtype(model):
    adapted, whole, apply = model
    cache = empty(adapted, jnp.bfloat16)
    kinds = jax.tree.map(lambda x: x.dtype, cache)
    assert {str(x) for x in jax.tree.leaves(kinds)} == {"bfloat16", "int32"}
    logits, cache = apply(cache, TOKENS)
    assert jax.tree.map(lambda x: x.dtype, cache) == kinds
    np.testing.assert_allclose(logits, whole(TOKENS), atol=0.05)
    assert np.abs(logits - whole(TOKENS)).max() > 0


def test_models_without_a_cache_have_none():
    class Plain(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones(3))

        def __call__(self, tokens, *, mask=None):
            return tokens

        def loss(self, batch, *, train):
            return jnp.sum(self.w[...])

    adapted = adapt(lambda rngs: Plain(rngs))
    assert adapted.caching is None
    assert list(adapted.signature.parameters) == ["tokens", "mask"]
    assert adapted.context is None
    assert adapt(GPT.tiny()).context == 32
    assert adapt(ParallelGPT()).context == 64
