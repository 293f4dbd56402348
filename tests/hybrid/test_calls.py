"""Calls and caches of public models generate as whole passes do; what cannot be right is refused."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.call_models import (
    Bidirectional,
    Blocks,
    Dictionary,
    Given,
    NeverPadded,
    OneToken,
    OneTokenMasked,
    OneTokenNnx,
    PublicModel,
    Recurrent,
    Shifted,
    places_of,
)
from tools.hybrid import KEY, PROMPTS, Trained, train
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import HybridEngine

pytestmark = pytest.mark.usefixtures("quick_compilation")
CASES = {
    "public": (PublicModel, {}, ("padded", False)),
    "one token": (OneToken, {}, ("aligned", True)),
    "one token, masked": (OneTokenMasked, {}, ("padded", True)),
    "one token, nnx": (lambda: lambda rngs: OneTokenNnx(rngs=rngs), {}, ("aligned", True)),
    "given": (Given, {}, ("padded", False)),
    "recurrent": (Recurrent, {"make_cache": Recurrent.make_cache}, ("aligned", False)),
    "several tokens see each other": (NeverPadded, {}, ("aligned", True)),
}


def made(make, **config):
    """Train a model a little; its logits are those of `whole`, without an engine."""
    model = make()
    whole = getattr(model, "whole", OneTokenNnx.whole)
    step, state = (known := train(model, zeroxla.make_mesh(nodes=2), **config)).step, known.state
    apply = functools.partial(step.adapted.apply, zeroxla.full_params(state), state.model_state)
    return Trained(step, state, jax.jit(lambda tokens: whole(apply, tokens)))


def uses_of(engine):
    """Return how an engine uses the model's cache; None if it does not."""
    how = engine._model.calls.with_cache
    return None if how is None else (how.rows, how.one_token)


def generate(engine, known, prompts=PROMPTS, num=6, **options):
    options = {"key": KEY, "max_new_tokens": num, "temperature": 0, **options}
    return engine.generate(known.state, prompts, **options)


@pytest.mark.parametrize("name", CASES)
def test_a_call_by_names_with_its_cache(name):
    make, options, uses = CASES[name]
    known = made(make)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = HybridEngine(known.step, **options)
    assert uses_of(engine) == uses
    assert engine._buckets.limits.max_length == 32
    found = generate(engine, known)
    np.testing.assert_array_equal(found.tokens, known.greedy(PROMPTS, 6))
    np.testing.assert_array_equal(found.lengths, 6)
    rows = np.array([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]], np.int32)
    np.testing.assert_allclose(engine.logits(known.state, rows), known.logits(rows), atol=1e-5)
