"""`Encoder`: kinds of tokens, padding, refusals. The recorded BERT has its mathematics."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from tools.quick import quick_compilation  # noqa: F401

from zeroxla.models import Encoder, EncoderConfig

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = {"vocab": 16, "layers": 1, "width": 8, "heads": 2, "hidden": 16, "length": 6}
TOKENS = np.random.default_rng(0).integers(0, 16, (2, 6))


@pytest.fixture(scope="module")
def run():
    """Return a function of a batch that returns the loss, with the kinds' embeddings swapped if
    that is asked for."""
    model = nnx.jit(lambda: Encoder(EncoderConfig(**TINY), scan=False, rngs=nnx.Rngs(0)))()

    @nnx.jit
    def loss(model, batch, swapped):
        table = model.embed_types.embedding[...]
        model.embed_types.embedding[...] = jax.numpy.where(swapped, table[::-1], table)
        return model.loss(batch, train=True)[0]

    def run(swapped=False, **changes):
        ones, zeros = np.ones_like(TOKENS), np.zeros_like(TOKENS)
        batch = {"tokens": TOKENS, "targets": TOKENS, "mask": ones, "real": ones, "types": zeros}
        return float(loss(nnx.clone(model), {**batch, **changes}, swapped))

    return run


def test_each_kind_of_token_has_its_embedding(run):
    types = np.array([[0, 0, 0, 1, 1, 1]] * 2)
    found = run(types=types)
    assert found == pytest.approx(run(swapped=True, types=1 - types), rel=1e-6)
    assert abs(found - run()) > 1e-5


def test_padding_changes_nothing(run):
    real = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]])
    others = np.where(real, TOKENS, (TOKENS + 1) % 16)
    found = run(real=real, mask=real)
    assert found == pytest.approx(run(tokens=others, real=real, mask=real), rel=1e-6)
    assert abs(found - run(tokens=others, mask=real)) > 1e-5


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="sequence of 7 tokens, but the model has 6 positions"):
        nnx.eval_shape(
            lambda: Encoder(EncoderConfig(**TINY), rngs=nnx.Rngs(0))(np.zeros((1, 7), int))
        )
    with pytest.raises(ValueError, match="width 8 does not divide into 3 heads"):
        EncoderConfig(**{**TINY, "heads": 3})
