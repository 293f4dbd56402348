"""What counts nothing has no say: a device or micro-batch of weight 0, even if its mean is 0/0."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.quick import quick_compilation  # noqa: F401

import zeroxla

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(0)


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + nn.Dense(8)(nn.tanh(nn.Dense(8)(x))), None

        x = nn.Embed(12, 8)(tokens)
        over = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(nn.remat(Layer), length=2, **over)()(x, None)
        return nn.Dense(12)(x)


def parts(logits, batch):
    tokens, mask = batch["tokens"], batch["mask"][:, 1:].astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.astype(jnp.float32) * mask, mask


def plain(apply, batch, *, train):
    losses, mask = parts(apply(batch["tokens"]), batch)
    return losses.sum() / mask.sum(), {"weight": mask.sum(), "first": losses.max() / mask.max()}


def in_turns(apply, batch, *, train):
    """The division is inside of a loop, and of `jax.checkpoint`."""
    losses, mask = parts(apply(batch["tokens"]), batch)

    @jax.checkpoint
    def turn(total, column):
        return total + column.sum() / mask.sum(), None

    return jax.lax.scan(turn, 0.0, losses.T)[0], {"weight": mask.sum()}


def batch_with(num_rows_of_nothing):
    random = np.random.default_rng(0)
    mask = (np.arange(6)[None] < random.integers(2, 6, size=(8, 1))).astype(np.int32)
    mask[2 : 2 + num_rows_of_nothing] = 0
    return {"tokens": random.integers(0, 12, (8, 6)), "mask": mask}


def reference(params, batch):
    losses, mask = parts(Model().apply({"params": params}, batch["tokens"]), batch)
    return losses.sum() / mask.sum()


def step_on(axes, loss, **options):
    microbatches = options.pop("microbatches", None)
    config = zeroxla.ZeroConfig(persistence_threshold=0, **options)
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=2, **axes)
    model = Model()
    if "pipe" in axes:
        model, loss = zeroxla.Pipeline.from_model(Model(), loss), None
    return zeroxla.make_step(
        model, mesh, optax.sgd(0.1), loss=loss, config=config, microbatches=microbatches
    )


@pytest.mark.parametrize(
    ("axes", "loss", "options", "tol"),
    [
        ({}, plain, {}, 1e-5),
        ({}, in_turns, {"accumulate": 2}, 1e-5),
        ({}, plain, {"compute_dtype": "float16"}, 2e-2),
        pytest.param({"tensor": 2}, plain, {}, 1e-5, marks=pytest.mark.slow),
        ({"pipe": 2}, plain, {"microbatches": 2}, 1e-5),
    ],
)
def test_a_part_of_weight_zero_adds_nothing(axes, loss, options, tol):
    batch = batch_with(num_rows_of_nothing=3)
    step = step_on(axes, loss, **options)
    state = step.init(KEY, batch)
    params = zeroxla.full_params(state)
    value, grads = step.grad(state, batch)
    wanted, wanted_grads = jax.jit(jax.value_and_grad(reference))(params, batch)
    np.testing.assert_allclose(value, wanted, rtol=tol)
    largest = max(np.abs(g).max() for g in jax.tree.leaves(wanted_grads))
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tol * largest)
    np.testing.assert_allclose(step.eval(state, batch)["loss"], wanted, rtol=tol)


def test_a_step_in_which_nothing_counts_or_what_counts_is_no_number_is_skipped():
    batch = batch_with(num_rows_of_nothing=6)
    nothing = {**batch, "mask": np.zeros_like(batch["mask"])}
    step = step_on({}, plain)
    state, metrics = step(step.init(KEY, batch), nothing)
    assert metrics["skipped"] == 1
    params = jax.tree.map(lambda x: np.full_like(x, np.nan), zeroxla.full_params(state))
    _, metrics = step(zeroxla.init_from(step, params, KEY, batch), batch)
    assert metrics["skipped"] == 1
