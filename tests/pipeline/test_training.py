"""Pipelines in training: optimizers, frozen leaves, 16-bit dtypes and the loss scale act as in a
step without stages."""

import jax
import numpy as np
import optax
import pytest
from tools.pipeline_equality import KEY, tokens
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import Pipeline, ZeroConfig
from zeroxla.models import GPT

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL = GPT.tiny(layers=2)
BATCH = tokens(8)
EPS = {"float32": 0.0, "bfloat16": 2.0**-7, "float16": 2.0**-10}  # spacings


def clipped_adafactor():
    return optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.adafactor(0.05, min_dim_size_to_factor=8, momentum=0.9),
    )


def train(optimizer, steps, *, pipelined, **config):
    """Return the parameters before and after some steps, and the metrics of each."""
    mesh = zeroxla.make_mesh(pipe=2 if pipelined else 1, nodes=1, devices_per_node=2)
    step = zeroxla.make_step(
        Pipeline.from_model(MODEL) if pipelined else MODEL,
        mesh,
        optimizer(),
        config=ZeroConfig(persistence_threshold=0, **config),
        microbatches=2,
    )
    state = step.init(KEY, BATCH)
    before, found = zeroxla.full_params(state), []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        found.append({name: float(x) for name, x in metrics.items() if "per_s" not in name})
    return before, zeroxla.full_params(state), found


def distance(found, wanted):
    """|found - wanted| of all leaves together."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return np.sqrt(sum(np.sum(np.square(np.asarray(a, float) - b)) for a, b in pairs))


@pytest.mark.parametrize(
    ("optimizer", "config"),
    [
        # The gradient of keys' biases is zero, and adafactor makes the rounding error as large as
        # the others.
        pytest.param(
            clipped_adafactor,
            {"frozen": ["^wpe", "c_fc/kernel", "c_attn/bias"]},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: optax.sgd(0.05, momentum=0.9),
            {"compute_dtype": "bfloat16"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: optax.sgd(0.05),
            # Of a scale of 2^24 gradients overflow until it has been halved often enough; then it
            # is doubled.
            {"compute_dtype": "float16", "init_loss_scale": 2.0**24, "loss_scale_window": 2},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["adafactor, frozen leaves", "bfloat16", "float16"],
)
def test_training_is_that_of_the_step_without_stages(optimizer, config):
    steps = 14 if config.get("compute_dtype") == "float16" else 4
    before, wanted, expected = train(optimizer, steps, pipelined=False, **config)
    _, params, metrics = train(optimizer, steps, pipelined=True, **config)
    rounded = EPS[config.get("compute_dtype", "float32")]
    exact = {"skipped", "finite", "loss_scale"} & metrics[0].keys()
    for found, like in zip(metrics, expected, strict=True):
        assert found.keys() == like.keys()
        for name, value in like.items():
            rtol = 0 if name in exact else rounded + 1e-5
            np.testing.assert_allclose(found[name], value, rtol=rtol, err_msg=name)
    # What 16 bits round differs in leaves, and is small beside what training changes.
    assert distance(params, wanted) < (rounded + 1e-4) * distance(wanted, before)
    if "frozen" in config:
        # One that moves to its stage every step, and one that is stored there.
        for of in (lambda p: p["wpe"], lambda p: p["h"]["mlp"]["c_fc"]["kernel"]):
            assert distance(of(params), of(before)) == 0
    if "loss_scale" in exact:
        assert 0 < metrics[-1]["skipped"] < steps - 4
