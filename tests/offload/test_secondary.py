"""Secondary shards in host memory take no device memory between forward and backward."""

import dataclasses

import jax
import pytest
from tools.offload import MODELS, SMALL, assert_same, batch, make, make_step, taken
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import Offload, WireFormat, ZeroConfig
from zeroxla.models import GPT
from zeroxla.program.host_values import is_value_on_host
from zeroxla.program.trace import trace
from zeroxla.program.walk import local_of, walk

pytestmark = pytest.mark.usefixtures("quick_compilation")

THERE = Offload(secondary="host")

CASES = [
    ("scanned", "zeropp", THERE, {}),
    ("unrolled", "zeropp", THERE, {"secondary": "wire", "accumulate": 2}),
    ("nnx", "zeropp_hq", THERE, {}),
    ("scanned", "zero3", THERE, {"hpz_size": "node", "inter_node_gather": "step", "accumulate": 2}),
    ("unrolled", "zeropp", Offload(secondary="host", optimizer="host", params="host"), {}),
    ("scanned", "zeropp", THERE, {"hpz_size": 2, "prefetch_bucket": 100_000}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "preset", "offload", "options"), CASES)
def test_steps_are_bit_for_bit_those_without(mesh24, model, preset, offload, options):
    found = []
    for place in (dataclasses.replace(offload, secondary="none"), offload):
        step, state = make(mesh24, place, model, preset, **options)
        state, losses = taken(step, state, 5)
        assert losses[-1] < losses[0]
        found.append((losses, state))
    (losses, state), (other_losses, other_state) = found
    assert losses == other_losses
    assert_same((state.params, state.opt_state), (other_state.params, other_state.opt_state))


def on_host(program):
    """Return the values of a program, and of the programs in it, that are in host memory."""
    values = [v for visit in walk(program, "cpu") for v in visit.equation.outputs]
    return list(filter(is_value_on_host, values))


@pytest.mark.parametrize("model", thinned(["scanned"], slow=["unrolled"]))
def test_backward_gathers_from_host_memory(mesh24, model):
    for place, is_there in ((Offload(), False), (THERE, True)):
        step = make_step(mesh24, place, model, "zeropp")
        state = step.abstract_state(batch())
        program, _ = trace(step.programs.train, state, batch())
        described = step.describe()
        moved = {tuple(v.aval.shape) for v in on_host(local_of(program))}
        assert bool(moved) == is_there
        if is_there and model == "unrolled":
            kept = sum(row.secondary_bytes > 0 for row in described.rows)
            values = [v for v in on_host(local_of(program)) if v.aval.size]
            assert len(values) >= kept > 0
        assert ("of secondary shards on the host" in str(described)) == is_there


@pytest.mark.slow
def test_a_plan_counts_them_as_the_hosts():
    mesh, found = {"node": 2, "device": 4}, []
    model = GPT(vocab=64, length=16, layers=8, width=256, heads=4)
    for place in (Offload(), THERE):
        config = ZeroConfig.zeropp(offload=place, **SMALL)
        found.append(zeroxla.plan(model, mesh, batch(rows=512), config=config))
    here, there = (plan.memory for plan in found)
    assert here.secondary_bytes == there.secondary_bytes == there.host_bytes > 0
    assert here.host_bytes == 0
    less = here.total_bytes - there.total_bytes
    assert less == pytest.approx(here.secondary_bytes, rel=0.1)
    assert found[1].host_bytes - found[0].host_bytes == 4 * here.secondary_bytes
    # They cross the link once in either direction.
    host = found[1].target.links["host"]
    slow = dataclasses.replace(host, bytes_per_s=1e3, latency_s=0.0)
    moved = found[1].on(links={"host": slow}).time.busy_s["host"] * 1e3
    assert moved == pytest.approx(2 * here.secondary_bytes, rel=0.1)
    assert "on the host, secondary shards" in str(found[1])


@pytest.mark.slow
def test_of_a_pipeline(mesh24):
    mesh = zeroxla.make_mesh(pipe=2, nodes=2, devices_per_node=2)
    losses = []
    for place in (Offload(), THERE):
        config = ZeroConfig.zeropp(offload=place, **SMALL)
        pipeline = zeroxla.Pipeline.from_model(MODELS["scanned"]())
        step = zeroxla.make_step(pipeline, mesh, config=config, microbatches=2, weights="tick")
        losses.append(taken(step, step.init(jax.random.key(0), batch()), 2)[1])
    assert losses[0] == losses[1]


def test_bad_configurations(mesh24):
    with pytest.raises(ValueError, match=r"secondary='disk'\) is not a place for secondary shards"):
        Offload(secondary="disk")
    with pytest.raises(ValueError, match=r"secondary='host'\) is of secondary shards, and hpz_siz"):
        ZeroConfig.zero3(offload=THERE)
    with pytest.raises(ValueError, match=r"with weight_differences: the kept copy is the secondar"):
        ZeroConfig.zeropp(offload=THERE, weight_differences=WireFormat(bits=4))
    with pytest.warns(UserWarning, match=r"without effect on the mesh .*offload\.secondary"):
        zeroxla.make_step(
            MODELS["scanned"](),
            zeroxla.make_mesh(nodes=1),
            config=ZeroConfig.zeropp(offload=THERE),
        )
