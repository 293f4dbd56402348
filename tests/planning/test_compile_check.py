"""`zeroxla.plan(..., compiled=True)`: the compiler's figures for devices that the machine lacks."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from tools.perceptrons import Perceptrons

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.cli.main import main
from zeroxla.cli.plan import run as plan_run
from zeroxla.mesh.machines import Machines
from zeroxla.models import GPT
from zeroxla.planning import gpu_topology
from zeroxla.planning.gpu_topology import H200, WheelsMissingError, target_mesh

TWO = {"node": 2, "device": 4}
CONFIG = ZeroConfig(persistence_threshold=0)


def tokens(rows=8, length=64):
    return {"tokens": jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)}


@pytest.fixture
def small():
    """A model that is quick to compile."""
    return Perceptrons(vocab=256, width=128, hidden=512)


def model(**options):
    return GPT(vocab=256, length=64, layers=2, width=128, heads=4, **options)


@pytest.fixture
def without_wheels(monkeypatch):
    """An environment in which the extra plan-gpu is not installed."""
    find = gpu_topology.importlib.util.find_spec
    monkeypatch.setattr(
        gpu_topology.importlib.util,
        "find_spec",
        lambda name, *rest: None if name == gpu_topology.PLUGIN else find(name, *rest),
    )


PROGRAM = """
import jax, zeroxla
from zeroxla.models import GPT
from zeroxla.planning.compile_check import prepare_cpu

