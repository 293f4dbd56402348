"""Losses of logits are computed by chunks of positions, however they are written."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.rewriting import Both

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS, LENGTH, WIDTH, VOCABULARY = 2, 50, 16, 64
ONLY = {"loss_chunk": 16, "attention": False, "norms": False}

integer = optax.softmax_cross_entropy_with_integer_labels


def with_optax(logits, targets, mask):
    return integer(logits, targets).mean()


def by_hand(logits, targets, mask):
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    losses = -jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
    return (losses * mask).sum() / jnp.maximum(mask.sum(), 1)


def smoothed(logits, targets, mask):
    labels = optax.smooth_labels(jax.nn.one_hot(targets, VOCABULARY), 0.1)
    return optax.softmax_cross_entropy(logits, labels).mean()


def summed_at_once(logits, targets, mask):
    labels = jax.nn.one_hot(targets, VOCABULARY)
    return -(labels * jax.nn.log_softmax(logits)).sum() / targets.size


def with_z_loss(logits, targets, mask):
    totals = jax.nn.logsumexp(logits, axis=-1)
    found = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return (totals - found + 1e-4 * totals**2).mean()


def capped(logits, targets, mask):
    return integer(30 * jnp.tanh(logits / 30), targets).mean()


def shifted(logits, targets, mask):
    return integer(logits[:, :-1], targets[:, 1:]).mean()


def with_accuracy(logits, targets, mask):
    hits = (logits.argmax(axis=-1) == targets).astype(jnp.float32)
    return integer(logits, targets).mean() + 0.1 * jax.lax.stop_gradient(hits.mean())


LOSSES = {
    f.__name__: f
    for f in (
        *(with_optax, by_hand, smoothed, summed_at_once, with_z_loss, capped, shifted),
        with_accuracy,
    )
}


def inputs(length=LENGTH):
    draw = np.random.default_rng(0)
    params = {
        "hidden": draw.standard_normal((WIDTH, WIDTH), np.float32) * 0.3,
        "head": draw.standard_normal((WIDTH, VOCABULARY), np.float32) * 0.3,
        "bias": draw.standard_normal(VOCABULARY, np.float32),
    }
    batch = {
        "x": draw.standard_normal((ROWS, length, WIDTH), np.float32),
        "targets": draw.integers(0, VOCABULARY, (ROWS, length)),
        "mask": draw.integers(0, 2, (ROWS, length)).astype(np.float32),
    }
    return params, batch


def of_logits(function):
    def loss(params, state, batch, key):
        logits = jnp.tanh(batch["x"] @ params["hidden"]) @ params["head"] + params["bias"]
        return function(logits, batch["targets"], batch["mask"]), {}, state

    return loss


@pytest.mark.parametrize(
    "name",
    thinned(["by_hand", "shifted"], slow=[x for x in LOSSES if x not in ("by_hand", "shifted")]),
)
def test_a_loss_is_found_and_computes_the_same(name):
    both = Both(of_logits(LOSSES[name]), **ONLY)
    params, batch = inputs()
    assert both.error(params, batch) < 1e-6
    (finding,) = both.rewritten.newest.findings
    assert (finding.kind, finding.becomes) == ("loss", "logits of 16 positions at a time")


def test_logits_of_all_positions_are_not_made():
    both = Both(of_logits(by_hand), **ONLY)
    params, batch = inputs(2048)
    written, rewritten = both.temporaries(params, batch)
    assert rewritten < written / 3


def all_positions_together(logits, targets, mask):
    return integer(logits / logits.std(), targets).mean()


def a_hidden_layer(logits, targets, mask):
    return (jax.nn.gelu(logits) @ jnp.ones((VOCABULARY, 3))).mean()


def logits_returned(logits, targets, mask):
    return integer(logits, targets).mean() + jnp.sort(logits, axis=1)[0, 0, 0]


@pytest.mark.parametrize(
    "function", [all_positions_together, a_hidden_layer, logits_returned], ids=lambda f: f.__name__
)
def test_other_products_are_not_found(function):
    assert Both(of_logits(function), **ONLY).findings(*inputs()) == ()


def test_few_positions_stay():
    both = Both(of_logits(by_hand), attention=False, norms=False, loss_chunk=LENGTH)
    (finding,) = both.findings(*inputs())
    assert finding.reason == f"it has no more positions than a chunk of {LENGTH}"
