"""The update on the host: offloaded arrays stay there, and gradients go to them."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.offload import MODELS, SMALL, batch, make_step, taken, trained
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import Offload, ZeroConfig
from zeroxla.cli.offload_options import OffloadOptions
from zeroxla.cli.train.options import TrainOptions
from zeroxla.offload.memory_kinds import is_on_host
from zeroxla.offload.update.on_host import check_host_compute, host_refusal
from zeroxla.offload.update.stream import stream
from zeroxla.program import compat
from zeroxla.program.report import render
from zeroxla.program.trace import trace

pytestmark = pytest.mark.usefixtures("quick_compilation")

STATE = Offload(optimizer="host", update="host", sub_group=1000)
ALL = dataclasses.replace(STATE, params="host")

CLIPPED = optax.chain(
    optax.clip_by_global_norm(0.1), optax.adamw(optax.cosine_decay_schedule(1e-2, 20))
)
GROUPS = optax.multi_transform(
    {"matrix": optax.adamw(1e-2), "vector": optax.sgd(1e-2, momentum=0.9)},
    lambda params: jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params),
)
FACTORED = optax.adafactor(1e-2, min_dim_size_to_factor=8)
EVERY_SECOND = optax.MultiSteps(optax.adamw(1e-2), 2)

CASES = [
    ("scanned", "zero3", ALL, 1, EVERY_SECOND),
    ("scanned", "zero3", STATE, 1, None),
    ("unrolled", "zeropp", dataclasses.replace(ALL, ratio=0.5), 2, CLIPPED),
    ("nnx", "zeropp", ALL, 1, GROUPS),
    ("scanned", "zero3", STATE, 1, FACTORED),
    ("unrolled", "zero3", dataclasses.replace(STATE, buffers=1), 1, optax.lamb(1e-2)),
    ("nnx", "zero3", STATE, 2, CLIPPED),
    ("scanned", "zeropp", ALL, 1, CLIPPED),
    ("unrolled", "zeropp", STATE, 1, GROUPS),
    ("nnx", "zero3", ALL, 1, FACTORED),
    ("scanned", "zeropp", ALL, 2, optax.lamb(1e-2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "preset", "offload", "accumulate", "optimizer"), CASES)
def test_twenty_steps_are_those_on_the_device(
    mesh24, model, preset, offload, accumulate, optimizer
):
    found = []
    for place in (Offload(), offload):
        step = make_step(mesh24, place, model, preset, optimizer, accumulate=accumulate)
        found.append(taken(step, step.init(jax.random.key(0), batch()), 20))
    (state, losses), (other, others) = found
    assert others[-1] < others[0]
    # Another compiler, or another fusion, may round each operation of an update otherwise: 2^-24 of
    # its result. Adam divides by a root that may be as small as its epsilon of 1e-8, so that of a
    # gradient near 0 the step, 1e-2 at most, is rounded by 1e-6; twenty steps add such errors.
    np.testing.assert_allclose(others, losses, rtol=1e-4)
    for x, y in zip(jax.tree.leaves(trained(other)), jax.tree.leaves(trained(state)), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-3, atol=1e-4)
    places = [p.memory for placed in state.placements for p in placed]
    assert set(places) == {None}
    wanted = [p.memory or "device" for placed in other.placements for p in placed]
    assert "pinned_host" in wanted
    assert [x.sharding.memory_kind for x in jax.tree.leaves(trained(other))] == wanted


@pytest.mark.slow
def test_the_optimizer_of_a_pipeline_is_updated_on_the_host():
    mesh = zeroxla.make_mesh(pipe=2, nodes=1, devices_per_node=4)
    found = []
    for place in (Offload(), STATE):
        step = zeroxla.make_step(
            zeroxla.Pipeline.from_model(MODELS["scanned"]()),
            mesh,
            optax.adamw(1e-2),
            config=ZeroConfig(offload=place, **SMALL),
            microbatches=2,
        )
        found.append(taken(step, step.init(jax.random.key(0), batch()), 3)[1])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


# what moves


def in_host(value):
    return getattr(value.aval, "memory_space", None) == jax.memory.Space.Host


def moves(step):
    """Return the shapes of what the update moves to the host, and of what it moves from there."""
    return moved(trace(step.programs.train, step.abstract_state(batch()), batch())[0])


def moved(program):
    puts = [e for e in program.equations if e.name == "device_put"]
    assert any(e.name == compat.COMPUTE_ON for e in program.equations)
    to = [
        e.outputs[0].aval.shape for e in puts if in_host(e.outputs[0]) and not in_host(e.values[0])
    ]
    back = [
        e.outputs[0].aval.shape for e in puts if in_host(e.values[0]) and not in_host(e.outputs[0])
    ]
    return [s for s in to if s], [s for s in back if s]


@pytest.mark.parametrize("optimizer", thinned([optax.adamw(1e-2)], slow=[CLIPPED]))
def test_moments_never_come_to_the_device(mesh24, optimizer):
    """A gradient of each leaf goes; where the master is on the device, one array of each comes."""
    for offload in (STATE, ALL):
        step = make_step(mesh24, offload, optimizer=optimizer)
        state = step.abstract_state(batch())
        pairs = zip(jax.tree.leaves(state.params), state.placements[0], strict=True)
        leaves = sorted(x.shape for x, p in pairs if p.dim is not None)
        to, back = moves(step)
        assert sorted(to) == leaves
        assert sorted(back) == ([] if offload is ALL else leaves)


@pytest.mark.slow
def test_of_factored_moments_little_moves(mesh24):
    step = make_step(mesh24, STATE, optimizer=FACTORED)
    num_parameters = sum(x.size for x in jax.tree.leaves(step.abstract_state(batch()).params))
    for shapes in moves(step):
        assert 0 < sum(map(math.prod, shapes)) < 0.05 * num_parameters


def test_the_compiler_is_told_that_the_host_computes(mesh24):
    def marked(place):
        step = make_step(mesh24, place)
        text = step.lower(step.abstract_state(batch()), batch()).as_text()
        return sum('_xla_compute_type = "host"' in line for line in text.splitlines())

    assert marked(dataclasses.replace(STATE, update="device")) == 0
    assert marked(STATE) > 100


@pytest.mark.slow
def test_no_device_has_a_whole_leaf_for_it(mesh24):
    """An update of leaves, padded or not, sends nothing between devices."""
    optimizer = optax.adamw(1e-2)
    found = {}
    for place in (Offload(), STATE):
        step = make_step(mesh24, place, optimizer=optimizer)
        compiled = step.lower(step.abstract_state(batch()), batch()).compile()
        found[place] = zeroxla.inspect.comms(compiled, mesh24).total_bytes()
    assert found[Offload()] == found[STATE]


def array(mesh, *shape, kind="pinned_host"):
    sharding = jax.sharding.NamedSharding(mesh, jax.P(), memory_kind=kind)
    return jax.device_put(jnp.ones(shape), sharding)


def streamed(mesh, update, args, num_places, **offload):
    places = [x.sharding for x in args[:num_places]]
    options = Offload(optimizer="host", update="host", **offload)
    return lambda *args: stream(update, args, places, offload=options, mesh=mesh)


def test_a_sub_group_is_sent_when_an_earlier_one_is_done(mesh24):
    state = [array(mesh24, 8) for _ in range(3)]
    grads = [array(mesh24, 8, kind="device") for _ in range(3)]

    def update(*args):
        return [m * 0.5 + g for m, g in zip(args[:3], args[3:], strict=True)]

    run = streamed(mesh24, update, [*state, *grads], 3, sub_group=1, buffers=1)
    eqns = jax.make_jaxpr(run)(*state, *grads).eqns
    waits = [e for e in eqns if e.primitive.name == "optimization_barrier"]
    assert [[in_host(v) for v in e.invars] for e in waits] == [[False, True]] * 2
    found = jax.jit(run)(*state, *grads)
    assert [x.sharding.memory_kind for x in found] == ["pinned_host"] * 3
    assert all(np.array_equal(np.asarray(x), np.full(8, 1.5)) for x in found)


def test_what_is_not_offloaded_is_updated_on_the_device(mesh24):
    m, other, g = array(mesh24, 8), array(mesh24, 8, kind="device"), array(mesh24, 8, kind="device")

    def update(m, other, g):
        scale = 1 / jnp.sqrt(jnp.sum(g * g))  # of all, and so on the device
        return m + g * scale, other * 2 + scale

    run = streamed(mesh24, update, [m, other, g], 2)
    program, _ = trace(run, m, other, g)
    (host,) = (eq for eq in program.equations if eq.name == compat.COMPUTE_ON)
    assert [v.aval.shape for v in host.outputs] == [(8,)]
    assert "reduce_sum" in [eq.name for eq in program.equations]
    first, second = jax.jit(run)(m, other, g)
    assert is_on_host(first)
    assert not is_on_host(second)
    np.testing.assert_allclose(np.asarray(first), 1 + 8**-0.5, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(second), 2 + 8**-0.5, rtol=1e-6)


def test_a_branch_over_many_arrays_is_taken_where_they_are(mesh24):
    """`apply_if_finite` has one that reads the whole state."""
    state, g = [array(mesh24, 8) for _ in range(8)], array(mesh24, 8, kind="device")

    def update(*args):
        *state, g = args
        ok = jnp.all(jnp.isfinite(g))
        return [jax.lax.cond(ok, lambda: sum(state) + g, lambda: state[0]), *state[1:]]

    run = streamed(mesh24, update, [*state, g], 8)
    program, _ = trace(run, *state, g)
    assert moved(program) == ([g.shape], [])
    found = jax.jit(run)(*state, g)
    assert all(is_on_host(x) for x in found)
    assert np.array_equal(np.asarray(found[0]), np.full(8, 9.0))


# what is said of it


def test_describe_says_who_updates(mesh24):
    for place, updated in ((STATE, "host"), (Offload(optimizer="host"), "device")):
        step = make_step(mesh24, place)
        step.abstract_state(batch())
        assert f"on the host, updated on the {updated}" in str(step.describe())


@pytest.mark.slow
def test_a_plan_counts_gradients_out_and_parameters_back():
    def planned(offload):
        config = ZeroConfig(offload=offload, persistence_threshold=300)
        return zeroxla.plan(MODELS["scanned"](), {"device": 8}, batch(), config=config)

    plan, before = planned(STATE), planned(dataclasses.replace(STATE, update="device"))
    target, moments = plan.target, plan.memory.offloaded_bytes
    # Of a sub-group only new parameters come to the device, and no moments.
    assert 0 < plan.memory.sub_group_bytes < before.memory.sub_group_bytes
    same = dataclasses.replace(before.memory, sub_group_bytes=plan.memory.sub_group_bytes)
    assert same == plan.memory
    link = target.links["host"]
    moved = (plan.time.busy_s["host"] - link.latency_s) * link.bytes_per_s
    assert moved == pytest.approx(moments, rel=0.01)  # two moments there; a gradient, a parameter
    read = plan.time.busy_s["host update"] * target.device.host_bytes_per_s / 8
    # Moments in and out, a gradient in, and a parameter's step out.
    assert read == pytest.approx(3 * moments, rel=0.01)
    assert "host update" not in before.time.busy_s
    slow = plan.on(device=dataclasses.replace(target.device, host_bytes_per_s=1e6))
    assert "the host's update" in slow.limit
    assert "the host updates" in render(slow.time_table())
    # With the master there parameters come by for forward and backward alone.
    assert planned(ALL).simulation.on_host.moved_bytes == pytest.approx(moments / 2, rel=0.01)


# bad input


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"update": "moon"}, r"update='moon'\) is not a place of the update; use one of"),
        ({"update": "host"}, r"update='host', optimizer='none', params='none'\): the host updates"),
        ({"update": "host", "optimizer": "disk", "path": "x"}, r"optimizer='disk'.*use optimizer="),
        ({"update": "host", "optimizer": "host", "params": "disk", "path": "x"}, "params='disk'"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        Offload(**options)


def test_the_command_line_names_its_flags():
    found = OffloadOptions(offload_optimizer="host", offload_update="host")
    assert found.changed(Offload(), None) == Offload(optimizer="host", update="host")
    for wrong in ({}, {"offload_optimizer": "disk", "offload_path": Path("x")}):
        with pytest.raises(ValueError, match=r"--offload-update host with --offload-optimizer "):
            TrainOptions(offload=OffloadOptions(offload_update="host", **wrong))


def refuse(fun):
    def refused(*args):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no host here\nstack of the compiler")

    return refused


@pytest.fixture
def no_host(monkeypatch):
    """A backend that cannot compile what the host is to compute."""
    host_refusal.cache_clear()
    monkeypatch.setattr(compat, "compute_on_host", refuse)
    yield
    host_refusal.cache_clear()


@pytest.mark.usefixtures("no_host")
def test_a_backend_that_cannot_is_named_before_the_first_step(mesh24):
    step = make_step(mesh24, STATE)
    match = r"cpu \(cpu\) with jax .* cannot compile: UNIMPLEMENTED: no host here; use Offload\(upd"
    with pytest.raises(ValueError, match=match) as found:
        step.init(jax.random.key(0), batch())
    assert "stack" not in str(found.value)
    # Of devices that need not exist nothing is known.
    check_host_compute(jax.sharding.AbstractMesh((1, 8), ("node", "device")))


def test_a_backend_is_asked_once(mesh24):
    host_refusal.cache_clear()
    for _ in range(2):
        check_host_compute(mesh24)
    assert host_refusal.cache_info().misses == 1


def test_sums_over_what_is_offloaded_are_asked_for(mesh24):
    """LAMB's norms of parameters on the host are; Adam needs none."""
    for optimizer, asked in ((optax.adamw(1e-2), 1), (optax.lamb(1e-2), 2)):
        host_refusal.cache_clear()
        step = make_step(mesh24, ALL, optimizer=optimizer)
        step.lower(step.abstract_state(batch()), batch())
        assert host_refusal.cache_info().misses == asked
