"""What limits a step: the resource in use longest, its seconds, and what would change it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from tools.perceptrons import Perceptrons
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import Offload, ZeroConfig
from zeroxla.cli.main import main
from zeroxla.mesh.machines import Machines
from zeroxla.models import GPT
from zeroxla.planning.bottleneck import NAMES, REMEDIES, longest, twice_as_fast

pytestmark = pytest.mark.usefixtures("quick_compilation")

MACHINES = Machines.load()
FAST = {
    axis: dataclasses.replace(MACHINES.find_link("nvlink4"), bytes_per_s=1e15, latency_s=0.0)
    for axis in ("node", "device", "host", "disk")
}


@pytest.fixture(scope="module")
def plan():
    """A step of which every link is so fast that the device alone limits it."""
    model = GPT(vocab=512, length=128, layers=8, width=512, heads=8, remat=True)
    found = zeroxla.plan(
        model,
        {"node": 2, "device": 4},
        {"tokens": jax.ShapeDtypeStruct((8, 129), jnp.int32)},
        config=ZeroConfig(persistence_threshold=0, compute_dtype="bfloat16"),
        device="a100",
    )
    return found.on(links=FAST)


def with_device(plan, **changed):
    return plan.on(device=dataclasses.replace(plan.target.device, **changed))


def slowed(plan, axis):
    link = dataclasses.replace(FAST[axis], bytes_per_s=1e6)
    return plan.on(links={axis: link})


@pytest.mark.parametrize(
    ("change", "resource", "words", "remedy"),
    [
        (lambda p: slowed(p, "node"), "node", "the link between nodes", "take a faster link"),
        (
            lambda p: slowed(p, "device"),
            "device",
            "the links between the devices of a node",
            "quantized wires",
        ),
        (
            lambda p: with_device(p, efficiency=1e-4),
            "products",
            "matrix products of the device",
            "more or faster devices",
        ),
        (
            lambda p: with_device(p, bytes_per_s=1e6),
            "memory",
            "the bandwidth of the device's memory",
            "faster memory",
        ),
    ],
    ids=["node", "device", "products", "memory"],
)
def test_a_slow_resource_is_named_with_its_seconds_and_a_remedy(
    plan, change, resource, words, remedy
):
    slow = change(plan)
    found = slow.bottleneck
    assert found.resource == resource
    assert found.name == words
    assert found.seconds <= slow.time.seconds
    assert found.share == pytest.approx(found.seconds / slow.time.seconds)
    assert found.share > 0.9
    # It is nearly all of the step, so a step with it twice as fast takes half as long.
    assert found.faster_s == pytest.approx(slow.time.seconds / 2, rel=0.1)
    assert remedy in found.remedy
    assert slow.limit.startswith(f"{words}, ")
    for text in (f"What limits it: {words}, in use for", "twice as fast", found.remedy):
        assert text in slow.verdict()


@pytest.mark.parametrize(
    ("places", "resource", "words"),
    [
        ({"optimizer": "host"}, "host", "the link between a device and its host's memory"),
        ({"optimizer": "disk", "path": "unused"}, "disk", "the host's disk"),
        ({"optimizer": "host", "update": "host"}, "host update", "the host's update of the state"),
    ],
    ids=["host", "disk", "host update"],
)
def test_the_hosts_links_and_update_are_named(places, resource, words):
    found = zeroxla.plan(
        Perceptrons(width=64, hidden=256),
        {"node": 1, "device": 2},
        {"tokens": jax.ShapeDtypeStruct((2, 17), jnp.int32)},
        config=ZeroConfig(compute_dtype="bfloat16", offload=Offload(**places)),
        device="h100",
    )
    links = {**FAST}
    if resource != "host update":
        links[resource] = dataclasses.replace(FAST[resource], bytes_per_s=1e3)
    device = found.target.device
    if resource == "host update":
        device = dataclasses.replace(device, host_bytes_per_s=1e3)
    slow = found.on(device=device, links=links)
    assert (slow.bottleneck.resource, slow.bottleneck.name) == (resource, words)
    assert slow.bottleneck.faster_s == pytest.approx(slow.time.seconds / 2, rel=0.1)


def test_stages_have_a_link_of_their_own():
    found = zeroxla.plan(
        zeroxla.Pipeline.from_model(Perceptrons()),
        {"pipe": 4, "node": 1, "device": 1},
        {"tokens": jax.ShapeDtypeStruct((8, 33), jnp.int32)},
        microbatches=8,
        link="1mbit",
    )
    assert found.bottleneck.resource == "pipe"
    assert found.limit.startswith("the link between stages, ")
    assert "bubble" in found.limit


def test_every_lane_has_a_name_and_a_remedy(plan):
    assert set(NAMES) == set(REMEDIES)
    assert set(plan.time.busy_s) <= {*NAMES, "compute"}


def test_what_the_device_waits_for_adds_up(plan):
    busy, memory_s = plan.time.busy_s["compute"], plan.time.memory_s
    assert 0 < memory_s < busy
    resource, seconds = longest(plan.time)
    assert seconds == pytest.approx({"memory": memory_s, "products": busy - memory_s}[resource])
    assert "and waits for its memory" in str(plan)


def test_gathers_that_were_asked_not_to_run_ahead_stay_so_in_the_question(plan):
    tied = slowed(plan, "node").on(ahead=False)
    faster = twice_as_fast(tied.target, "node")
    assert tied.bottleneck.faster_s == tied.simulation.on(faster, ahead=False).seconds


def test_the_command_says_what_limits(capsys):
    arguments = ["--nodes", "2", "--devices-per-node", "2", "--length", "64"]
    assert main(["plan", *arguments, "--link", "10mbit"]) == 0
    printed = capsys.readouterr().out
    assert "What limits it: the link between nodes, in use for" in printed
    assert "To change it: send fewer bytes over it" in printed
