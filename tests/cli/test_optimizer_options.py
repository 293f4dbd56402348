"""`--optimizer` and its parameters make the optimizers of optax."""

from __future__ import annotations

import jax.numpy as jnp
import optax
import pytest
from tools.train import check_no_option

from zeroxla.cli.optimizer_options import OptimizerOptions


class TestOptimizer:
    @pytest.mark.parametrize(
        ("options", "same"),
        [
            ({}, optax.adamw(0.1, weight_decay=0.0)),
            ({"beta2": 0.5, "epsilon": 0.1}, optax.adamw(0.1, b2=0.5, eps=0.1, weight_decay=0.0)),
            ({"optimizer": "lamb", "beta1": 0.5}, optax.lamb(0.1, b1=0.5)),
            ({"optimizer": "lion", "beta2": 0.5}, optax.lion(0.1, b2=0.5, weight_decay=0.0)),
            ({"optimizer": "adafactor", "momentum": 0.5}, optax.adafactor(0.1, momentum=0.5)),
            ({"optimizer": "sgd", "momentum": 0.5}, optax.sgd(0.1, momentum=0.5)),
        ],
    )
    def test_is_optax_s(self, options, same):
        assert moved(OptimizerOptions(clip=0, **options).make(0.1)) == moved(same)

    @pytest.mark.parametrize("name", ["adamw", "lamb", "lion", "adafactor", "sgd"])
    def test_decays_matrices_only(self, name):
        kept = moved(OptimizerOptions(optimizer=name).make(0.1))
        decayed = moved(OptimizerOptions(optimizer=name, weight_decay=0.5).make(0.1))
        assert decayed["kernel"] != kept["kernel"]
        assert decayed["bias"] == kept["bias"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--momentum", "0.9"], "--momentum 0.9: --optimizer adamw has none"),
            (["--optimizer", "sgd", "--beta1", "0.9"], "take one of adamw, lamb, lion"),
            (["--beta1", "1"], "--beta1 1.0 must be at least 0, and below 1"),
            (["--epsilon", "0"], "--epsilon 0.0 must be above 0"),
            (["--clip", "-1"], "--clip -1.0 must be at least 0"),
        ],
    )
    def test_parameters_that_cannot_be(self, arguments, message, capsys):
        check_no_option(arguments, message, capsys)


def moved(optimizer: optax.GradientTransformation) -> dict[str, float]:
    """Return what an optimizer adds to two leaves in its second step."""
    params = {"kernel": jnp.full((4, 4), 2.0), "bias": jnp.full((4,), 2.0)}
    grads = {"kernel": jnp.linspace(0.1, 1.0, 16).reshape(4, 4), "bias": jnp.full((4,), 0.3)}
    state, updates = optimizer.init(params), None
    for _ in range(2):
        updates, state = optimizer.update(grads, state, params)
    assert updates is not None
    return {name: float(jnp.mean(x)) for name, x in updates.items()}
