"""`Encoder`: kinds of tokens, padding, refusals. The recorded BERT has its mathematics."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tools.quick import quick_compilation  # noqa: F401

from zeroxla.models import Encoder, EncoderConfig

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = {"vocab": 16, "layers": 1, "width": 8, "heads": 2, "hidden": 16, "length": 6}
TOKENS = np.random.default_rng(0).integers(0, 16, (2, 6))


def model():
    return Encoder(EncoderConfig(**TINY), scan=False, rngs=nnx.Rngs(0))


def test_each_kind_of_token_has_its_embedding():
    types = np.array([[0, 0, 0, 1, 1, 1]] * 2)
    one, other = model(), model()
    other.embed_types.embedding[...] = other.embed_types.embedding[...][::-1]
    found = one(TOKENS, types_BL=types)
    np.testing.assert_allclose(found, other(TOKENS, types_BL=1 - types), atol=1e-6)
    assert np.abs(found - one(TOKENS)).max() > 1e-4
    losses = [
        float(one.loss({"tokens": TOKENS, "targets": TOKENS, **more}, train=True)[0])
        for more in ({}, {"types": types})
    ]
    assert losses[0] != losses[1]


def test_padding_changes_nothing():
    real = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]])
    batch = {"tokens": TOKENS, "targets": TOKENS, "mask": real, "real": real}
    others = {**batch, "tokens": np.where(real, TOKENS, (TOKENS + 1) % 16)}
    losses = [float(model().loss(x, train=True)[0]) for x in (batch, others)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    seen = float(model().loss({**others, "real": jnp.ones_like(real)}, train=True)[0])
    assert seen != pytest.approx(losses[0], rel=1e-6)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="sequence of 7 tokens, but the model has 6 positions"):
        model()(np.zeros((1, 7), int))
    with pytest.raises(ValueError, match="width 8 does not divide into 3 heads"):
        EncoderConfig(**{**TINY, "heads": 3})
