"""Plans of islands: the outer state, what an exchange sends, and how long islands wait for it."""

import dataclasses
import math
import sys
from pathlib import Path

import jax
import optax
import pytest
from tools.islands import MODEL, batches, part, trained
from tools.perceptrons import Perceptrons
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import Outer, WireFormat, ZeroConfig
from zeroxla.inspect import array_bytes_per_device
from zeroxla.mesh.machines import Link, Machines
from zeroxla.planning.exchange_time import ExchangeTime, Piece
from zeroxla.planning.islands import Islands, format_rate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from plan_islands import at_goal, compare, median

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOKENS = {"tokens": jax.ShapeDtypeStruct((8, 17), "int32")}
MESH = {"node": 1, "device": 4}
FOUR_BITS = WireFormat(bits=4, block=64, hadamard=32)


def planned(outer, num=3, mesh=MESH, model=None, **options):
    config = ZeroConfig(outer=outer, persistence_threshold=0)
    islands = Islands(num=num, link="10mbit")
    model = model or Perceptrons()
    return zeroxla.plan(model, mesh, TOKENS, config=config, islands=islands, **options)


@pytest.mark.parametrize(
    ("outer", "num"),
    [
        pytest.param(Outer(every=2, optimizer=optax.adam(0.1)), 4, marks=pytest.mark.slow),
        (Outer(every=4, fragments=2, wire=FOUR_BITS), 2),
    ],
    ids=["float32, adam", "4 bits, fragments"],
)
def test_the_outer_state_and_the_bytes_are_those_of_islands(outer, num):
    rows = batches(4)
    islands, states, metrics = trained(outer, num, rows)
    mesh = islands[0].step.mesh
    kept = array_bytes_per_device(states[0].outer)[mesh.devices.flat[0]]
    sent = [x["outer_bytes"] for x in metrics[0] if "outer_bytes" in x]
    plan = zeroxla.plan(
        MODEL,
        mesh.shape,
        part(rows[0], 0, num),
        optimizer=optax.sgd(0.1),
        config=ZeroConfig(outer=outer, persistence_threshold=0),
        islands=Islands(num=num),
    )
    assert plan.memory.outer_bytes == plan.islands.state_bytes == kept
    assert [x * mesh.size for x in plan.islands.device_bytes] == sent[: outer.fragments]
    assert plan.islands.exchange_bytes == max(sent)
    assert plan.islands.bytes_per_step == sum(sent) / len(rows)


def test_the_outer_parameters_are_as_large_as_the_shards():
    mesh = {"node": 2, "device": 2}
    momentum = planned(Outer(), mesh=mesh)
    without = planned(Outer(optimizer=optax.sgd(0.7)), mesh=mesh)
    errors = planned(Outer(wire=FOUR_BITS), mesh=mesh)
    size = momentum.memory.parameter_bytes
    found = [x.memory.outer_bytes for x in (without, momentum, errors)]
    assert found == [size, 2 * size, 4 * size]
    plain = zeroxla.plan(Perceptrons(), mesh, TOKENS, config=ZeroConfig(persistence_threshold=0))
    assert plain.islands is None
    assert plain.memory.outer_bytes == 0
    assert momentum.memory.total_bytes == plain.memory.total_bytes + 2 * size
    assert momentum.time == plain.time
    assert sum(momentum.memory.parts().values()) == momentum.memory.total_bytes


def test_stages_keep_their_own_outer_parameters():
    model = zeroxla.Pipeline.from_model(Perceptrons())
    memory = planned(Outer(), mesh={"pipe": 2, "device": 2}, model=model, microbatches=2).memory
    assert memory.outer_bytes == 2 * memory.parameter_bytes


def test_an_outer_state_on_the_host_takes_the_hosts_memory():
    device, host = planned(Outer()), planned(Outer(state="host"))
    size = device.memory.outer_bytes
    assert host.memory.total_bytes == device.memory.total_bytes - size
    assert host.memory.host_bytes == size
    assert "outer state of the island" not in str(host)
    assert "its outer state in the host's memory" in str(host)


def test_frozen_leaves_are_not_exchanged():
    adapted = planned(Outer(), model=zeroxla.lora(Perceptrons(width=64), targets="kernel", rank=2))
    whole = planned(Outer(), model=Perceptrons(width=64))
    assert 0 < adapted.islands.exchange_bytes < whole.islands.exchange_bytes / 4
    assert adapted.memory.outer_bytes < whole.memory.outer_bytes / 4


