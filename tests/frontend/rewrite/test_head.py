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


def after_a_prefix(logits, targets, mask):
    return (integer(logits[:, 7:], targets[:, 7:]) * mask[:, 7:]).sum()


def flat(logits, *others):
    return logits.reshape(-1, VOCABULARY), *(x.reshape(-1) for x in others)


def flat_with_optax(logits, targets, mask):
    logits, targets = flat(logits, targets)
    return integer(logits, targets).mean()


def flat_by_hand(logits, targets, mask):
    logits, targets, mask = flat(logits, targets, mask)
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    losses = -jnp.take_along_axis(logprobs, targets[:, None], axis=1).squeeze(1)
    return (losses * mask).sum() / mask.sum()


def flat_looked_up(logits, targets, mask):
    """Labels looked up by numbers of rows; some are to be ignored."""
    logits, targets, mask = flat(logits, targets, mask)
    targets = jnp.where(mask == 0, -100, targets)
    logprobs = jax.nn.log_softmax(logits)
    losses = -logprobs[jnp.arange(targets.size), jnp.maximum(targets, 0)]
    return jnp.where(targets == -100, 0, losses).sum() / (targets != -100).sum()


def looked_up(logits, targets, mask):
    rows, places = jnp.arange(ROWS)[:, None], jnp.arange(logits.shape[1])[None]
    return -jax.nn.log_softmax(logits)[rows, places, targets].mean()


def flat_one_hot(logits, targets, mask):
    logits, targets, mask = flat(logits, targets, mask)
    labels = jax.nn.one_hot(targets, VOCABULARY) * 0.9 + 0.1 / VOCABULARY
    return (-(labels * jax.nn.log_softmax(logits)).sum(-1) * mask).sum() / mask.sum()


def flat_with_z_loss(logits, targets, mask):
    logits, targets, mask = flat(30 * jnp.tanh(logits / 30), targets, mask)
    totals = jax.nn.logsumexp(logits, axis=-1)
    losses = totals - jnp.sum(jax.nn.one_hot(targets, VOCABULARY) * logits, axis=-1)
    return jnp.average(losses + 1e-4 * totals**2, weights=mask)


def flat_shifted(logits, targets, mask):
    logits, targets = flat(logits[:, :-1], targets[:, 1:])
    return integer(logits, targets).mean()


def flat_summed_at_once(logits, targets, mask):
    logits, targets = flat(logits, targets)
    return -jnp.sum(jax.nn.one_hot(targets, VOCABULARY) * jax.nn.log_softmax(logits)) / targets.size


def flat_einsum(logits, targets, mask):
    logits, targets = flat(logits, targets)
    labels = jax.nn.one_hot(targets, VOCABULARY)
    return -jnp.einsum("nv,nv->n", labels, jax.nn.log_softmax(logits)).mean()


def rows_of_a_map(logits, targets, mask):
    return jax.vmap(lambda x, label: -jax.nn.log_softmax(x)[label])(*flat(logits, targets)).mean()


LOSSES = {
    f.__name__: f
    for f in (
        *(with_optax, by_hand, smoothed, summed_at_once, with_z_loss, capped, shifted),
        *(with_accuracy, after_a_prefix, looked_up, flat_with_optax, flat_by_hand, flat_looked_up),
        *(flat_one_hot, flat_with_z_loss, flat_shifted, flat_summed_at_once, flat_einsum),
        rows_of_a_map,
    )
}
QUICK = ("flat_looked_up",)


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
    thinned(QUICK, slow=[x for x in LOSSES if x not in QUICK]),
)
def test_a_loss_is_found_and_computes_the_same(name):
    both = Both(of_logits(LOSSES[name]), **ONLY)
    params, batch = inputs()
    assert both.error(params, batch) < 1e-6
    (finding,) = both.rewritten.newest.findings
    assert (finding.kind, finding.becomes) == ("loss", "logits of 16 positions at a time")


@pytest.mark.parametrize(
    "function", thinned([by_hand], slow=[flat_with_optax]), ids=lambda f: f.__name__
)
def test_logits_of_all_positions_are_not_made(function):
    both = Both(of_logits(function), **ONLY)
    params, batch = inputs(2048)
    written, rewritten = both.temporaries(params, batch)
    assert rewritten < written / 3


def time_first(params, state, batch, key):
    """Positions before rows."""
    logits = jnp.swapaxes(batch["x"], 0, 1) @ params["head"] + params["bias"]
    return flat_by_hand(logits, batch["targets"].T, batch["mask"].T), {}, state


def flat_before(params, state, batch, key):
    """Rows and positions are flattened before the head, and apart again after it."""
    logits = batch["x"].reshape(-1, WIDTH) @ params["head"] + params["bias"]
    logits = logits.reshape(*batch["targets"].shape, VOCABULARY)
    return by_hand(logits, batch["targets"], batch["mask"]), {}, state


@pytest.mark.parametrize(
    "loss", thinned([], slow=[time_first, flat_before]), ids=lambda f: f.__name__
)
def test_other_orders_of_rows_and_positions(loss):
    both = Both(loss, **ONLY)
    params, batch = inputs()
    del params["hidden"]
    assert both.error(params, batch) < 1e-6
    (finding,) = both.rewritten.newest.findings
    assert finding.becomes == "logits of 16 positions at a time"


def all_positions_together(logits, targets, mask):
    return integer(logits / logits.std(), targets).mean()


def a_hidden_layer(logits, targets, mask):
    return (jax.nn.gelu(logits) @ jnp.ones((VOCABULARY, 3))).mean()


def logits_returned(logits, targets, mask):
    return integer(logits, targets).mean() + jnp.sort(logits, axis=1)[0, 0, 0]


def chosen_words(logits, targets, mask):
    """The largest words of a position, whatever they are: no loss."""
    return jax.lax.top_k(logits, 3)[0].mean()


@pytest.mark.parametrize("function", [a_hidden_layer, chosen_words], ids=lambda f: f.__name__)
def test_other_products_are_not_found(function):
    assert Both(of_logits(function), **ONLY).findings(*inputs()) == ()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (all_positions_together, "numbers of all positions together are read beside logits"),
        (logits_returned, "`sort` of logits is not computed position by position"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_logits_that_stay_say_why(function, reason):
    (finding,) = Both(of_logits(function), **ONLY).findings(*inputs())
    assert (finding.kind, finding.becomes, finding.reason) == ("loss", None, reason)


def test_logits_that_are_a_metric_say_so():
    def loss(params, state, batch, key):
        logits = batch["x"] @ params["head"]
        return integer(logits, batch["targets"]).mean(), {"logits": logits}, state

    (finding,) = Both(loss, **ONLY).findings(*inputs())
    assert finding.reason == "logits are a result of the program too"


def test_few_positions_stay():
    both = Both(of_logits(by_hand), attention=False, norms=False, loss_chunk=LENGTH)
    (finding,) = both.findings(*inputs())
    assert finding.reason == f"it has no more positions than a chunk of {LENGTH}"