prepare_cpu(8)
plan = zeroxla.plan(
    GPT(vocab=512, length=128, layers=4, width=256, heads=4),
    {"node": 2, "device": 4},
    {"tokens": jax.ShapeDtypeStruct((16, 129), "int32")},
    config=zeroxla.ZeroConfig(persistence_threshold=0),
    device="a100",
    compiled=True,
)
found = plan.compiled
print(plan.memory.total_bytes / found.memory.total_bytes)
print(plan.comms.total_bytes() / found.comms.total_bytes())
print(found.note)
"""


@pytest.mark.slow
def test_a_plan_is_near_the_cpu_backends_program_when_that_is_scheduled_for_memory():
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    memory, received, note = run.stdout.splitlines()
    assert float(memory) == pytest.approx(1, rel=0.1)
    assert float(received) == pytest.approx(1, rel=0.02)
    assert "8 CPU devices" in note
    assert "scheduled for memory: there is no description of NVIDIA A100 SXM 80 GB" in note


def test_the_tables_have_the_compilers_figures_and_the_note_whose_they_are(small):
    plan = zeroxla.plan(small, TWO, tokens(), config=CONFIG, device="a100", compiled=True)
    found = plan.compiled
    assert found.platform == "cpu"
    assert found.note.startswith("Compiled for 8 CPU devices by jax")
    assert "scheduled for concurrency (" in found.note
    assert found.memory.argument_bytes == pytest.approx(plan.memory.state_bytes, rel=0.01)
    assert found.comms.count(kind="all-gather", axis="node") > 0
    ratio = f"{plan.comms.total_bytes() / found.comms.total_bytes():.3f}"
    text = str(plan)
    for words in ("node=2 x device=4, says the compiler", "CPU devices", "plan / compiler", ratio):
        assert words in text


@pytest.mark.usefixtures("without_wheels")
def test_without_the_wheels_the_note_names_the_extra(small):
    plan = zeroxla.plan(small, TWO, tokens(), config=CONFIG, device="h200", compiled=True)
    assert plan.compiled.platform == "cpu"
    assert 'pip install "zeroxla[plan-gpu]"' in plan.compiled.note
    assert '"zeroxla[plan-gpu]".' in str(plan)


def test_what_is_not_asked_for_is_not_compiled(small):
    plan = zeroxla.plan(small, TWO, tokens(), config=CONFIG)
    assert plan.compiled is None
    assert "says the compiler" not in str(plan)


def test_more_devices_than_there_are_is_refused_with_the_remedy(small):
    wide = {"node": 4, "device": 4}
    with pytest.raises(ValueError, match=r"16 devices, and JAX shows 8; call zeroxla.simulate\(16"):
        zeroxla.plan(small, wide, tokens(16), device="a100", compiled=True)


def test_more_devices_than_the_cpu_backend_compiles_for_is_refused(small):
    wide = {"node": 16, "device": 8}
    with pytest.raises(ValueError, match=r"no description of .*64 devices at most, .* has 128"):
        zeroxla.plan(small, wide, tokens(128), device="a100", compiled=True)


# descriptions of GPUs


def test_the_h200_has_a_description_that_is_there():
    devices = Machines.load().devices.values()
    assert [d.name for d in devices if d.target] == ["h200"]
    assert Machines.load().find_device("h200").target == str(H200)
    assert H200.is_file()


OWN = (
    '[devices.mine]\nlabel = "Mine"\nflops_per_s = {{ float32 = 1e12 }}\nmemory_bytes = 1e9\n'
    'bytes_per_s = 1e11\nlink = "pcie4"\nplatform = "{}"\nefficiency = 0.5\nsource = "me"\n'
    'target = "mine.txtpb"\n'
)


def test_a_users_description_lies_beside_the_users_table(tmp_path):
    (tmp_path / "machines.toml").write_text(OWN.format("gpu"))
    machines = Machines.load(tmp_path / "machines.toml")
    assert machines.find_device("mine").target == str(tmp_path / "mine.txtpb")
    with pytest.raises(ValueError, match=r"description of a GPU, .*mine.txtpb, cannot be read"):
        zeroxla.plan(model(), TWO, tokens(), device="mine", machines=machines, compiled=True)


def test_only_gpus_are_described(tmp_path):
    (tmp_path / "machines.toml").write_text(OWN.format("tpu"))
    with pytest.raises(ValueError, match=r"mine.txtpb' and platform='tpu'; only GPUs"):
        Machines.load(tmp_path / "machines.toml")


@pytest.mark.usefixtures("without_wheels")
def test_a_mesh_of_gpus_needs_the_wheels():
    with pytest.raises(WheelsMissingError, match=r"no package jax_cuda13_plugin; .*plan-gpu"):
        target_mesh(H200, TWO)


def test_a_plugin_that_does_not_start_is_missing(monkeypatch):
    def refuse(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(gpu_topology.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu_topology.topologies, "get_topology_desc", refuse)
    monkeypatch.setenv(gpu_topology.UNCHECKED, "1")
    with pytest.raises(WheelsMissingError, match=r"not implemented for cuda.*before JAX starts"):
        target_mesh(H200, TWO)


# the command


@pytest.mark.slow
def test_the_command_prints_the_compilers_figures_beside_the_plans(capsys, monkeypatch):
    assert len(jax.devices()) == 8  # JAX has started: the command leaves the devices as they are.
    monkeypatch.setattr(plan_run, "model_named", lambda name, **options: (model(**options), 64))
    assert main(["plan", "--compile", "--devices-per-node", "4", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for words in ("The plan and the compiler", "plan / compiler", "Compiled for 4 CPU devices"):
        assert words in out


def test_the_command_says_what_the_compiler_lacks(capsys):
    assert len(jax.devices()) == 8
    assert main(["plan", "--compile", "--nodes", "9", "--device", "a100"]) == 2
    assert "64 devices at most" in capsys.readouterr().err


# for GPUs


@pytest.mark.nightly
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("preset", ["zero3", "zeropp"])
def test_a_plan_for_h200s_is_compiled_for_them(preset, scan):
    try:
        target_mesh(H200, TWO)
    except WheelsMissingError as error:
        pytest.skip(str(error))
    config = getattr(ZeroConfig, preset)(compute_dtype="bfloat16", persistence_threshold=0)
    plan = zeroxla.plan(
        model(scan=scan, remat=True), TWO, tokens(), config=config, device="h200", compiled=True
    )
    found = plan.compiled
    assert found.platform == "gpu"
    assert "Compiled for 8 NVIDIA H200 SXM by jax" in found.note
    assert found.memory.argument_bytes == pytest.approx(plan.memory.state_bytes, rel=0.02)
    assert plan.comms.total_bytes() == pytest.approx(found.comms.total_bytes(), rel=0.02)


@pytest.mark.nightly
def test_what_describes_no_gpu_is_refused(tmp_path):
    (tmp_path / "mine.txtpb").write_text("cores: many")
    try:
        target_mesh(H200, TWO)
    except WheelsMissingError as error:
        pytest.skip(str(error))
    with pytest.raises(ValueError, match=r"does not understand .*mine.txtpb"):
        target_mesh(tmp_path / "mine.txtpb", TWO)
