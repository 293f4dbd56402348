"""Training with state in host memory gives the same numbers as without."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.offload import MODELS, SMALL, assert_same, batch, make, make_step, taken
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import Offload, ZeroConfig
from zeroxla.inspect import array_bytes_per_device
from zeroxla.models import GPT
from zeroxla.offload.memory_kinds import check_memory, is_on_host
from zeroxla.offload.update.stream import stream
from zeroxla.offload.update.sub_groups import SubGroups
from zeroxla.program import compat
from zeroxla.program.trace import trace
from zeroxla.program.walk import body_of, local_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

HOST = Offload(optimizer="host", params="host", sub_group=1000)


def described(mesh, offload):
    """Return a step that has been given the shapes of a batch."""
    step = make_step(mesh, offload)
    step.abstract_state(batch())
    return step


def bytes_of(state, kind):
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return sum(x.nbytes for x in leaves if x.sharding.memory_kind == kind)


QUICK = [
    ("functions", "zero3", HOST, 1),
]
SLOW = [
    ("scanned", "zero3", HOST, 1),
    ("nnx", "zero3", Offload(optimizer="host", buffers=1, sub_group=1), 2),
    ("unrolled", "zeropp", Offload(optimizer="host", ratio=0.5), 2),
    ("nnx", "zeropp", HOST, 1),
    ("scanned", "zeropp_min", HOST, 2),
    ("unrolled", "zero3", Offload(params="host"), 1),
    ("unrolled", "zeropp", HOST, 1),
    ("scanned", "zeropp", Offload(params="host", optimizer="host", ratio=0.5), 1),
    ("nnx", "zeropp_hq", Offload(optimizer="host"), 2),
]


@pytest.mark.parametrize(
    ("model", "preset", "offload", "accumulate"), thinned(QUICK, slow=SLOW, rows=True)
)
def test_twenty_steps_are_bit_for_bit_those_without(mesh24, model, preset, offload, accumulate):
    found = []
    for place in (Offload(), offload):
        step, state = make(mesh24, place, model, preset, accumulate=accumulate)
        state, losses = taken(step, state, 20)
        assert losses[-1] < losses[0]
        found.append((losses, state))
        last = step, state
    (losses, state), (other_losses, other_state) = found
    assert losses == other_losses
    assert_same((state.params, state.opt_state), (other_state.params, other_state.opt_state))
    step, state = last
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves((state.params, state.opt_state))}
    assert "pinned_host" in kinds  # still there after the steps


def test_device_bytes_fall_by_what_is_offloaded(mesh24):
    _, state = make(mesh24, Offload())
    whole = bytes_of(state, "device")
    assert bytes_of(state, "pinned_host") == 0
    _, state = make(mesh24, Offload(optimizer="host"))
    assert bytes_of(state, "pinned_host") == pytest.approx(whole * 2 / 3, rel=0.01)
    assert bytes_of(state, "device") + bytes_of(state, "pinned_host") == whole
    _, state = make(mesh24, HOST)
    assert bytes_of(state, "device") < 0.01 * whole
    leaves = (state.params, state.opt_state)
    on_devices, on_host = (
        array_bytes_per_device(leaves),
        array_bytes_per_device(leaves, place="host"),
    )
    assert max(on_devices.values()) < 0.01 * whole / 8
    assert sum(on_host.values()) == pytest.approx(whole, rel=0.01)


@pytest.mark.slow
def test_bytes_at_rest_and_of_a_share_of_the_state(mesh24):
    _, state = make(mesh24, Offload())
    whole = bytes_of(state, "device")
    step, state = make(mesh24, HOST)
    on_devices = array_bytes_per_device((state.params, state.opt_state))
    phases = zeroxla.HybridEngine(step).phases()
    assert phases.resting_bytes == max(on_devices.values())
    _, state = make(mesh24, Offload(optimizer="host", ratio=0.5))
    assert 0.25 < bytes_of(state, "pinned_host") / (whole * 2 / 3) < 0.75
    _, state = make(mesh24, Offload(optimizer="host", ratio=0))
    assert bytes_of(state, "pinned_host") == 0


@pytest.mark.slow
def test_evaluation_gradients_and_given_parameters(mesh24):
    (plain, a), (step, b) = make(mesh24, Offload()), make(mesh24, HOST)
    assert plain.eval(a, batch()) == step.eval(b, batch())
    (loss, grads), (other, other_grads) = plain.grad(a, batch()), step.grad(b, batch())
    assert loss == other
    assert_same(grads, other_grads)
    again = step.init_from(b.params, jax.random.key(0))
    assert_same(again.opt_state, a.opt_state)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(again.params)} == {"pinned_host"}
    assert_same(zeroxla.full_params(a), zeroxla.full_params(b))


@pytest.mark.slow
def test_checkpoints_open_in_either_memory(mesh24, tmp_path):
    steps = {place: make(mesh24, place) for place in (Offload(), HOST)}
    for source, target in (steps, list(steps)[::-1]):
        step, state = steps[source][0], steps[source][0].init(jax.random.key(1), batch())
        with zeroxla.Checkpointer(tmp_path / str(source.optimizer)) as checkpointer:
            checkpointer.save(1, state)
            checkpointer.wait()
            found = checkpointer.restore(steps[target][0]).state
        shapes = steps[target][0].abstract_state(batch())
        for x, like in zip(jax.tree.leaves(found.params), jax.tree.leaves(shapes.params)):
            assert x.sharding.memory_kind == like.sharding.memory_kind
        assert_same((state.params, state.opt_state), (found.params, found.opt_state))
        _, losses = taken(step, state, 2)
        _, others = taken(steps[target][0], found, 2)
        assert losses == others


@pytest.mark.slow
def test_an_engine_generates_from_host_memory(mesh24):
    texts = []
    for place in (Offload(), HOST):
        step, state = make(mesh24, place)
        engine = zeroxla.HybridEngine(step, tensor=2)
        found = engine.generate(state, [[1, 2, 3]] * 4, key=jax.random.key(0), max_new_tokens=4)
        texts.append(found.tokens.tolist())
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_frozen_base_of_adapters_may_live_on_the_host(mesh24):
    losses = []
    for place in (Offload(), Offload(params="host")):
        model = zeroxla.lora(GPT.tiny(width=64), targets=r"mlp/.*kernel", rank=2, frozen="int8")
        step = zeroxla.make_step(
            model, mesh24, optax.adamw(1e-2), config=ZeroConfig(offload=place, **SMALL)
        )
        state, found = taken(step, step.init(jax.random.key(0), batch()), 3)
        losses.append(found)
        wires = [x for x in jax.tree.leaves(state.params) if x.dtype == jnp.uint8]
        kind = "device" if place.params == "none" else "pinned_host"
        assert {x.sharding.memory_kind for x in wires} == {kind}
        # The update leaves the base where it is.
        program = jax.make_jaxpr(step.programs.train)(state, batch())
        update = [e for e in program.eqns if e.primitive.name == "device_put"]
        assert not [e for e in update if e.invars[0].aval.dtype == jnp.uint8]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_the_optimizer_of_a_pipeline_may_live_on_the_host():
    mesh = zeroxla.make_mesh(pipe=2, nodes=1, devices_per_node=4)
    found = []
    for place in (Offload(), Offload(optimizer="host", sub_group=1000)):
        step = zeroxla.make_step(
            zeroxla.Pipeline.from_model(MODELS["scanned"]()),
            mesh,
            optax.adamw(1e-2),
            config=ZeroConfig(offload=place, **SMALL),
            microbatches=2,
        )
        found.append(taken(step, step.init(jax.random.key(0), batch()), 3)[1])
    assert found[0] == found[1]


def test_describe_says_what_is_on_the_host(mesh24):
    step = described(mesh24, HOST)
    placements = {row.path: row.placement for row in step.describe().rows}
    assert "on the host" in placements["h/mlp/c_fc/kernel"]
    assert "on the host" not in str(described(mesh24, Offload()).describe())


# the update


def host(mesh, *shape, value=1.0):
    sharding = jax.sharding.NamedSharding(mesh, jax.P(), memory_kind="pinned_host")
    return jax.device_put(jnp.full(shape, value), sharding)


def moves(mesh, update, args, **offload):
    """Return the equations of a streamed update that move something, and wait, in order."""
    places = [x.sharding for x in jax.tree.leaves(args)]
    streamed = jax.make_jaxpr(
        lambda *args: stream(update, args, places, offload=Offload(**offload), mesh=mesh)
    )(*args)
    return [
        eqn for eqn in streamed.eqns if eqn.primitive.name in ("device_put", "optimization_barrier")
    ]


def test_sub_groups_come_one_after_another(mesh24):
    arrays = [host(mesh24, 8) for _ in range(4)]

    def update(*xs):
        norm = sum(jnp.float32(2) for _ in xs)
        return [x * norm for x in xs]

    limit = 1  # of a device; two arrays of 8 elements have 16, more than its 8 devices may
    found = moves(mesh24, update, arrays, sub_group=limit, buffers=2)
    into = [e for e in found if e.primitive.name == "device_put" and is_host(e.invars[0])]
    waits = [e for e in found if e.primitive.name == "optimization_barrier"]
    assert len(into) == 4
    assert len(waits) == 2  # the third waits for the first, the fourth for the second
    together = moves(mesh24, update, arrays, sub_group=100)
    assert not [e for e in together if e.primitive.name == "optimization_barrier"]


def is_host(var):
    return getattr(var.aval, "memory_space", None) == jax.memory.Space.Host


def test_layers_of_a_stacked_leaf_come_by_themselves(mesh24):
    x, y = host(mesh24, 4, 8, value=1.0), jnp.arange(32.0).reshape(4, 8)

    def update(x, y):
        return x * 0.5, y - jnp.sqrt(x)

    places = [x.sharding, jax.sharding.NamedSharding(mesh24, jax.P())]
    for sub_group, count in ((2, 2), (1, 1), (4, 4)):  # rows of 8 elements, on 8 devices
        offload = Offload(sub_group=sub_group, buffers=1)

        def streamed(x, y, offload=offload):
            return stream(update, (x, y), places, offload=offload, mesh=mesh24, layer_dims=[0, 0])

        equations = jax.make_jaxpr(streamed)(x, y).eqns
        into = [e for e in equations if e.primitive.name == "device_put" and is_host(e.invars[0])]
        assert [e.invars[0].aval.shape[0] for e in into] == [count] * (4 // count)
        waits = [e for e in equations if e.primitive.name == "optimization_barrier"]
        assert len(waits) == len(into) - 1
        new_x, new_y = jax.jit(streamed)(x, y)
        assert is_on_host(new_x)
        assert not is_on_host(new_y)
        np.testing.assert_array_equal(np.asarray(new_x), 0.5 * np.ones((4, 8)))
        np.testing.assert_array_equal(np.asarray(new_y), np.asarray(y) - 1)


def test_a_sub_group_waits_until_an_earlier_one_is_moved_out(mesh24):
    arrays = [host(mesh24, 8) for _ in range(3)]
    found = moves(mesh24, lambda *xs: [x * 2 for x in xs], arrays, sub_group=1, buffers=1)
    waits = [e for e in found if e.primitive.name == "optimization_barrier"]
    assert len(waits) == 2
    for wait in waits:
        assert len(wait.invars) == 2
        assert all(map(is_host, wait.invars))  # the array to come, and the result that has gone


def test_what_is_returned_as_it_came_does_not_move(mesh24):
    arrays = [host(mesh24, 8, value=v) for v in (1.0, 2.0)]
    found = moves(mesh24, lambda frozen, x: (frozen, x * 2), arrays)
    into = [e for e in found if e.primitive.name == "device_put" and is_host(e.invars[0])]
    assert len(into) == 1


def test_what_depends_on_several_arrays_comes_together(mesh24):
    a, b, c = (host(mesh24, 8, value=v) for v in (1.0, 2.0, 3.0))

    def update(a, b, c):
        return a + b, b * 2, c * 3

    places = [x.sharding for x in (a, b, c)]
    offload = Offload(sub_group=1, buffers=1)
    run = jax.jit(lambda *args: stream(update, args, places, offload=offload, mesh=mesh24))
    found = run(a, b, c)
    assert [float(np.asarray(x)[0]) for x in found] == [3.0, 4.0, 9.0]
    assert all(is_on_host(x) for x in found)
    waits = [
        e
        for e in moves(mesh24, update, (a, b, c), sub_group=1, buffers=1)
        if e.primitive.name == "optimization_barrier"
    ]
    assert len(waits) == 1  # two sub-groups: (a, b) and c


@pytest.mark.parametrize("offloaded", [2, 1])
def test_a_moment_that_stays_is_updated_with_the_one_that_comes(offloaded):
    def update(m, v, g):
        norm = jnp.sqrt(sum(jnp.sum(x * x) for x in g))
        g = [x / norm for x in g]
        m = [0.9 * a + 0.1 * b for a, b in zip(m, g, strict=True)]
        v = [0.9 * a + 0.1 * b * b for a, b in zip(v, g, strict=True)]
        return m, v, norm

    args = [[jax.ShapeDtypeStruct((8,), jnp.float32)] * 2] * 3
    is_offloaded = [i < offloaded for i in range(6)]
    sub_groups = SubGroups.of(update, args, is_offloaded, limit=1, layer_dims=[None] * 4)
    assert [group.results for group in sub_groups.groups] == [(0, 2), (1, 3)][:offloaded]
    assert sub_groups.shared == ((4,) if offloaded == 2 else (1, 3, 4))
    # Of what is computed before them they read scalars alone: the sums that the norm is made of.
    inputs = set(sub_groups.program.inputs)
    made = [v for group in sub_groups.groups for v in group.reads if v not in inputs]
    assert {v.aval.shape for v in made} == {()}


@pytest.mark.slow
def test_an_optimizer_that_joins_all_leaves_is_streamed_at_once(mesh24):
    def scaled(updates, state, params=None):
        norm = sum(jnp.sum(s) for s in jax.tree.leaves(state))
        return jax.tree.map(lambda u: u / norm, updates), jax.tree.map(lambda s: s + 1, state)

    optimizer = optax.GradientTransformation(lambda p: jax.tree.map(jnp.ones_like, p), scaled)
    losses = []
    for place in (Offload(), HOST):
        config = ZeroConfig(offload=place, **SMALL)
        step = zeroxla.make_step(MODELS["scanned"](), mesh24, optimizer, config=config)
        losses.append(taken(step, step.init(jax.random.key(0), batch()), 3)[1])
    assert losses[0] == losses[1]


# bad input


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"optimizer": "cloud"}, r"Offload\(optimizer='cloud'\) is not a place; use one of"),
        ({"params": 1}, r"Offload\(params=1\)"),
        ({"ratio": 1.5}, r"ratio=1.5\) must be a share"),
        ({"sub_group": 0}, "Offload sub_group=0 must be a whole number of 1 or more"),
        ({"buffers": 0}, "Offload buffers=0"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        Offload(**options)


def test_offload_of_nothing_is_said():
    step = zeroxla.make_step(
        (lambda key, batch: {"w": jnp.ones(3)}, lambda p, b, key: (p["w"] * b["x"].mean()).sum()),
        zeroxla.make_mesh(nodes=2),
        config=ZeroConfig(offload=HOST),
    )
    with pytest.warns(UserWarning, match="without effect: each of 1 leaves has fewer elements"):
        step.abstract_state({"x": np.ones((8, 2), np.float32)})


def test_bad_configurations(mesh24):
    with pytest.raises(ValueError, match=r"Offload\(pin=False\): compiled programs keep .* pinned"):
        Offload(optimizer="host", pin=False)
    with pytest.raises(ValueError, match=r"offload='host' is none; give a zeroxla.Offload"):
        ZeroConfig(offload="host")
    with pytest.raises(ValueError, match=r"needs 'moon' memory, and cpu has \['device', "):
        check_memory(mesh24, "moon")
    described = SimpleNamespace(addressable_memories=lambda: [])  # as of a compile-only device
    check_memory(SimpleNamespace(devices=np.array([described])), "moon")


def test_a_plan_counts_the_hosts_memory_apart():
    mesh, found = {"node": 2, "device": 4}, {}
    for name, place in {"devices": Offload(), "host": HOST}.items():
        config = ZeroConfig(offload=place, persistence_threshold=300)
        found[name] = zeroxla.plan(MODELS["scanned"](), mesh, batch(), config=config)
    plain, offloaded = found["devices"].memory, found["host"].memory
    assert plain.offloaded_bytes == 0
    assert offloaded.state_bytes < 0.05 * plain.state_bytes
    assert offloaded.state_bytes + offloaded.offloaded_bytes == plain.state_bytes
    assert found["host"].host_bytes == found["devices"].host_bytes == 4 * plain.state_bytes
    assert "its state in the host's memory" in str(found["host"])


@pytest.mark.slow
def test_a_plan_counts_the_way_to_the_host():
    config = ZeroConfig(offload=HOST, persistence_threshold=300)
    plan = zeroxla.plan(MODELS["scanned"](), {"device": 8}, batch(), config=config)
    rate = plan.target.links["host"].bytes_per_s
    # For the update all of it in and out; for forward, and for most of it backward, a third more.
    least, most = 2 * plan.memory.offloaded_bytes, 2.8 * plan.memory.offloaded_bytes
    slow = dataclasses.replace(plan.target.links["host"], bytes_per_s=rate / 1e6, latency_s=0.0)
    there = plan.on(links={"host": slow})
    assert least < there.time.busy_s["host"] * rate / 1e6 < most
    assert there.time.seconds > 100 * plan.time.seconds
    assert "the link between a device and its host's memory" in there.limit
    nothing = zeroxla.plan(MODELS["scanned"](), {"device": 8}, batch())
    assert "host" not in nothing.time.busy_s


def test_a_unit_comes_to_the_device_where_it_is_gathered(mesh24):
    """Memory spaces in the trace: a loop's turn moves its own layer, and nothing is moved whole."""
    step = make_step(mesh24, HOST)
    state = step.abstract_state(batch())
    program, _ = trace(step.programs.train, state, batch(), opened=compat.forward_jaxpr)
    local = local_of(program)
    moved = [eq for eq in local.equations if eq.name == "device_put"]
    assert moved
    stacked = [eq for eq in moved if 2 in eq.outputs[0].aval.shape[:1]]  # of both layers
    assert not [eq for eq in stacked if eq.outputs[0].aval.size > 2 * 300]
    turns = [body_of(eq.params["jaxpr"]) for eq in local.equations if eq.name == "scan"]
    into = [[eq for eq in turn.equations if eq.name == "device_put"] for turn in turns]
    # Four kernels of a block; and forward two biases that exceed the persistence threshold.
    assert [len(moves) for moves in into] == [6, 4]
    assert max(eq.outputs[0].aval.size for moves in into for eq in moves) == 64 * 256 // 8
