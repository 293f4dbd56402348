"""Steps whose optimizer needs matrices whole train as with XLA's own way, in every composition."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from tools.matrix_optimizers import damped
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.reference import relative_errors, worst
from tools.zoo.base import leaves

import zeroxla
from zeroxla import Offload, Pipeline, ZeroConfig
from zeroxla.models import GPT

pytestmark = pytest.mark.usefixtures("quick_compilation")

BATCH = {"tokens": np.random.default_rng(0).integers(0, 64, (16, 9), dtype=np.int32)}


def optimizer():
    return optax.chain(damped(damping=0.1), optax.adamw(1e-2, eps=1e-3))


def gpt(**options):
    return GPT.tiny(layers=4, width=32, **options)


def functions():
    """The least model with two matrices."""

    def loss(params, batch, key):
        x = jnp.tanh(params["table"][batch["tokens"]] @ params["first"])
        return jnp.mean((x @ params["second"]) ** 2)

    return leaves(table=(64, 16), first=(16, 32), second=(32, 16)), loss


def step_of(model, mesh, *, owners=True, optimizer=optimizer, **options):
    config = ZeroConfig(persistence_threshold=0, owners=owners, **options)
    return zeroxla.make_step(model, mesh, optimizer(), config=config)


def trained(step, num_steps=2):
    state = step.init(jax.random.key(0), BATCH)
    for _ in range(num_steps):
        state, metrics = step(state, BATCH)
    return zeroxla.full_params(state), float(metrics["loss"])


def described(step):
    """The report on the owners, from a trace alone."""
    state = step.abstract_state(BATCH)
    return step.programs.describe_owners(state)


def muon():
    return contrib.muon(0.02)


class TestDescribe:
    def test_names_the_leaves_and_counts_flops_and_bytes(self, mesh24):
        step = step_of(gpt(scan=False), mesh24, optimizer=muon)
        step.abstract_state(BATCH)
        report = step.describe()
        by_leaf = {row.leaves[0]: row for row in report.owners.rows}
        first = next(row for name, row in by_leaf.items() if "attn/c_attn" in name)
        assert (first.matrices, first.shape, len(first.leaves)) == (4, (32, 96), 4)
        assert sum(row.matrices for row in report.owners.rows) == 4 * 4 + 2
        elements = sum(np.prod(row.shape) * row.matrices for row in report.owners.rows)
        # Each device receives 7/8 of its shards, there and back, and some padding.
        assert 2 * 4 * elements / 8 * 7 / 8 <= report.owners.received_bytes
        assert report.owners.received_bytes <= 2.2 * 4 * elements / 8
        assert report.owners.device_flops < 1.3 / 8 * report.owners.flops
        assert "attn/c_attn" in str(report)
        assert "has an owner" in str(report)

    def test_layers_of_a_scanned_model_have_owners_of_their_own(self, mesh24):
        found = described(step_of(gpt(), mesh24))
        row = next(row for row in found.rows if "c_attn/kernel" in row.leaves[0])
        assert (row.matrices, row.shape) == (4, (32, 96))

    @pytest.mark.slow
    def test_there_is_nothing_to_say_without_owners(self, mesh24):
        for step in (
            step_of(gpt(), mesh24, owners=False),
            step_of(gpt(), mesh24, optimizer=lambda: optax.adamw(1e-3)),
            step_of(gpt(), zeroxla.make_mesh(nodes=1, devices_per_node=1)),
        ):
            assert described(step) is None
            assert step.describe().owners is None

    @pytest.mark.slow
    def test_a_branch_over_all_leaves_is_left_to_xla(self, mesh24):
        step = step_of(gpt(scan=False), mesh24, optimizer=lambda: optax.MultiSteps(muon(), 2))
        step.abstract_state(BATCH)
        report = step.describe()
        assert report.owners.rows == ()
        assert "No matrix of the update has an owner" in str(report)
        assert "without an owner: 1 x cond" in str(report)

    def test_a_pipeline_says_it_in_a_sentence(self):
        mesh = zeroxla.make_mesh(pipe=2, nodes=2, devices_per_node=2)
        step = step_of(Pipeline.from_model(gpt()), mesh)
        step.abstract_state(BATCH)
        assert "matrices whole, and each has an owner" in str(step.describe())


@pytest.mark.slow
def test_comms_has_a_phase_for_what_travels(mesh24):
    step = step_of(gpt(), mesh24)
    lowered = step.lower(step.abstract_state(BATCH), BATCH)
    rows = zeroxla.inspect.comms(lowered, mesh24, while_trips=1).rows
    mine = [row for row in rows if row.phase == "owners"]
    assert [(row.kind, row.count) for row in mine] == [("all-to-all", 2)]


MESHES = {
    "pipeline": {"pipe": 2, "nodes": 2, "devices_per_node": 2},
    "tensor": {"nodes": 2, "devices_per_node": 4, "tensor": 2},
    "context": {"nodes": 2, "devices_per_node": 4, "context": 2},
}
PLAIN = {"nodes": 2, "devices_per_node": 4}


@pytest.mark.parametrize(
    ("name", "scan", "options"),
    thinned(
        [("functions", True, {})],
        slow=[
            ("plain", True, {}),
            ("pipeline", True, {}),
            ("pipeline", False, {}),
            ("tensor", True, {}),
            ("tensor", False, {}),
            ("context", True, {}),
            ("plain", True, {"accumulate": 2, "hpz_size": "node", "frozen": "wpe"}),
            ("plain", False, {"offload": Offload(optimizer="host", sub_group=2000)}),
            ("plain", True, {"offload": Offload(optimizer="host", params="host")}),
            ("plain", True, {"offload": Offload(optimizer="host", ratio=0.5)}),
            ("plain", True, {"offload": Offload(optimizer="host", update="host")}),
        ],
        rows=True,
    ),
)
def test_a_step_trains_as_with_xlas_own_way(name, scan, options):
    model = functions() if name == "functions" else gpt(scan=scan)
    model = Pipeline.from_model(model) if name == "pipeline" else model
    mesh = zeroxla.make_mesh(**MESHES.get(name, PLAIN))
    plain = {k: v for k, v in options.items() if k != "offload"}
    found = trained(step_of(model, mesh, **options))
    expected = trained(step_of(model, mesh, owners=False, **plain))
    assert worst(relative_errors(found[0], expected[0]))[1] < 1e-5
    assert found[1] == pytest.approx(expected[1], rel=1e-6)


@pytest.mark.slow
def test_a_state_on_disk_trains_as_one_in_memory(mesh24, tmp_path):
    place = Offload(optimizer="disk", params="disk", path=tmp_path, sub_group=2000)
    step = step_of(gpt(), mesh24, offload=place)
    found = trained(step)
    assert len(step.describe().owners.rows) > 4
    expected = trained(step_of(gpt(), mesh24, owners=False))
    assert worst(relative_errors(found[0], expected[0]))[1] < 1e-5
