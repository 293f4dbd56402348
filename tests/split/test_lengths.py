"""Sequences whose length an axis does not divide compute what they compute without padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tools.quick import quick_compilation, thinned  # noqa: F401

from zeroxla.program.trace import trace
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.conversions import conversions_of
from zeroxla.split.lengths.padded_program import with_padded_lengths
from zeroxla.step.axes.split_batch import SplitBatch
from zeroxla.step.axes.split_loss import SplitLoss

pytestmark = pytest.mark.usefixtures("quick_compilation")

PARTS, ROWS, WIDTH, VOCAB, MOST = 4, 2, 8, 16, 64
TOLERANCE = 5e-6


def weights():
    """Return embeddings, two products, features of patches, a class token, positions."""
    draw = np.random.default_rng(0).normal
    shapes = [(VOCAB, WIDTH), (WIDTH, WIDTH), (WIDTH, VOCAB), (5, WIDTH), (1, 1, WIDTH)]
    return [draw(size=s).astype(np.float32) / 3 for s in (*shapes, (MOST, WIDTH))]


def cross_entropy(logits, targets):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]


def shifted_logits(w, tokens):
    x = w[0][tokens]
    logits = (x + jnp.tanh(x @ w[1])) @ w[2]
    return cross_entropy(logits[:, :-1], tokens[:, 1:]).mean()


def flattened_and_masked(w, tokens):
    x = w[0][tokens[:, :-1]]
    logits = ((x + jnp.tanh(x @ w[1])) @ w[2]).reshape(-1, VOCAB)
    targets = tokens[:, 1:].reshape(-1)
    counts = (targets != 3).astype(jnp.float32)
    return (cross_entropy(logits, targets) * counts).sum() / counts.sum()


def class_token(w, patches):
    x = patches @ w[3]
    x = jnp.concatenate([jnp.broadcast_to(w[4], (x.shape[0], 1, WIDTH)), x], 1)
    x = x + w[5][: x.shape[1]]
    shares = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ w[1], x))
    return ((x + shares @ x)[:, 0] @ w[2] ** 2).mean()


def token_shift(w, tokens):
    x = w[0][tokens]
    before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
    x = jnp.tanh(x @ w[1] + before @ w[1].T)
    before = jnp.concatenate([jnp.ones_like(x[:, :1]), x[:, :-1]], 1)
    after = jnp.concatenate([x[:, 1:], x[:, -1:]], 1)
    return ((before * x + after @ w[2][:, :WIDTH]) ** 2).mean()


def associative_scan(w, tokens):
    x = w[0][tokens]

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    _, states = lax.associative_scan(combine, (jax.nn.sigmoid(x @ w[1]), x), axis=1)
    return ((states @ w[2]) ** 2).mean()


def rolled(w, tokens):
    return ((jnp.roll(w[0][tokens] @ w[1], 1, axis=1) @ w[2]) ** 2).mean()


def running_sums(w, tokens):
    x = w[0][tokens]
    sums = jnp.cumsum(x @ w[1], 1)
    back = lax.cumsum(x, axis=1, reverse=True) + lax.cummax(sums, axis=1, reverse=True)
    return ((sums @ w[2]) ** 2).mean() + back.mean()


def layers(w, tokens):
    def layer(x, kernel):
        def change(x):
            return jax.nn.gelu(x @ kernel) - x.mean(1, keepdims=True)

        x = x + jax.checkpoint(change)(x)
        return x, x.max(1)

    x, largest = lax.scan(layer, w[0][tokens], jnp.stack([w[1], w[1].T]))
    return ((x @ w[2]) ** 2).mean() + largest.sum()


def causal_attention(w, tokens):
    x, n = w[0][tokens], tokens.shape[1]
    places = jnp.arange(n)
    scores = jnp.einsum("bqd,bkd->bqk", x @ w[1], x) - 0.1 * jnp.abs(places[:, None] - places)
    scores = jnp.where(jnp.tril(jnp.ones((n, n), bool)), scores, -jnp.inf)
    shares = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    x = x + (shares / shares.sum(-1, keepdims=True)) @ x
    logits = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) @ w[2]
    targets = jax.nn.one_hot(tokens, VOCAB)
    return -(targets * jax.nn.log_softmax(logits)).sum(-1).mean() + logits.std(1).sum()


LOSSES = (
    shifted_logits,
    flattened_and_masked,
    class_token,
    token_shift,
    associative_scan,
    rolled,
    running_sums,
    layers,
    causal_attention,
)


def batch_for(loss, length):
    draw = np.random.default_rng(1)
    if loss is class_token:
        return draw.normal(size=(ROWS, length, 5)).astype(np.float32)
    return draw.integers(0, VOCAB, (ROWS, length)).astype(np.int32)


def assert_equal(found, expected):
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * max(1, np.abs(want).max()))


def products_along(program, size):
    """Return whether a product has a result with a dim of a size."""
    results = [v for eq in program.equations if eq.name == "dot_general" for v in eq.outputs]
    return any(size in v.aval.shape for v in results)


SLOW_LOSSES = (flattened_and_masked, causal_attention, token_shift, shifted_logits)
"""What they need of padding, other losses need too, or the tests of devices below."""


@pytest.mark.parametrize(
    "loss",
    thinned([x for x in LOSSES if x not in SLOW_LOSSES], slow=SLOW_LOSSES),
    ids=lambda loss: loss.__name__,
)
@pytest.mark.parametrize(
    "length", [15, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 33))]
)
def test_a_padded_program_computes_what_the_program_computes(loss, length):
    batch = batch_for(loss, length)
    program, _ = trace(loss, weights(), batch)
    num = len(weights())
    padded, lengths = with_padded_lengths(program, num, slice(num, None), PARTS, (2 * PARTS,))
    assert all(held % PARTS == 0 for held in lengths.values())
    for size, held in lengths.items():
        assert products_along(padded, held)
        assert not products_along(padded, size) or loss is layers
    if length % PARTS and loss is not flattened_and_masked:
        assert lengths

    def differentiated(program):
        return jax.jit(jax.value_and_grad(lambda w: program(*w, batch)[0]))(weights())

    assert_equal(differentiated(padded), differentiated(program))


@pytest.mark.slow
def test_lengths_of_a_scan_end_where_devices_have_hardly_one_element():
    """Dims of size 1, which a scan has in the end, are no sequences."""
    batch, num = batch_for(associative_scan, 16), len(weights())
    program, _ = trace(associative_scan, weights(), batch)
    padded, _ = with_padded_lengths(program, num, slice(num, None), 2, (4,))
    assert padded is not program
    np.testing.assert_allclose(padded(*weights(), batch), program(*weights(), batch), rtol=1e-6)


@functools.cache
def split(loss, length):
    """Return a loss and its gradients on `context`, and the conversions of its plan."""
    batch, plans = batch_for(loss, length), []

    def on_device(w, batch):
        batch = SplitBatch(arrays=batch, parts=((),))  # Every device is given all of it.
        found = SplitLoss.of(
            lambda w, state, batch, key: loss(w, batch),
            [("context", PARTS)],
            w,
            {},
            batch,
            jax.random.key(0),
            costs={"context": AxisCosts(latency=0.0)},
        )
        plans.extend(found.plans)
        value, gradients = jax.value_and_grad(lambda w: found(w, {}, batch, jax.random.key(0)))(w)
        return value, jax.tree.map(lambda g: lax.psum(g, "context"), gradients)

    mesh = Mesh(np.array(jax.devices()[:PARTS]), ("context",))
    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=(P(), P()), out_specs=(P(), P()), check_vma=False
    )
    return jax.jit(run)(weights(), batch), list(conversions_of(plans[0], PARTS))


QUICK = [(shifted_logits, 31), (token_shift, 32)]
SLOW = [(loss, n) for loss in LOSSES for n in (31, 32) if (loss, n) not in QUICK]


@pytest.mark.parametrize(
    ("loss", "length"), [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)]
)
def test_devices_along_an_axis_share_a_sequence(loss, length):
    found, _ = split(loss, length)
    expected = jax.jit(jax.value_and_grad(loss))(weights(), batch_for(loss, length))
    assert_equal(found, expected)


def test_a_shifted_loss_gathers_no_sequence():
    _, conversions = split(shifted_logits, 31)
    assert {c.shape for c in conversions if c.forward or c.backward} == {()}


def test_a_token_shift_sends_one_position_to_a_neighbour():
    _, conversions = split(token_shift, 32)
    travels = [c for c in conversions if c.forward or c.backward]
    assert [c.forward for c in travels].count("shift") == 3
    row = ROWS * WIDTH * 4
    assert all(c.received(PARTS) == (row, row) for c in travels if c.forward == "shift")
    others = [c for c in travels if c.forward != "shift"]
    assert all(np.prod(c.shape) <= ROWS * WIDTH for c in others)


@pytest.mark.slow
def test_an_associative_scan_never_has_the_sequence_whole():
    _, conversions = split(associative_scan, 32)
    assert any(c.forward == "shift" for c in conversions)
    gathered = [c for c in conversions if c.forward == "all-gather"]
    assert all(np.prod(c.shape) == 0 for c in gathered)


def test_a_sequence_that_nothing_multiplies_is_not_padded():
    def loss(w, x):
        return ((x.mean(1) @ w[3]) ** 2).mean()

    program, _ = trace(loss, weights(), batch_for(class_token, 15))
    num = len(weights())
    padded, lengths = with_padded_lengths(program, num, slice(num, None), PARTS, ())
    assert padded is program
    assert not lengths
