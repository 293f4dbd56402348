"""Plans of axes that split the work on one row: bytes, memory, links, searches, the command."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec
from tools.perceptrons import Perceptrons
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.cli.main import main
from zeroxla.inspect import comms
from zeroxla.mesh.machines import Link, Machines
from zeroxla.models import Llama, Mixtral
from zeroxla.planning.bottleneck import longest, twice_as_fast
from zeroxla.planning.choices import Choice, Variants, axes_inside, axes_over_nodes, meshes
from zeroxla.planning.hunt import Hunt, least_s
from zeroxla.planning.make import plan_step
from zeroxla.planning.target import Target
from zeroxla.planning.timeline import Clock
from zeroxla.planning.trials import TrialCluster, Trials
from zeroxla.planning.wire_bytes import leaving_share
from zeroxla.program import compat
from zeroxla.program.trace import trace
from zeroxla.program.walk import local_of
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.axis_links import costs_on

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = ZeroConfig(persistence_threshold=0)
MACHINES = Machines.load()


def tokens(rows, length=16):
    return {"tokens": jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)}


def target(mesh_shape, device="h100", **options):
    return Target.find(mesh_shape, device=device, link="400gbit", machines=None, **options)


@pytest.fixture(scope="module")
def planned():
    """A step on 2 x 4 devices, lowered, and its plan on the same devices."""
    mesh = zeroxla.make_mesh(nodes=1, tensor=4)
    step = zeroxla.make_step(Perceptrons(), mesh, optax.adam(1e-3), config=CONFIG)
    state = step.abstract_state(tokens(4))
    return mesh, step.lower(state, tokens(4)), plan_step(step, tokens(4), target(mesh.shape, "cpu"))


def test_bytes_and_state_are_those_of_the_lowered_program(planned):
    mesh, lowered, plan = planned
    want = comms(lowered, mesh)
    for axis in (None, "tensor", "device", "device+tensor"):
        assert plan.comms.total_bytes(axis=axis) == want.total_bytes(axis=axis)
    assert {row.phase for row in plan.comms.rows} == {row.phase for row in want.rows}
    assert plan.memory.state_bytes == pytest.approx(plan.num_parameters * 12 / 8, rel=0.05)


def test_a_plan_says_what_its_axes_move(planned):
    *_, plan = planned
    (row,) = plan.axes.rows
    assert (row.axis, row.length, row.nodes) == ("tensor", 4, 1)
    phases = [plan.comms.total_bytes(axis="tensor", phase=p) for p in ("forward", "backward")]
    assert row.converted_bytes == sum(phases) > 0
    # Each device deals its shards of split leaves, and their gradients back; 1/4 stays.
    split = plan.num_parameters * 4 / 8 * 3 / 4 * 2
    assert row.dealt_bytes == pytest.approx(split, rel=0.2)
    assert row.seconds == plan.time.busy_s["tensor"] > 0
    for words in ("tensor=4", "link of `tensor`", "deal"):
        assert words in str(plan)
    slow = plan.on(links={"tensor": Link(**{**SLOW, "bytes_per_s": 1e6})})
    assert slow.axes.rows[0].seconds > row.seconds


SLOW = {"name": "slow", "bytes_per_s": 1e9, "latency_s": 0.0, "of": "device", "source": "a test"}


def test_work_and_gathered_leaves_are_divided():
    """The same rows on as many devices: each gathers its part of a leaf, and computes its part."""
    batch, model = tokens(8, 64), Perceptrons(width=256, hidden=1024)
    plain = zeroxla.plan(model, {"node": 1, "device": 4}, batch, config=CONFIG)
    split = zeroxla.plan(model, {"node": 1, "device": 1, "tensor": 4}, batch, config=CONFIG)
    assert split.memory.parameter_bytes == pytest.approx(plain.memory.parameter_bytes, rel=0.01)
    assert split.memory.gathered_bytes < plain.memory.gathered_bytes / 2
    assert split.time.busy_s["compute"] < 1.5 * plain.time.busy_s["compute"]


def test_costs_come_from_the_links():
    shape = {"node": 2, "device": 2, "tensor": 4}
    h100, l40s = (target(shape, device).axis_costs("tensor") for device in ("h100", "l40s"))
    assert h100.link == pytest.approx(1 / 450e9)
    assert h100.latency == pytest.approx(3 * 5e-6)
    assert l40s.link == pytest.approx(1 / 31.5e9)
    assert costs_on(target(shape, "l40s").abstract_mesh(), "tensor") == l40s
    # A plan for CPUs is of the step that runs on them, which are simulated devices most often.
    assert target(shape, "cpu").axis_costs("tensor") == AxisCosts()
    assert costs_on(zeroxla.make_mesh(nodes=1, tensor=4), "tensor") == AxisCosts()
    assert costs_on(AbstractMesh((1, 2, 4), ("node", "device", "tensor")), "tensor") == AxisCosts()


def test_a_real_device_costs_what_the_planned_one_does():
    device = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    devices = np.full((1, 2, 4), device, dtype=object)
    names = ("node", "device", "tensor")
    shape = dict(zip(names, devices.shape, strict=True))
    mesh = types.SimpleNamespace(devices=devices, shape=shape, axis_names=names)
    assert costs_on(mesh, "tensor") == target(shape).axis_costs("tensor")


def test_an_axis_over_nodes_takes_the_link_between_them():
    shape = {"node": 2, "device": 1, "context": 16, "tensor": 2}
    found = target(shape, devices_per_node=8)
    assert found.shared_links == {"context": "node", "tensor": "device"}
    # A ring of 16 leaves a node of 8 once in a gather; two of them share the node's link.
    received = 1e9 * 15 / 16
    assert found.seconds("context", "all-gather", 1e9) == pytest.approx(
        15 * 20e-6 + 2 * received / 50e9
    )
    # Each of 8 devices sends 12 of its 15 parts to the other nodes.
    assert leaving_share(("context",), shape, 8, "all-to-all") == pytest.approx(8 * 12 / 15)
    assert leaving_share(("tensor",), shape, 8, "all-to-all") == 0
    assert found.axis_costs("context").link > 10 * found.axis_costs("tensor").link
    assert found.node_size == 8
    with pytest.raises(ValueError, match=r"devices_per_node=6 .* neither divide a node nor fill"):
        target(shape, devices_per_node=6)


def test_axes_that_share_a_link_do_not_move_at_once():
    shape = {"node": 1, "device": 2, "tensor": 2}

    def both(x):
        first = lax.all_gather(x, "device", tiled=True)
        return first.sum() + lax.all_gather(x * 2, "tensor", tiled=True).sum()

    mesh = AbstractMesh((1, 2, 2), ("node", "device", "tensor"))
    mapped = jax.shard_map(
        both, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    program = local_of(trace(mapped, x, opened=compat.forward_jaxpr)[0])
    own = target(shape)
    clock = Clock(own)
    clock.run(program, [0.0] * len(program.inputs))
    time = clock.timeline()
    each = own.seconds("tensor", "all-gather", 2 * x.size * 4)
    assert time.busy_s["tensor"] == time.busy_s["device"] == pytest.approx(each)
    assert time.seconds >= 2 * each
    assert longest(time, own.shared_links) == ("device", pytest.approx(2 * each))
    faster = twice_as_fast(own, "device").links
    assert faster["tensor"].bytes_per_s == 2 * own.links["tensor"].bytes_per_s


def test_the_axes_that_are_tried():
    found = list(axes_inside(4, experts=False))
    assert found[0] == {"expert": 1, "context": 1, "tensor": 1}
    assert {(a["context"], a["tensor"]) for a in found} == {
        (1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 2)
    }  # fmt: skip
    assert {"expert": 2, "context": 1, "tensor": 2} in list(axes_inside(4, experts=True))
    wide = list(axes_over_nodes(2, 4))
    assert wide == [{"context": n, "tensor": 8 // n} for n in (8, 4, 2)]
    assert list(meshes(2, 4, (1,), wide[0])) == [{"node": 1, "device": 1, "context": 8}]
    assert list(meshes(2, 4, (1, 4), {"tensor": 4})) == [{"node": 2, "device": 1, "tensor": 4}]


@pytest.fixture(scope="module")
def search():
    return zeroxla.search_plans(
        Perceptrons(),
        1,
        4,
        tokens(8),
        zeros=("zero3",),
        pipes=(1, 2),
        axes=({"tensor": 2},),
        config=ZeroConfig(compute_dtype="bfloat16"),
    )


def test_a_search_tries_axes(search):
    meshes = [row.choice.mesh_shape for row in search.found]
    assert {"node": 1, "device": 2, "tensor": 2} in meshes
    own = search.found[0]
    config = ZeroConfig.zero3(compute_dtype="bfloat16", accumulate=own.choice.microbatches)
    alone = zeroxla.plan(
        Perceptrons(), own.choice.mesh_shape, tokens(8), config=config, devices_per_node=4
    )
    assert own.plan.time.seconds == alone.time.seconds
    assert own.plan.memory == alone.memory


def test_stages_and_axes_are_planned_together(search):
    shape = {"pipe": 2, "node": 1, "device": 1, "tensor": 2}
    assert any(row.choice.mesh_shape == shape for row in search.found)
    assert not search.refused


@pytest.mark.slow
def test_if_nothing_fits_context_is_tried_over_nodes():
    """One row, and 4 devices on 2 nodes."""
    model, config = Perceptrons(), ZeroConfig(compute_dtype="bfloat16")
    found = zeroxla.search_plans(
        model, 2, 2, tokens(1), zeros=("zero3",), pipes=(1,), config=config
    )
    assert found.best is not None
    assert {row.plan.target.node_size for row in found.found} == {2}
    shapes = [row.choice.mesh_shape for row in found.found]
    assert {"node": 1, "device": 1, "context": 4} in shapes
    assert all(shape["node"] == shape["device"] == 1 for shape in shapes)
    assert any("does not divide" in why for why in found.refused)


def test_banks_of_experts_are_found():
    def has_experts(model):
        trials = Trials(
            variants=Variants.of({None: model}, None),
            batch=tokens(4),
            config=CONFIG,
            cluster=TrialCluster(),
        )
        return trials.has_experts({"node": 1, "device": 1})

    assert has_experts(Mixtral.tiny())
    assert not has_experts(Llama.tiny())


class FakeTrials:
    """Plans whose activations take 64 bytes over the micro-batches, beside 10."""

    def __init__(self, room, device_s):
        self.rows, self.room, self.device_s, self.tried = 64, room, device_s, []
        models = {True: (None, None), False: (None, None)}
        self.variants = types.SimpleNamespace(models=models, refused={}, has_pipelines=False)

    def check(self, shape):
        pass

    def plan(self, choice: Choice):
        self.tried.append((choice.zero, choice.microbatches))
        size = 10 + 64 / choice.microbatches * (1 if choice.remat else 50)
        seconds = 10.0 if choice.zero == "zero3" else 8.0
        device = types.SimpleNamespace(usable_bytes=self.room)
        return types.SimpleNamespace(
            fits=size <= self.room,
            most_bytes=size,
            memory=types.SimpleNamespace(activation_bytes=size - 10),
            target=types.SimpleNamespace(device=device),
            time=types.SimpleNamespace(seconds=seconds, busy_s={"compute": self.device_s}),
        )


@pytest.mark.parametrize(("room", "fewest"), [(100, 1), (20, 8), (12, 32), (10.5, None)])
def test_the_fewest_micro_batches_that_fit_take_few_plans(room, fewest):
    trials = FakeTrials(room, 5.0)
    hunt = Hunt(trials=trials, zeros=("zero3", "zeropp"), progress=lambda *_: None)
    hunt.search([{"node": 1, "device": 1, "tensor": 2}])
    fitting = [row for row in hunt.found if row.plan.fits]
    assert {row.choice.microbatches for row in fitting if row.choice.remat} == (
        {fewest} if fewest else set()
    )
    assert hunt.best_s == (8.0 if fewest else None)
    assert len(trials.tried) <= 8


def test_presets_that_cannot_be_faster_are_left_out():
    trials = FakeTrials(100, 9.9)
    hunt = Hunt(trials=trials, zeros=("zero3", "zeropp"), progress=lambda *_: None)
    hunt.search([{"node": 1, "device": 1, "tensor": 2}])
    assert {zero for zero, _ in trials.tried} == {"zero3"}
    assert least_s(hunt.found[0].plan) == 9.9


@pytest.mark.slow
def test_the_command_plans_axes(capsys):
    arguments = ["--nodes", "1", "--devices-per-node", "4", "--length", "64"]
    assert main(["plan", *arguments, "--tensor", "4"]) == 0
    out = capsys.readouterr().out
    for words in ("node=1 x device=1 x tensor=4", "tensor=4", "conversions", "deals"):
        assert words in out


def test_the_command_refuses_axes_that_do_not_divide(capsys):
    arguments = ["--nodes", "1", "--devices-per-node", "4", "--length", "64"]
    assert main(["plan", *arguments, "--tensor", "3"]) == 2
    assert "4 devices of a node do not divide by tensor=3" in capsys.readouterr().err
    assert main(["plan", "--search", "--tensor", "2"]) == 2
    assert "--search with --tensor" in capsys.readouterr().err
