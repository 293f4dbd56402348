"""Tokens outside the vocabulary are named before a step runs."""

import jax
import numpy as np
import optax
import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla.models import GPT, Llama

pytestmark = pytest.mark.usefixtures("quick_compilation")


def batch_with(token, dtype=np.int64):
    tokens = np.zeros((8, 9), dtype)
    tokens[3, 4] = token
    return {"tokens": tokens}


@pytest.fixture(scope="module")
def mesh():
    return zeroxla.make_mesh(nodes=2, devices_per_node=4)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (
            64,
            r"'tokens' holds tokens from 0 to 64, and the model's vocabulary is 0 to 63",
        ),
        (-5, r"'tokens' holds tokens from -5 to 0, and the model's"),
        (
            2**40,
            r"'tokens' holds whole numbers from 0 to 1099511627776, and int32 holds those from",
        ),
    ],
)
@pytest.mark.parametrize(
    "model",
    thinned(
        [GPT.tiny()],
        slow=[Llama.tiny(), zeroxla.lora(GPT.tiny(), rank=2, targets="c_fc/kernel")],
    ),
    ids=["gpt", "llama", "lora"],
)
def test_a_token_outside_the_vocabulary_is_named(mesh, model, token, message):
    step = zeroxla.make_step(model, mesh, optax.sgd(0.1))
    step.abstract_state(batch_with(63))
    for call in (step.abstract_state, lambda batch: step.init(jax.random.key(0), batch)):
        with pytest.raises(ValueError, match=message):
            call(batch_with(token))


def test_another_loss_may_mark_rows_as_it_likes(mesh):
    def loss(apply, batch, *, train):
        return apply(batch["tokens"].clip(0)).mean()

    zeroxla.make_step(GPT.tiny(), mesh, loss=loss).abstract_state(batch_with(-5))


def test_numbers_that_do_not_fit_are_named_where_a_global_batch_is_made(mesh):
    with pytest.raises(ValueError, match=r"'tokens' holds whole numbers from 0 to 1099511627776"):
        zeroxla.global_batch(batch_with(2**40), mesh)
    assert zeroxla.global_batch(batch_with(63), mesh)["tokens"].dtype == np.int32
