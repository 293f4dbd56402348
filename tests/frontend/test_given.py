"""Weights as users have them become arrays under the model's own names."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze
from flax.traverse_util import flatten_dict

from zeroxla.frontend.given import arrays_by_path, flat_arrays

A, B, MEAN = np.ones((3, 2)), np.ones(2), np.zeros(2)
SHAPES = {("block", "kernel"): (3, 2), ("block", "bias"): (2,)}
STATE = {("batch_stats", "norm", "mean")}
PARAMS = {"block": {"kernel": A, "bias": B}}
VARIABLES = {"params": PARAMS, "batch_stats": {"norm": {"mean": MEAN}}}
BOXED = {"block": {"kernel": nn.Partitioned(A, ("x", None)), "bias": nn.Partitioned(B, (None,))}}


@pytest.mark.parametrize(
    ("given", "has_state"),
    [
        (PARAMS, False),
        (freeze(PARAMS), False),
        (BOXED, False),
        (flatten_dict(PARAMS), False),
        (flatten_dict(PARAMS, sep="/"), False),
        (flatten_dict(PARAMS, sep="."), False),
        ({"params": PARAMS}, False),
        (VARIABLES, True),
        (freeze(VARIABLES), True),
        ({**VARIABLES, "intermediates": {"x": (A,)}, "losses": {"x": (A,), "y": A}}, True),
        ({**PARAMS, "batch_stats": VARIABLES["batch_stats"]}, True),
    ],
)
def test_dicts(given, has_state):
    params, state = arrays_by_path(given, SHAPES, STATE, lambda path: path[0] == "losses")
    assert params.keys() == SHAPES.keys()
    assert params["block", "kernel"] is A
    assert params["block", "bias"] is B
    assert set(state) == (STATE if has_state else set())


def test_a_module_that_is_called_params():
    shapes = {("params", "w"): (2,)}
    for given in ({"params": {"w": B}}, {"params": {"params": {"w": B}}}):
        params, _ = arrays_by_path(given, shapes, ())
        assert params["params", "w"] is B


def test_paths_that_the_model_does_not_have_stay():
    twice = {**flatten_dict(PARAMS, sep="/"), "block.bias": A}
    params, _ = arrays_by_path(twice, SHAPES, ())
    assert len(params) == 3  # one of the two names is left over, to be named in an error
    params, _ = arrays_by_path({"params": PARAMS, "scale": B}, SHAPES, ())
    assert params.keys() - SHAPES.keys() == {("scale",)}
    params, state = arrays_by_path({**VARIABLES, "cache": {"key": A}}, SHAPES, ())
    assert params.keys() - SHAPES.keys() == {("batch_stats", "norm", "mean"), ("cache", "key")}
    assert state == {}


class Module(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)])
        self.norm = nnx.BatchNorm(2, use_scale=False, rngs=rngs)
        self.tied = self.layers[0].bias


def test_nnx():
    """Rng streams are left out, and a variable that is held twice comes once."""
    module = Module(nnx.Rngs(0))
    shapes = {
        ("layers", "0", "kernel"): (3, 2),
        ("layers", "0", "bias"): (2,),
        ("norm", "bias"): (2,),
    }
    means = {("norm", "mean"), ("norm", "var")}
    params_alone = nnx.state(module, nnx.Param)
    for given, has_state in (
        (module, True),
        (nnx.state(module), True),
        (params_alone, False),
        (nnx.to_pure_dict(params_alone), False),
        (nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.RngState))), True),
        (
            {
                "layers": {0: {"kernel": module.layers[0].kernel, "bias": module.layers[0].bias}},
                "norm": {"bias": module.norm.bias},
            },
            False,
        ),
    ):
        params, state = arrays_by_path(given, shapes, means)
        assert params.keys() == shapes.keys()
        assert params["layers", "0", "kernel"] is module.layers[0].kernel.get_raw_value()
        assert set(state) == (means if has_state else set())


def test_functions():
    asked = []

    def read(name, shape):
        asked.append(name)
        return np.zeros(shape)

    params, state = arrays_by_path(read, SHAPES, STATE)
    assert not asked
    assert params["block", "bias"]().shape == (2,)
    assert asked == ["block/bias"]
    assert state == {}
    leaf = lambda: A  # noqa: E731
    params, _ = arrays_by_path({"block": {"kernel": leaf, "bias": leaf}}, SHAPES, STATE)
    assert params["block", "kernel"] is leaf


def test_other_trees():
    assert flat_arrays([A, (B,)]) == {("0",): A, ("1", "0"): B}
    assert list(flat_arrays(jnp.ones(3))) == [("param",)]


@pytest.mark.parametrize("given", [nn.Dense(3), nn.Dense, Module])
def test_what_holds_no_arrays(given):
    with pytest.raises(ValueError, match=r"(Dense|Module) holds no arrays; give its variables"):
        arrays_by_path(given, SHAPES, STATE)
