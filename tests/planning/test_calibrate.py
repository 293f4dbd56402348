"""One measured step gives a device's efficiency; a plan moves to other devices and links."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.cli.main import main
from zeroxla.mesh.machines import Machines
from zeroxla.models import GPT
from zeroxla.planning.calibrate import LEAST, calibrated, entry

pytestmark = pytest.mark.usefixtures("quick_compilation")

MACHINES = Machines.load()


def make_plan(device="v100", link="10gbit", **more):
    model = GPT(vocab=512, length=128, layers=8, width=512, heads=8, remat=True)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 129), jnp.int32)}
    config = ZeroConfig(persistence_threshold=0, compute_dtype="float16")
    mesh = {"node": 2, "device": 4}
    return zeroxla.plan(model, mesh, batch, config=config, device=device, link=link, **more)


@pytest.fixture(scope="module")
def plan():
    return make_plan()


def with_efficiency(plan, efficiency, **more):
    device = dataclasses.replace(plan.target.device, efficiency=efficiency, **more)
    return plan.on(device=device)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("efficiency", thinned([0.01], slow=[0.05, 0.001]))
def test_a_known_efficiency_is_found_back(plan, efficiency, overlaps):
    # Where computation takes longest; hidden behind a link, many efficiencies give the same time.
    fast = {"node": dataclasses.replace(plan.target.links["node"], bytes_per_s=1e12)}
    plan = plan.on(links=fast)
    calls = []

    def plan_for(device):
        calls.append(device)
        return plan.on(device=device)

    want = with_efficiency(plan, efficiency, overlaps=overlaps)
    start = dataclasses.replace(want.target.device, efficiency=0.3)
    found = calibrated(start, plan_for, want.time.seconds)
    assert plan_for(found).time.seconds == pytest.approx(want.time.seconds, rel=2e-4)
    assert found.efficiency == pytest.approx(efficiency, rel=0.01)
    assert len(calls) < 25
    assert found.source.startswith("NVIDIA V100 data sheet; efficiency calibrated to a step of ")
    assert dataclasses.replace(found, efficiency=0.3, source="") == dataclasses.replace(
        start, source=""
    )


def test_what_no_efficiency_reaches_is_refused(plan):
    device = plan.target.device

    def plan_for(device):
        return plan.on(device=device)

    least = with_efficiency(plan, 1.0).time
    with pytest.raises(ValueError, match=r"communication alone takes the links `node` for 0\.\d+"):
        calibrated(device, plan_for, least.seconds / 2)
    slowest = with_efficiency(plan, LEAST).time.seconds
    with pytest.raises(ValueError, match=r"at 0\.01% of the peak of NVIDIA V100 .* takes"):
        calibrated(device, plan_for, slowest * 2)
    with pytest.raises(ValueError, match=r"bound by something else, .* `node` for"):
        calibrated(device, plan_for, least.seconds)
    for seconds in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="give more than 0"):
            calibrated(device, plan_for, seconds)


def test_a_plan_moves_without_a_trace(plan, monkeypatch):
    want = make_plan("a100", "1gbit")
    monkeypatch.setattr("zeroxla.step.memory.step_program.trace", None)
    found = plan.on(
        device=MACHINES.find_device("a100"),
        links={"node": MACHINES.find_link("1gbit"), "device": MACHINES.find_link("nvlink3")},
    )
    assert found.time.seconds == want.time.seconds != plan.time.seconds
    assert found.memory == want.memory
    assert plan.on().time == plan.time


def test_a_plan_moves_only_where_its_trace_holds(plan):
    with pytest.raises(ValueError, match="traced for gpu and 'cpu' is a cpu; make a plan for it"):
        plan.on(device=MACHINES.find_device("cpu"))
    with pytest.raises(
        ValueError, match=r"no links of \['rack'\]; of \['device', 'disk', 'host', 'node', 'pipe'\]"
    ):
        plan.on(links={"rack": MACHINES.find_link("1gbit")})


@pytest.mark.slow
def test_gathers_ahead_hide_and_those_of_cpus_do_not():
    plan = make_plan(link="400gbit")
    slow = with_efficiency(plan, 0.05).target.device
    ahead, tied = (plan.on(device=slow, ahead=a).time for a in (True, False))
    assert plan.on(device=slow).time == ahead  # None: as the step's program on GPUs
    assert ahead.seconds < tied.seconds
    assert ahead.busy_s == pytest.approx(tied.busy_s)
    assert make_plan(link="400gbit", ahead=False).time == plan.on(ahead=False).time
    cpu = make_plan("cpu")
    assert cpu.time == cpu.on(ahead=False).time


def test_a_cpus_efficiency_slows_its_memory_and_a_gpus_does_not():
    for name, factor in (("cpu", 0.5), ("a100", 1.0)):
        device = dataclasses.replace(MACHINES.find_device(name), efficiency=0.5)
        assert device.memory_rate == factor * device.bytes_per_s


def test_an_entry_is_read_back(plan, tmp_path):
    for device in MACHINES.devices.values():
        own = tmp_path / "machines.toml"
        odd = dataclasses.replace(device, efficiency=0.25, source='a "step"\\of 2 s')
        own.write_text(entry(odd))
        assert Machines.load(own).find_device(device.name) == odd


@pytest.mark.slow
def test_the_command_prints_an_entry_that_holds(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    argv = ["plan", "--nodes", "2", "--devices-per-node", "4", "--device", "a100"]
    assert main([*argv, "--measured-s", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "A step takes about 0.5 s" in out
    own = tmp_path / "mine.toml"
    own.write_text(out[out.index("[devices.") :])
    assert main([*argv, "--machines", str(own)]) == 0
    assert "A step takes about 0.5 s" in capsys.readouterr().out