def test_a_plan_says_what_exchanges_take():
    outer = Outer(every=20, fragments=2, delay=3, wire=FOUR_BITS)
    plan = planned(outer)
    found, seconds = plan.islands, plan.time.seconds
    assert found.exchange_s == pytest.approx(found.exchange_bytes / 1.25e6 + 2 * 20e-6)
    assert found.hidden_s == min(3 * seconds, found.exchange_s)
    text = str(plan)
    for words in ("Exchanges of 3 islands", "2 in 20 steps", "hidden by a delay of 3 steps"):
        assert words in text
    rate = format_rate(found.needed_bytes_per_s())
    assert f"95% take a link of {rate}" in plan.verdict()
    # The same step on devices that compute a hundred times slower.
    device = plan.target.device
    rates = {name: rate / 100 for name, rate in device.flops_per_s.items()}
    slow = dataclasses.replace(device, flops_per_s=rates, bytes_per_s=device.bytes_per_s / 100)
    slower = plan.on(device=slow)
    assert slower.islands.step_s == slower.time.seconds > seconds
    assert slower.islands.needed_bytes_per_s() < found.needed_bytes_per_s()


def test_what_cannot_be_planned_is_named():
    with pytest.raises(ValueError, match="does not say how they exchange"):
        zeroxla.plan(Perceptrons(), MESH, TOKENS, islands=Islands())
    with pytest.raises(ValueError, match="there is no link 'wire'"):
        zeroxla.plan(Perceptrons(), MESH, TOKENS, islands=Islands(link="wire"))
    with pytest.raises(ValueError, match="num=0"):
        Islands(num=0)
    with pytest.raises(ValueError, match="utilization=1"):
        planned(Outer()).islands.needed_bytes_per_s(1)
    with pytest.raises(ValueError, match="take fewer"):
        planned(Outer(every=10**6, fragments=10**6))


def test_a_link_of_ones_own_table_joins_islands():
    link = Link(name="sea", bytes_per_s=1e6, latency_s=0.25, of="node", source="a test")
    machines = Machines.load()
    machines = dataclasses.replace(machines, links={**machines.links, "sea": link})
    config = ZeroConfig(outer=Outer())
    islands = Islands(num=2, link="sea")
    found = zeroxla.plan(
        Perceptrons(), MESH, TOKENS, config=config, machines=machines, islands=islands
    ).islands
    assert found.link == link
    assert found.exchange_s == pytest.approx(0.5 + found.exchange_bytes / 1e6)


# time


def times(seconds, *, every, fragments=1, delay=0, **fields):
    """Return exchanges of so many seconds each at 1 byte/s, between steps of a second."""
    outer = Outer(every=every, fragments=fragments, delay=delay)
    pieces = ((Piece(num_bytes=seconds),),) * fragments
    return ExchangeTime(outer=outer, fragments=pieces, step_s=1.0, **fields)


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 9])
def test_a_delay_hides_as_much_as_it_lasts(delay):
    found = times(2.5, every=10, delay=delay)
    assert found.utilization(1.0) == pytest.approx(10 / (10 + max(2.5 - delay, 0)))
    assert found.hidden_s(1.0) == min(2.5, delay)
    waiting = 10 / 0.95 - 10
    want = pytest.approx(2.5 / (waiting + delay), rel=1e-3)
    assert found.needed_bytes_per_s(0.95) == want


def test_exchanges_wait_for_each_other():
    # One begins after each step, and the link takes 1.5 seconds for it.
    assert times(1.5, every=2, fragments=2, delay=1).utilization(1.0) == pytest.approx(1 / 1.5)
    assert times(1.5, every=4, fragments=2, delay=1).utilization(1.0) == pytest.approx(2 / 2.5)
    assert times(1.5, every=4, fragments=2, delay=2).utilization(1.0) == pytest.approx(1.0)


def test_what_is_ready_before_the_steps_end_is_hidden_behind_its_rest():
    early = Piece(num_bytes=0.5, ready=0.5)
    late = Piece(num_bytes=0.5, needed=0.25)
    found = ExchangeTime(outer=Outer(every=1), fragments=((early, late),), step_s=1.0)
    # The first half arrives with the step's end; of the other half 0.25 seconds are waited for.
    assert found.utilization(1.0) == pytest.approx(1 / 1.25)


def test_latency_alone_can_take_too_long():
    assert times(1.0, every=10, latency_s=1.0).needed_bytes_per_s(0.95) == math.inf
    assert times(0.0, every=10).needed_bytes_per_s(0.95) == 0


def test_the_published_table_comes_out():
    """Table 4 of arXiv 2501.18512, from assumptions with their sources and nothing fitted."""
    points = compare()
    assert len(at_goal(points)) == 12
    assert median(at_goal(points)) < 0.15
    assert median(points) < 0.15
    assert max(abs(point.error) for point in points) < 0.25
