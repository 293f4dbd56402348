"""Arguments of another kind than described: an error names the value and the remedy."""

import numpy as np
import optax
import pytest
from tools.zoo.base import leaves, mse, vectors

import zeroxla


def pair():
    return leaves(a=(6, 3)), lambda p, batch, key: mse(batch["x"] @ p["a"], batch["y"])


@pytest.fixture(scope="module")
def mesh():
    return zeroxla.make_mesh(nodes=2, devices_per_node=4)


@pytest.mark.parametrize("mesh", [None, 8, {"node": 2}])
def test_what_is_no_mesh(mesh):
    message = rf"the mesh is {mesh!r}, a .*; make one with zeroxla.make_mesh\(\)"
    with pytest.raises(ValueError, match=message):
        zeroxla.make_step(pair(), mesh)
    with pytest.raises(ValueError, match=message):
        zeroxla.process_shard(mesh)
    with pytest.raises(ValueError, match=message):
        zeroxla.global_batch(vectors(16), mesh)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.adamw, r"not an optax transformation; call it: adamw\(\.\.\.\)"),
        ("adamw", r"optimizer is 'adamw' \(a str\), .*; pass such as optax\.adamw\(3e-4\)"),
        (3e-4, r"optimizer is 0\.0003 \(a float\), not an optax transformation"),
    ],
)
def test_what_is_no_optimizer(mesh, optimizer, message):
    with pytest.raises(ValueError, match=message):
        zeroxla.make_step(pair(), mesh, optimizer)
    with pytest.raises(ValueError, match=message):
        zeroxla.make_step(pair(), mesh, config=zeroxla.ZeroConfig(optimizer=optimizer))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {},
            r"config is \{\} \(a dict\), not a ZeroConfig; pass ZeroConfig\(\*\*options\), or for",
        ),
        ("ds.json", r"ZeroConfig\.from_deepspeed\(configuration\)"),
        (3, r"config is 3 \(a int\), not a ZeroConfig; pass zeroxla\.ZeroConfig"),
    ],
)
def test_what_is_no_config(mesh, config, message):
    with pytest.raises(ValueError, match=message):
        zeroxla.make_step(pair(), mesh, config=config)


def test_what_is_no_state():
    with pytest.raises(ValueError, match=r"the state is a dict, not a TrainState; make it with"):
        zeroxla.full_params({"a": np.ones(3)})
