"""The first difference of two pytrees, in words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

from zeroxla.program.tree_difference import first_difference

PARAMS = {"wte": {"embedding": jnp.zeros((4, 2))}, "h": {"kernel": jnp.zeros((2, 2))}}


def state(optimizer: optax.GradientTransformation, params: dict = PARAMS):
    return jax.eval_shape(optimizer.init, params)


def test_leaves_are_not_compared():
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    assert first_difference(state(optax.adam(1)), optax.adam(1).init(ones)) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (state(optax.sgd(1)), "at '0' it needs ScaleByAdamState and has EmptyState"),
        (state(optax.lion(1)), "it needs (ScaleByAdamState, EmptyState) and has (ScaleByLionState"),
        (
            state(optax.adam(1), {"wte": PARAMS["wte"]}),
            "at '0/mu/h' it needs dict and has nothing",
        ),
        (
            state(optax.adam(1), {**PARAMS, "lm": jnp.zeros(3)}),
            "at '0/mu/lm' it needs nothing and has an array",
        ),
        (
            state(optax.adam(1), {**PARAMS, "h": {"kernel": optax.MaskedNode()}}),
            "at '0/mu/h/kernel' it needs an array and has MaskedNode",
        ),
        ((), "it needs (ScaleByAdamState, EmptyState) and has ()"),
        (None, "it needs (ScaleByAdamState, EmptyState) and has NoneType"),
    ],
)
def test_words(found, words):
    difference = first_difference(state(optax.adam(1)), found)
    assert difference is not None
    assert difference.startswith(words)
