"""Stages that keep their leaves whole through a step: options that then do nothing say so."""

import re
import warnings

import jax
import numpy as np
import optax
import pytest

import zeroxla
from zeroxla import Offload, Pipeline, WireFormat, ZeroConfig
from zeroxla.models import GPT

SMALL = {"persistence_threshold": 0, "quantize_threshold": 256}
BATCH = {"tokens": jax.ShapeDtypeStruct((16, 9), np.int32)}
OPTIONS = {
    "hpz_size": {"hpz_size": "node"},
    "secondary": {"hpz_size": "node", "secondary": "wire", "weight_wire": WireFormat()},
    "inter_node_gather": {"hpz_size": "node", "inter_node_gather": "step"},
    "offload.secondary": {"hpz_size": "node", "offload": Offload(secondary="host")},
    "unit_elements": {"unit_elements": 100},
    "prefetch_bucket": {"prefetch_bucket": 10},
    "max_live_parameters": {"max_live_parameters": 10},
    "max_reuse_distance": {"max_reuse_distance": 10},
}


@pytest.fixture(scope="module")
def mesh():
    return zeroxla.make_mesh(pipe=2, nodes=2, devices_per_node=2)


def make(mesh, weights, **options):
    pipeline = Pipeline.from_model(GPT.tiny(layers=2, width=16))
    config = ZeroConfig(**SMALL, **options)
    return zeroxla.make_step(pipeline, mesh, optax.sgd(0.1), config=config, weights=weights)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_without_effect_says_so_and_names_the_remedy(name, mesh):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(mesh, "step", **OPTIONS[name])
    texts = [str(w.message) for w in caught]
    found = [text for text in texts if text.startswith(f"{name} has no effect in a pipeline")]
    assert len(found) == 1, texts
    assert re.search(r'make the step with weights="tick", or leave \S+ at its default', found[0])
    assert caught[0].filename == __file__
    make(mesh, "tick", **OPTIONS[name])  # without a warning, which would be an error


def test_differences_need_the_size_of_the_group(mesh):
    """It says where the kept copy is."""
    make(
        mesh,
        "step",
        hpz_size="node",
        weight_differences=WireFormat(bits=4, block=64),
        inter_node_reduce="step",
    )


def test_with_config_says_it_too(mesh):
    step = make(mesh, "step")
    with pytest.warns(UserWarning, match="hpz_size has no effect in a pipeline"):
        step.with_config(ZeroConfig(hpz_size="node", **SMALL))


def planned(weights, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = zeroxla.plan(
            Pipeline.from_model(GPT.tiny(layers=4, width=32)),
            {"pipe": 2, "node": 2, "device": 2},
            BATCH,
            config=ZeroConfig(hpz_size="node", **SMALL, **options),
            weights=weights,
        )
    return found.memory


@pytest.mark.slow
def test_plans_count_the_secondary_shards_of_a_stage():
    """With `weights="step"` there are none."""
    held, gathered = planned("step"), planned("tick")
    assert held.secondary_bytes == 0
    whole = zeroxla.plan(
        GPT.tiny(layers=4, width=32),
        {"node": 2, "device": 2},
        BATCH,
        config=ZeroConfig(hpz_size="node", **SMALL),
    ).memory.secondary_bytes
    # Two of the four blocks, and one of the ends, whose table of tokens both ends have.
    assert whole / 2 <= gathered.secondary_bytes < 0.7 * whole
    assert planned("step", offload=Offload(secondary="host")).host_bytes == 0
    on_host = planned("tick", offload=Offload(secondary="host"))
    assert on_host.host_bytes == gathered.secondary_bytes
