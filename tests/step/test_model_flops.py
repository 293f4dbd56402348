"""The FLOPs of a model's products in a step: counted by hand for small models."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.quick import thinned

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.models import GPT, Mixtral

ROWS, LENGTH, WIDTH = 16, 8, 32
BATCH = {"tokens": np.zeros((ROWS, LENGTH + 1), np.int32)}


def flops_of(model, batch=BATCH, mesh=None, config=None, **options):
    step = zeroxla.make_step(
        model, mesh or zeroxla.make_mesh(nodes=2), optax.sgd(0.1), config=config, **options
    )
    step.abstract_state(batch)
    return step.model_flops()


def gpt_forward(layers, width, vocabulary=64):
    """Count a GPT's products of one token by hand: weights, head, scores and their use."""
    return 2 * (layers * 12 * width**2 + vocabulary * width) + layers * 4 * LENGTH * width


@pytest.mark.parametrize("scan", thinned([True], slow=[False]))
@pytest.mark.parametrize("remat", thinned([True], slow=[False]))
def test_recomputation_and_loops_change_nothing(scan, remat):
    model = GPT.tiny(layers=2, width=32, heads=2, scan=scan, remat=remat)
    assert flops_of(model) == 3 * ROWS * LENGTH * gpt_forward(2, 32)


@pytest.mark.parametrize(
    "shape", thinned([{"nodes": 2}, {"nodes": 2, "pipe": 2}], slow=[{"nodes": 1, "tensor": 2}])
)
def test_meshes_share_the_same_work(shape):
    model = GPT.tiny(layers=2, width=32, heads=2)
    mesh = zeroxla.make_mesh(**shape)
    if "pipe" in shape:
        model = zeroxla.Pipeline.from_model(model)
    assert flops_of(model, mesh=mesh) == 3 * ROWS * LENGTH * gpt_forward(2, 32)


def test_frozen_leaves_have_no_gradient_to_compute():
    model = GPT.tiny(layers=2, width=32, heads=2)
    forward = ROWS * LENGTH * gpt_forward(2, 32)
    found = flops_of(model, config=ZeroConfig(frozen=("wte", "h")))
    assert 2 * forward < found < 2.2 * forward


def test_a_token_counts_with_its_own_experts_alone():
    few, many = (
        flops_of(Mixtral.tiny(layers=1, width=WIDTH, experts=experts, top_k=2, routing="ragged"))
        for experts in (4, 8)
    )
    router = 3 * 2 * ROWS * LENGTH * WIDTH * 4
    assert many - few == router


class Convolution(nn.Module):
    @nn.compact
    def __call__(self, image):
        return nn.Conv(5, (3, 3), use_bias=False)(image).mean(axis=(1, 2))


def test_convolutions_count():
    batch = {"image": np.zeros((ROWS, 8, 8, 4), np.float32), "label": np.zeros(ROWS, np.int32)}

    def loss(apply, batch, *, train):
        logits = apply(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    found = flops_of(Convolution(), batch, loss=loss)
    assert found == 3 * ROWS * 2 * 8 * 8 * 5 * 9 * 4


def test_a_step_without_a_batch():
    step = zeroxla.make_step(GPT.tiny(), zeroxla.make_mesh(nodes=2), optax.sgd(0.1))
    with pytest.raises(ValueError, match="the step has seen no batch"):
        step.model_flops()


def test_ragged_products_count_the_rows_once():
    from zeroxla.program.flops import product_flops
    from zeroxla.program.trace import trace

    def flops(fun, *shapes):
        program, _ = trace(fun, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
        return sum(map(product_flops, program.equations))

    sizes = jnp.array([3, 7, 2])
    forward = flops(lambda x, w: jax.lax.ragged_dot(x, w, sizes), (12, 4), (3, 4, 5))
    assert forward == 2 * 12 * 4 * 5
    both = flops(
        jax.grad(lambda x, w: jax.lax.ragged_dot(x, w, sizes).sum(), argnums=(0, 1)),
        *((12, 4), (3, 4, 5)),
    )
    assert both == 2 * forward
