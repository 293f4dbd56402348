"""The errors of a device that runs out of memory, and of a budget that cannot be met."""

from __future__ import annotations

import pickle
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh
from tools.perceptrons import Perceptrons
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import DeviceMemoryError, ZeroConfig
from zeroxla.inspect import memory
from zeroxla.offload.array_bytes import shard_bytes
from zeroxla.step.memory import out_of_memory
from zeroxla.step.memory.larger_meshes import larger_meshes
from zeroxla.step.memory.out_of_memory import memory_error

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS, LENGTH = 16, 16
BATCH = {"tokens": jax.ShapeDtypeStruct((ROWS, LENGTH + 1), jnp.int32)}
TEXT = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 34359738368 bytes."


def made(mesh=None, **options):
    config = ZeroConfig(persistence_threshold=0, **options)
    mesh = zeroxla.make_mesh(nodes=2) if mesh is None else mesh
    return zeroxla.make_step(Perceptrons(layers=2), mesh, optax.adam(1e-3), config=config)


@pytest.fixture(scope="module")
def step():
    return made()


def fails(text, *, donated):
    """Return a stand-in for a compiled call that runs out of memory."""

    def call(name, program, state, batch):
        for x in jax.tree.leaves(state) if donated else ():
            x.delete()
        raise jax.errors.JaxRuntimeError(text)

    return call


def test_a_step_that_runs_out_says_what_held_the_memory(step, monkeypatch):
    batch = {"tokens": jnp.zeros((ROWS, LENGTH + 1), jnp.int32)}
    state = step.init(jax.random.key(0), batch)
    monkeypatch.setattr(step, "_run", fails(TEXT, donated=True))
    with pytest.raises(MemoryError) as caught:
        step(state, batch)
    error, text = caught.value, str(caught.value)
    assert isinstance(error, DeviceMemoryError)
    assert str(error.__cause__) == TEXT
    report = memory(step)
    for x in report.largest(3):
        assert x.name in text
        assert x.line in text
    assert error.memory.parts() == report.parts()
    assert error.least_bytes < report.total_bytes
    assert "restore it from the last checkpoint" in text
    assert "node=4 x device=4" in text
    assert "node=8 x device=4" in text
    # The amount can be given as it stands there.
    amount = re.search(r"ZeroConfig\(memory='([^']+)'\)", text)[1]
    assert ZeroConfig(memory=amount).memory >= error.least_bytes
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.least_bytes) == (text, error.least_bytes)


@pytest.mark.slow
def test_the_amount_that_the_error_names_is_enough(step, monkeypatch):
    batch = {"tokens": jnp.zeros((ROWS, LENGTH + 1), jnp.int32)}
    state = step.init(jax.random.key(0), batch)
    monkeypatch.setattr(step, "_run", fails(TEXT, donated=True))
    with pytest.raises(MemoryError) as caught:
        step(state, batch)
    amount = re.search(r"ZeroConfig\(memory='([^']+)'\)", str(caught.value))[1]
    within = made(memory=amount)
    within.abstract_state(BATCH)
    assert memory(within).total_bytes <= ZeroConfig(memory=amount).memory


@pytest.mark.slow
def test_a_state_that_is_still_there_is_not_called_lost(step, monkeypatch):
    batch = {"tokens": jnp.zeros((ROWS, LENGTH + 1), jnp.int32)}
    state = step.init(jax.random.key(0), batch)
    monkeypatch.setattr(step._compiled, "_grad", None)
    monkeypatch.setattr(step.disk, "_run", fails(TEXT.lower(), donated=False))
    with pytest.raises(DeviceMemoryError, match=r"^grad ran out of memory") as caught:
        step.grad(state, batch)
    assert "checkpoint" not in str(caught.value)


def test_other_errors_pass(step, monkeypatch):
    batch = {"tokens": jnp.zeros((ROWS, LENGTH + 1), jnp.int32)}
    state = step.init(jax.random.key(0), batch)
    monkeypatch.setattr(step, "_run", fails("INTERNAL: something else", donated=False))
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        step(state, batch)


@pytest.mark.slow
def test_on_devices_that_are_not_there_the_text_knows_what_they_have(monkeypatch):
    step = made(AbstractMesh((2, 4), ("node", "device")))
    state, batch = step.abstract_state(BATCH), step.batches.shapes(BATCH)
    room = int(0.6 * memory(step).total_bytes)
    monkeypatch.setattr(out_of_memory, "device_bytes", lambda mesh: room)
    with step.programs.tracing():
        error = memory_error("the step", step.programs, state, batch)
    assert f"which has {zeroxla.inspect.format_bytes(room)}" in str(error)
    assert "node=" in str(error)


def test_larger_meshes_divide_all_but_gathered_leaves(step):
    step.abstract_state(BATCH)
    batch = step.batches.shapes(BATCH)
    report, parts = memory(step), memory(step).parts()
    whole = parts["gathered leaves"] + parts["other state and batch"] - shard_bytes(batch)
    twice, four = larger_meshes(report, step.mesh, batch, 1, None)
    assert (twice.shape, twice.rows) == ({"node": 4, "device": 4}, ROWS)
    assert twice.num_bytes == whole + (report.total_bytes - whole) // 2
    # A device has two rows: four times the nodes need twice as many rows for the same activations.
    assert four.rows == 4 * ROWS
    assert four.num_bytes > twice.num_bytes - parts["parameters"]
    assert larger_meshes(report, step.mesh, batch, 1, whole) == []


def wide_loss(params, batch, key):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return jnp.mean((hidden @ params["w"].T - batch["x"]) ** 2)


def test_a_budget_that_cannot_be_met_names_the_largest_and_larger_meshes():
    model = (lambda key, batch: {"w": jnp.zeros((32, 64))}, wide_loss)
    config = ZeroConfig(persistence_threshold=0, memory="100kB")
    step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=2), optax.adam(0.1), config=config)
    batch = {"x": jnp.zeros((4096, 32))}
    state = step.init(jax.random.key(0), batch)
    with pytest.raises(ValueError, match="on each at least") as caught:
        step(state, batch)
    error, text = caught.value, str(caught.value)
    assert isinstance(error, zeroxla.DeviceMemoryError)
    assert 100_000 < error.least_bytes < 1_000_000
    assert error.memory.total_bytes > 100_000
    named = re.search(r"the largest: (.*); give it that much", text)[1].split("; ")
    assert [name.split(" ")[1] for name in named] == ["kB"] * 3
    assert "step/test_out_of_memory.py:" in text  # the line of the loss
    assert re.search(r"by division a device would hold [\d.]+ kB on node=\d+ x device=4 or ", text)
