"""Padding in an equation of its own, which a convolution then does."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from zeroxla.program.trace import trace
from zeroxla.split.folded_padding import with_folded_padding

X = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)


def names(program):
    return [eq.name for eq in program.equations]


def test_a_causal_convolution_of_flax_pads_by_itself():
    convolution = nnx.Conv(4, 4, (3,), padding="CAUSAL", feature_group_count=4, rngs=nnx.Rngs(0))
    program, _ = trace(lambda x: jnp.tanh(convolution(x)), X)
    folded = with_folded_padding(program)
    assert "pad" in names(program)
    assert "pad" not in names(folded)
    (want,), (have,) = program(X), folded(X)
    np.testing.assert_array_equal(have, want)


def padded(x, edges, value=0.0):
    return jnp.pad(x, edges, constant_values=value)


def convolved(x):
    return nnx.Conv(x.shape[-1], 4, (3,), padding="VALID", rngs=nnx.Rngs(0))(x)


def read_twice(x):
    x = padded(x, ((0, 0), (2, 0), (0, 0)))
    return convolved(x) + x[:, 2:].sum()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: convolved(padded(x, ((0, 0), (2, 0), (0, 0)), value=1.0)),
        lambda x: convolved(padded(x, ((0, 0), (0, 0), (2, 0)))),
        lambda x: convolved(padded(x, ((1, 0), (2, 0), (0, 0)))),
        read_twice,
    ],
    ids=["ones", "features", "rows", "read twice"],
)
def test_other_padding_stays(call):
    program, _ = trace(call, X)
    assert with_folded_padding(program) is program
