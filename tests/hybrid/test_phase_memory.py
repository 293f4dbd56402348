"""Memory by phase, computed from shapes: compared with live arrays, and with sums for a large
model."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from tools.hybrid import live_bytes
from tools.quick import quick_collection, quick_compilation  # noqa: F401

import zeroxla
from zeroxla import HybridEngine, ZeroConfig
from zeroxla.inspect import array_bytes_per_device, memory
from zeroxla.models import GPT, Llama

pytestmark = pytest.mark.usefixtures("quick_compilation")
BATCH = {"tokens": np.zeros((8, 9), np.int32)}


@pytest.fixture(scope="module")
def step():
    """A step that has been given the shapes of a batch."""
    step = zeroxla.make_step(
        Llama.tiny(heads=8, kv_heads=4, width=64),
        zeroxla.make_mesh(nodes=2),
        optax.adam(1e-3),
        config=ZeroConfig(compute_dtype="bfloat16", persistence_threshold=0),
    )
    step.abstract_state(BATCH)
    return step


@pytest.fixture(scope="module")
def engine(step):
    return HybridEngine(step, tensor=4)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_collection")
def test_the_figures_are_those_of_the_arrays(step):
    state = step.init(jax.random.key(0), BATCH)
    engine = HybridEngine(step, tensor=2, release=False)
    report = memory(engine, phases=True, num_prompts=8, length=32)

    def held(tree):
        return max(array_bytes_per_device(tree).values())

    assert report.parameter_bytes == held(state.params)
    assert report.optimizer_bytes == held(state.opt_state)
    before = live_bytes()
    engine.generate(state, [[1, 2]] * 8, key=jax.random.key(0), max_new_tokens=2)
    assert report.layout_bytes == live_bytes() - before
    assert report.gradient_bytes == 4 * sum(
        x.addressable_shards[0].data.size for x in jax.tree.leaves(state.params)
    )
    # 2 layers, keys and values, 2 of 8 rows, 32 places, 2 of 4 heads of width 8, bfloat16.
    assert report.cache_bytes == 2 * 2 * 2 * 32 * 2 * 8 * 2 + 4
    engine.free()


def test_the_sums(engine):
    report = memory(engine, phases=True)
    assert report.cache_bytes == 0
    assert report.resting_bytes == report.parameter_bytes + report.optimizer_bytes
    assert report.training_bytes == report.resting_bytes + report.gradient_bytes
    assert report.generating_bytes == report.resting_bytes + report.layout_bytes
    text = str(report)
    assert f"{report.num_parameters:,} parameters on 8 devices, tensor=4" in text
    assert "tensor-parallel copy" in text


@pytest.mark.slow
def test_a_frozen_base_at_rest_in_four_bits():
    """Half a byte a parameter over all devices, and the steps of its blocks."""
    model = zeroxla.lora(GPT.tiny(width=128), targets="kernel$", rank=2, frozen="int4")
    config = ZeroConfig(persistence_threshold=0)
    step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=2), optax.adam(1e-3), config=config)
    state = step.init(jax.random.key(0), BATCH)
    report = memory(HybridEngine(step, tensor=2), phases=True)
    wires = sum(x.nbytes for x in jax.tree.leaves(state.params["base"]) if x.dtype == np.uint8)
    kernels = 2 * 12 * 128 * 128
    assert 0.5 * kernels < wires <= 0.54 * kernels
    rest = [x for x in jax.tree.leaves(state.params) if x.dtype != np.uint8]
    shards = sum(x.addressable_shards[0].data.nbytes for x in rest)
    assert report.parameter_bytes == wires // 8 + shards
    trained = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.opt_state))
    assert report.optimizer_bytes == trained < report.parameter_bytes


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_prompts": 4}, "num_prompts=4 and length=None: .* give both"),
        ({"num_prompts": 4, "length": 5000}, "rows of 5000 tokens exceed the model's context"),
        ({"num_prompts": 4, "length": 0}, "rows of 0 tokens; give 1 or more"),
    ],
)
def test_what_a_cache_is_of(engine, arguments, match):
    with pytest.raises(ValueError, match=match):
        memory(engine, phases=True, **arguments)


def test_what_has_no_phases():
    with pytest.raises(ValueError, match=r"phases=True\) reads a zeroxla.HybridEngine, not dict"):
        memory({}, phases=True)
    with pytest.raises(ValueError, match="or pass phases=True with an engine"):
        memory({})


LARGE = """
import json, numpy as np, optax, zeroxla
zeroxla.simulate(32)
from zeroxla.models import Llama

model = Llama.llama3_8b(
    vocab=32000, layers=80, width=8192, heads=64, kv_heads=8, hidden=28672, length=4096
)
config = zeroxla.ZeroConfig(compute_dtype="bfloat16")
step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=4), optax.adamw(1e-5), config=config)
step.abstract_state({"tokens": np.zeros((32, 65), np.int32)})
report = zeroxla.inspect.memory(zeroxla.HybridEngine(step, tensor=8), phases=True)
print(json.dumps([report.num_parameters, report.training_bytes, report.layout_bytes]))
"""


@pytest.mark.slow
def test_seventy_billion_parameters_on_32_devices():
    """(12 + 2 + 2) x 70 / 32 = 35 GB to train, 140 / 8 = 17.5 GB more to generate."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", LARGE], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    num, training, layout = json.loads(done.stdout)
    assert 68e9 < num < 70e9
    assert training / num * 70e9 == pytest.approx(35e9, rel=0.01)
    assert layout / num * 70e9 == pytest.approx(17.5e9, rel=0.01)
