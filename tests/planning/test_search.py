"""Searches for settings, the smallest cluster, DeepSpeed's estimate, and generation beside
training."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh
from tools.perceptrons import Perceptrons
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.cli.main import main
from zeroxla.mesh.machines import Machines
from zeroxla.models import GPT, MLP
from zeroxla.planning.calibrate import entry
from zeroxla.planning.fit import smallest, zero3_estimate
from zeroxla.planning.generation import Generating

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL = GPT.tiny(width=64, layers=4)
SMALL = Perceptrons(width=64, hidden=256)


def tokens(rows, length=16):
    return {"tokens": jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)}


def device(**changed):
    return dataclasses.replace(Machines.load().find_device("h100"), **changed)


@pytest.fixture(scope="module")
def search():
    """Two presets on 2 x 2 devices, with stages and without."""
    seen = []
    found = zeroxla.search_plans(
        GPT.tiny(width=64, layers=2),
        2,
        2,
        tokens(32),
        zeros=("zero3", "zeropp"),
        device="cpu",
        pipes=(1, 2),
        axes=({},),
        config=ZeroConfig(compute_dtype="bfloat16", persistence_threshold=0, quantize_threshold=0),
        link="10mbit",
        progress=lambda *at: seen.append(at),
    )
    return found, seen


@pytest.mark.slow
def test_a_search_tries_presets_meshes_and_remat_and_ranks_by_speed(search):
    found, seen = search
    choices = [row.choice for row in found.found]
    meshes = {tuple(c.mesh_shape.items()) for c in choices}
    assert meshes == {
        (("node", 2), ("device", 2)),
        (("pipe", 2), ("node", 1), ("device", 2)),
    }
    assert {(c.zero, c.remat) for c in choices} == {
        (zero, remat) for zero in ("zero3", "zeropp") for remat in (False, True)
    }
    assert len(choices) == 8
    speeds = [row.plan.tokens_per_s for row in found.found]
    assert speeds == sorted(speeds, reverse=True)
    assert found.best is found.found[0]
    assert [total for _, total, _ in seen] == [8] * 9
    assert [done for done, *_ in seen] == list(range(9))


@pytest.mark.slow
def test_it_says_what_limits_each(search):
    found, _ = search
    slow = next(row for row in found.found if row.choice.zero == "zero3")
    assert "the link between nodes" in next(
        row.limit for row in found.found if row.choice.mesh_shape.get("pipe", 1) == 1
    )
    stages = next(row for row in found.found if row.choice.mesh_shape.get("pipe", 1) == 2)
    # m = 8 of 16 rows of a stage's device, as four for each stage: (p - 1) / (m + p - 1).
    assert (stages.choice.microbatches, stages.plan.bubble) == (8, pytest.approx(1 / 9))
    assert "bubble, 11%" in stages.limit
    for words in ("zeropp", "pipe=2 x node=1 x device=2", slow.limit):
        assert words in str(found)


def test_what_does_not_fit_is_cut_into_more_micro_batches():
    room = zeroxla.plan(MODEL, {"node": 1, "device": 2}, tokens(8), microbatches=2)
    small = device(memory_bytes=room.memory.total_bytes + 1, usable=1.0)
    found = zeroxla.search_plans(
        {None: MODEL},
        1,
        2,
        tokens(8),
        zeros=("zero3",),
        pipes=(1,),
        axes=({},),
        device=small,
        config=ZeroConfig(),
    )
    (row,) = found.found
    assert row.plan.fits
    assert row.choice.microbatches == 2


def test_what_fits_nowhere_comes_last_and_is_limited_by_memory():
    found = zeroxla.search_plans(
        SMALL,
        1,
        2,
        tokens(2),
        zeros=("zero3",),
        pipes=(1,),
        axes=({},),
        device=device(memory_bytes=1e4),
    )
    assert found.best is None
    assert {row.limit for row in found.found} == {"memory"}
    sizes = [row.plan.memory.total_bytes for row in found.found]
    assert sizes == sorted(sizes)


def test_models_without_blocks_are_searched_with_stages():
    batch = {
        "image": jax.ShapeDtypeStruct((8, 8), jnp.float32),
        "label": jax.ShapeDtypeStruct((8,), jnp.int32),
    }
    found = zeroxla.search_plans(MLP.small(), 1, 2, batch, zeros=("zero3",), axes=({},))
    assert {row.choice.remat for row in found.found} == {None}
    assert not found.refused
    stages = {row.choice.mesh_shape.get("pipe", 1) for row in found.found}
    assert stages == {1, 2}
    some = {"zeros": ("zero3",), "axes": ({},)}
    found = zeroxla.search_plans(MLP.small(), 1, 4, batch, pipes=(1, 4), **some)
    (reason,) = found.refused
    assert "3 layers do not fill 4 stages" in reason
    assert "Not planned: zero3, pipe=4 x node=1 x device=1" in str(found)


def test_bad_searches():
    with pytest.raises(ValueError, match=r"no presets \['zero9'\]; there are"):
        zeroxla.search_plans(MODEL, 1, 2, tokens(2), zeros=("zero9",))
    with pytest.raises(ValueError, match=r"no setting can be planned:\n.*3"):
        zeroxla.search_plans(MODEL, 1, 2, tokens(3), zeros=("zero3",), pipes=(1,), axes=({},))


@pytest.mark.parametrize(
    ("stays", "shared", "room", "want"),
    [(1e9, 8e9, 3.1e9, 4), (0.0, 1e12, 1e9, 1000), (2e9, 1e9, 1e9, None), (1e9, 0.0, 0.5e9, None)],
)
def test_the_smallest_cluster(stays, shared, room, want):
    calls = []

    def needs(nodes):
        calls.append(nodes)
        return stays + math.ceil(shared / nodes) + 1000 * (nodes % 3)  # padding is not smooth

    found = smallest(needs, room, (1, needs(1)))
    if want is None:
        assert found is None
    else:
        assert needs(found) <= room < needs(found - 1)
        assert found == pytest.approx(want, rel=0.1)
    assert len(calls) < 12


def test_deepspeeds_estimate():
    # Its documentation's example: 2 783 million parameters, the largest layer 65 million, 8 GPUs.
    assert zero3_estimate(65_000_000, 2_783_000_000, 8) / 2**30 == pytest.approx(6.08, abs=0.02)
    config = ZeroConfig(persistence_threshold=0)
    plan = zeroxla.plan(MODEL, {"node": 2, "device": 2}, tokens(4), config=config)
    block = 12 * 64 * 64 + 13 * 64
    table = 64 * (64 + 32)
    assert plan.deepspeed_bytes == 4 * max(block, table) + 18 * plan.num_parameters / 4
    assert "DeepSpeed's estimate" in str(plan)


@pytest.mark.slow
def test_generating_beside_training():
    config = ZeroConfig(persistence_threshold=0)
    asked = Generating(num_prompts=8, prompt_length=8, new_tokens=8, tensor=2)
    mesh = {"node": 1, "device": 4}
    plan = zeroxla.plan(MODEL, mesh, tokens(4), config=config, generating=asked)
    found = plan.generation
    step = zeroxla.make_step(MODEL, zeroxla.make_mesh(nodes=1, devices_per_node=4), config=config)
    step.abstract_state(tokens(4))
    phases = zeroxla.HybridEngine(step, tensor=2).phases(8, 16)
    assert found.state_bytes == phases.resting_bytes
    assert found.copy_bytes == phases.layout_bytes
    # Keys and values of 4 layers, 4 rows a device, 16 places, half of the heads; and an index.
    assert found.cache_bytes == phases.cache_bytes == 4 * 2 * 4 * 16 * 32 * 4 + 4
    assert found.activation_bytes > 0
    assert plan.most_bytes == max(found.total_bytes, plan.memory.total_bytes)
    assert "cache, 8 prompts of 8 + 8 tokens" in str(plan)


@pytest.mark.slow
def test_an_abstract_engine_has_the_same_plan():
    config = ZeroConfig(persistence_threshold=0)
    plans = []
    for mesh in (
        zeroxla.make_mesh(nodes=2),
        AbstractMesh((2, 4), ("node", "device")),
    ):
        step = zeroxla.make_step(MODEL, mesh, optax.sgd(0.1), config=config)
        step.abstract_state(tokens(8))
        plans.append(zeroxla.HybridEngine(step, tensor=4).plan)
    assert str(plans[0]) == str(plans[1])


def test_the_command_searches(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("zeroxla.cli.plan.run.model_named", lambda name, remat: (MODEL, 16))
    few = functools.partial(zeroxla.search_plans, zeros=("zero3",), pipes=(1,), axes=({},))
    monkeypatch.setattr("zeroxla.cli.plan.run.search_plans", few)
    picture = tmp_path / "search.png"
    arguments = ["--search", "--nodes", "1", "--devices-per-node", "2", "--picture", str(picture)]
    assert main(["plan", *arguments]) == 0
    out = capsys.readouterr().out
    assert "Settings, by predicted speed" in out
    assert "fits into the 60 GB that JAX takes of its 80 GB" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "option", [("--compile",), ("--measured-s", "2"), ("--offload-params", "host")]
)
def test_the_command_refuses_what_a_search_does_not(option, capsys):
    assert main(["plan", "--search", *option]) == 2
    assert f"--search with {option[0]}" in capsys.readouterr().err


@pytest.mark.slow
def test_the_smallest_cluster_is_not_compiled(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("zeroxla.cli.plan.run.model_named", lambda name, remat: (MODEL, 16))
    own = tmp_path / "machines.toml"
    own.write_text(entry(device(name="small", platform="cpu", memory_bytes=1.2e6, target="")))
    machines = ["--machines", str(own), "--device", "small", "--link", "1gbit"]
    assert main(["plan", "--compile", "--devices-per-node", "2", *machines]) == 1
    out = capsys.readouterr().out
    assert "says the compiler" in out
    assert "The smallest cluster" in out or "No number of nodes" in out


@pytest.mark.slow
def test_the_command_names_the_smallest_cluster(capsys):
    arguments = ["--devices-per-node", "4", "--device", "l4", "--length", "64"]
    assert main(["plan", "--model", "llama-7b", *arguments]) == 1
    out = capsys.readouterr().out
    nodes = int(out.partition("would hold it")[2].partition("--nodes ")[2].split()[0])
    assert nodes > 1
    again = ["--nodes", str(nodes), "--batch", str(4 * nodes)]
    assert main(["plan", "--model", "llama-7b", *arguments, *again]) == 0
    fewer = ["--nodes", str(nodes - 1), "--batch", str(4 * (nodes - 1))]
    assert main(["plan", "--model", "llama-7b", *arguments, *fewer]) == 1


STAGES = ["--pipe", "2", "--nodes", "1", "--devices-per-node", "2", "--length", "32"]


@pytest.mark.slow
def test_the_command_plans_stages(capsys):
    assert main(["plan", *STAGES, "--accumulate", "4"]) == 0
    out = capsys.readouterr().out
    assert "pipe=2 x node=1 x device=2" in out
    assert "stages are idle" in out


@pytest.mark.slow
def test_the_command_plans_generation_from_stages(capsys, monkeypatch):
    monkeypatch.setattr("zeroxla.cli.plan.run.model_named", lambda name, remat: (MODEL, 32))
    asked = ["--prompts", "8", "--prompt-length", "8", "--new-tokens", "8"]
    assert main(["plan", *STAGES, "--accumulate", "4", *asked]) == 0
    out = capsys.readouterr().out
    for words in ("pipe=2 x node=1 x device=2", "stages are idle", "8 prompts of"):
        assert words in out
