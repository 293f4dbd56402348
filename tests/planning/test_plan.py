"""`zeroxla.plan`, from the trace alone: the bytes of the HLO, memory, time, and tables."""

import subprocess
import sys

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
from zeroxla.inspect import array_bytes_per_device, comms, plot_plan
from zeroxla.inspect.pictures.figures import PHASE_COLORS
from zeroxla.mesh.machines import Device, Link, Machines
from zeroxla.models import GPT, Llama, attention
from zeroxla.planning.model_presets import PRESETS, model_named
from zeroxla.planning.target import Target
from zeroxla.planning.timeline import TURNS, Clock
from zeroxla.planning.wire_bytes import comms_of
from zeroxla.program import compat
from zeroxla.program.live.liveness import Scope
from zeroxla.program.live.peak import peak_bytes
from zeroxla.program.phases import PHASES
from zeroxla.program.trace import trace
from zeroxla.program.walk import local_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = jax.ShapeDtypeStruct((256, 256), jnp.float32)
SIZE = 256 * 256 * 4


def traced(function, *args):
    return trace(function, *args, opened=compat.forward_jaxpr)[0]


def peak(function, *args):
    return peak_bytes(Scope.of(traced(function, *args), "cpu")).total()


# wires


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (GPT.tiny, ZeroConfig(persistence_threshold=0)),
        pytest.param(
            Perceptrons,
            ZeroConfig.zeropp_min(persistence_threshold=0, quantize_threshold=0),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Llama.tiny,
            ZeroConfig.zeropp_min(persistence_threshold=0, quantize_threshold=0),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: GPT.tiny(scan=False),
            ZeroConfig.zeropp(persistence_threshold=0, quantize_threshold=0, accumulate=2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["zero3", "zeropp_min", "zeropp_min, llama", "zeropp, listed"],
)
def test_bytes_are_those_of_the_lowered_program(make, config):
    mesh = zeroxla.make_mesh(nodes=2)
    step = zeroxla.make_step(make(), mesh, optax.adam(1e-3), config=config)
    batch = {"tokens": jax.ShapeDtypeStruct((16, 17), jnp.int32)}
    state = step.abstract_state(batch)
    program = trace(step.programs.train, state, batch, opened=compat.forward_jaxpr)[0]
    found = comms_of(program, dict(mesh.shape), "cpu")
    want = comms(step.lower(state, batch), mesh)
    for axis in (None, "node", "device", "node+device"):
        assert found.total_bytes(axis=axis) == want.total_bytes(axis=axis)
    assert found.cross_host_bytes() == want.cross_host_bytes()
    assert found.count() == want.count()
    assert {row.phase for row in found.rows} == {row.phase for row in want.rows}


# memory


def test_products_exist_and_what_is_computed_element_by_element_does_not():
    def chain(x):
        y = jnp.tanh(x @ x) * 2 + 1
        return y @ y

    # x @ x, then y in its place, then the result.
    assert peak(chain, X) == 2 * SIZE


def test_what_backward_reads_is_kept():
    def loss(x):
        return jnp.sum(jnp.sin(x @ x) @ x)

    # Forward's x @ x stays until backward has its cosine; see the next products with it.
    kept, dropped = peak(jax.grad(loss), X), peak(loss, X)
    assert dropped <= 2 * SIZE
    assert kept - dropped >= SIZE


def test_a_loop_owns_one_turn_and_what_it_stacks():
    def stacking(x):
        return lax.scan(lambda c, _: (c @ c, c), x, None, length=5)[1]

    def carrying(x):
        return lax.scan(lambda c, _: (c @ c, None), x, None, length=500)[0]

    assert 6 * SIZE <= peak(stacking, X) <= 7 * SIZE
    assert peak(carrying, X) <= 2 * SIZE


def test_of_branches_the_largest_counts():
    def branches(i, x):
        return lax.cond(i > 0, lambda x: (x @ x) @ (x @ x), lambda x: x, x)

    found = peak(branches, jax.ShapeDtypeStruct((), jnp.int32), X)
    # Two products inside, and the result; abs: the number of the branch.
    assert found == pytest.approx(3 * SIZE, abs=8)


def test_what_goes_into_a_carry_and_comes_out_is_one_place():
    def looped(x):
        start = jnp.zeros((3, *x.shape))
        return lax.scan(lambda c, _: (c + (x @ x), None), start, None, length=5)[0]

    # The sum, added to in place, and a turn's product.
    assert peak(looped, X) == 4 * SIZE


def test_a_start_that_is_read_again_is_copied():
    def looped(x):
        start = x @ x
        return lax.scan(lambda c, _: (c + 1.0, None), start, None, length=5)[0] @ start

    # The start, the carry, and the product of both.
    assert peak(looped, X) == 3 * SIZE


def on_mesh(function, *args):
    """Return what one of 4 devices runs."""
    mesh, whole = AbstractMesh((4,), ("device",)), PartitionSpec()
    mapped = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return local_of(traced(mapped, *args))


def reduced(x):
    return lax.psum_scatter(x, "device", tiled=True)


@pytest.mark.parametrize(("platform", "want"), [("cpu", 2.25), ("gpu", 3.25)])
def test_a_reduction_on_gpus_keeps_its_operand_until_its_result_is_read(platform, want):
    def beside(x):
        shard = reduced(x @ x)
        y = (x @ x + 1.0) @ x
        return shard * 2.0, y

    local = on_mesh(beside, X)
    assert peak_bytes(Scope.of(local, platform)).total() == pytest.approx(want * SIZE, rel=0.01)


@pytest.mark.parametrize(("platform", "more"), [("cpu", 0), ("gpu", SIZE)])
def test_a_loops_last_reduction_on_gpus_runs_into_the_next_turn(platform, more):
    def looped(x):
        def turn(c, _):
            return c @ c, reduced(c @ x)

        return lax.scan(turn, x, None, length=4)

    local = on_mesh(looped, X)
    # Carried, stacked shards, and of a turn a product of either kind.
    found = peak_bytes(Scope.of(local, platform)).total()
    assert found - peak_bytes(Scope.of(local, "cpu")).total() == more


def test_a_gather_waits_for_its_first_use():
    def late(x, w):
        whole = jnp.concatenate([x] * 8)  # as a gather: larger than what it reads
        barred = lax.optimization_barrier(whole)
        wide = x @ w
        return (wide @ wide.T).sum() + jnp.sum(barred @ x)

    program = traced(late, X, jax.ShapeDtypeStruct((256, 8192), jnp.float32))
    # Late: 32 and 1 of wide, then 16; else all of wide beside the gathered 8.
    assert peak_bytes(Scope.of(program, "cpu")).total() == pytest.approx(33 * SIZE, rel=0.01)
    early = peak_bytes(Scope.of(program, "cpu", late=False)).total()
    assert early == pytest.approx(41 * SIZE, rel=0.01)


# time

LINK = Link(name="wire", bytes_per_s=1e9, latency_s=0.0, of="device", source="a test")


def device(**changed):
    usual = {
        "name": "test",
        "label": "Test",
        "flops_per_s": {"float32": 1e12},
        "memory_bytes": 1e9,
        "bytes_per_s": 1e20,
        "link": "wire",
        "platform": "tpu",
        "efficiency": 0.5,
        "source": "a test",
    }
    return Device(**{**usual, **changed})


def run(function, *args, ahead=False, full_ticks=None, **changed):
    """Return the time line of a function on one of 4 devices, and its results' seconds."""
    program = on_mesh(function, *args)
    target = Target(device=device(**changed), links={"device": LINK}, mesh_shape={"device": 4})
    clock = Clock(target, ahead=ahead, full_ticks=full_ticks)
    clock.run(program, [0.0] * len(program.inputs))
    return clock.timeline()


PRODUCT_S = 2 * 256**3 / 0.5e12
GATHER_S = 3 * SIZE / 1e9


def gather(x):
    return lax.all_gather(x, "device", tiled=True)


def test_products_take_their_flops_and_memory_its_bytes():
    assert run(lambda x: (x @ x) @ x, X).seconds == pytest.approx(2 * PRODUCT_S)
    slow = run(lambda x: x @ x, X, bytes_per_s=1e9)
    assert slow.seconds == pytest.approx(2 * SIZE / 1e9)  # x is read once


def test_a_slice_and_an_update_in_place_take_their_own_bytes():
    def update(x, i):
        part = lax.dynamic_slice_in_dim(x, i, 10) * 2
        return lax.dynamic_update_slice_in_dim(x, part, i, 0)

    x, i = jnp.zeros((1000, 100)), jnp.int32(0)
    line = run(update, x, i, bytes_per_s=1e6)
    assert line.busy_s["compute"] == pytest.approx(2 * 4 * 10 * 100 / 1e6)


@pytest.mark.parametrize(
    ("platform", "dtypes", "seconds"),
    [
        ("gpu", ("float32", "bfloat16"), 0.0),
        ("gpu", ("float32", "float16"), 2 * 4 * 1000 / 1e6),  # before Ampere
        ("tpu", ("float32", "bfloat16"), 2 * 4 * 1000 / 1e6),
    ],
)
def test_attention_that_is_one_kernel_on_a_gpu_keeps_its_scores_inside(platform, dtypes, seconds):
    def attend(x):
        with jax.named_scope(attention.CUDNN_SCOPE):
            return jnp.sort(x)

    rates = dict.fromkeys(dtypes, 1e12)
    line = run(attend, jnp.zeros(1000), bytes_per_s=1e6, platform=platform, flops_per_s=rates)
    assert line.busy_s["compute"] == pytest.approx(seconds)


def test_a_gather_runs_beside_a_product_that_does_not_need_it():
    def beside(x, y):
        return gather(x)[:256] @ (y @ y)

    found = run(beside, X, X)
    assert found.seconds == pytest.approx(max(GATHER_S, PRODUCT_S) + PRODUCT_S)
    assert found.busy_s == pytest.approx({"compute": 2 * PRODUCT_S, "device": GATHER_S})
    apart = run(beside, X, X, overlaps=False)
    assert apart.seconds == pytest.approx(GATHER_S + 2 * PRODUCT_S)


def test_a_loop_takes_as_long_as_its_turns():
    def looped(x):
        return lax.scan(lambda c, _: (gather(c)[:256] @ c, None), x, None, length=9)[0]

    found = run(looped, X)
    assert TURNS < 9
    assert found.seconds == pytest.approx(9 * (GATHER_S + PRODUCT_S))
    assert found.busy_s == pytest.approx({"compute": 9 * PRODUCT_S, "device": 9 * GATHER_S})
    assert sum(event.lane == "device" for event in found.events) == 9


def test_a_loop_lasts_as_long_as_the_lane_that_is_taken_longest():
    def looped(x):
        return lax.scan(lambda c, _: (c, reduced(jnp.tile(c, (4, 1)))), x, None, length=50)[1]

    found = run(looped, X)
    assert found.seconds == pytest.approx(max(found.busy_s.values()), rel=0.05)
    assert found.busy_s["device"] > 45 * 3 * SIZE / 1e9


def test_ticks_last_as_long_as_a_schedules_work():
    def ticks(x):
        with jax.named_scope("ticks"):
            return lax.scan(lambda c, _: (c @ c, None), x, None, length=10)[0]

    assert run(ticks, X).seconds == pytest.approx(10 * PRODUCT_S)
    assert run(ticks, X, full_ticks=7.5).seconds == pytest.approx(7.5 * PRODUCT_S)


@pytest.mark.slow
def test_a_pipelines_time_is_its_schedules():
    def seconds(microbatches):
        model = zeroxla.Pipeline.from_model(GPT.tiny(width=64, layers=4))
        mesh, batch = {"pipe": 4, "node": 1, "device": 1}, tokens(microbatches, 32)
        return zeroxla.plan(model, mesh, batch, microbatches=microbatches, link="nvlink4").time

    few, many = seconds(4), seconds(12)
    # (m + p - 1) ticks of 1F1B with a forward and a backward, and what is done once a step.
    assert 1.5 < many.seconds / few.seconds < 15 / 7


def test_a_loop_that_gathers_ahead_hides_the_shorter():
    def looped(x, shards):
        def turn(c, shard):
            shard, c = lax.optimization_barrier((shard, c))
            return c @ gather(shard)[:256], None

        return lax.scan(turn, x, shards)[0]

    shards = jax.ShapeDtypeStruct((9, 256, 256), jnp.float32)
    tied, ahead = (run(looped, X, shards, ahead=ahead).seconds for ahead in (False, True))
    assert tied == pytest.approx(9 * (GATHER_S + PRODUCT_S))
    assert ahead == pytest.approx(9 * max(GATHER_S, PRODUCT_S) + min(GATHER_S, PRODUCT_S))


# tables


def test_devices_and_links_are_found_by_name():
    machines = Machines.load()
    assert machines.find_device("H100").flops_per_s["bfloat16"] == 989e12
    assert machines.find_link("nvlink4").of == "device"
    rate = machines.find_link("100gbit")
    assert (rate.bytes_per_s, rate.of) == (12.5e9, "node")
    assert machines.find_link("2.5Gbit/s").bytes_per_s == 312.5e6
    for entry in (*machines.devices.values(), *machines.links.values()):
        assert entry.source


@pytest.mark.parametrize(
    ("find", "name", "match"),
    [
        ("find_device", "h1000", "no device 'h1000'; did you mean h100"),
        ("find_device", "abacus", "there are a100, "),
        ("find_link", "nvlnk4", "no link 'nvlnk4'; did you mean nvlink4 .* or a rate such as 100g"),
    ],
)
def test_unknown_names_offer_the_nearest(find, name, match):
    with pytest.raises(ValueError, match=match):
        getattr(Machines.load(), find)(name)


def test_users_add_their_own(tmp_path):
    own = tmp_path / "machines.toml"
    own.write_text(
        '[devices.mine]\nlabel = "Mine"\nflops_per_s = { float32 = 1e12 }\nmemory_bytes = 1e9\n'
        'bytes_per_s = 1e11\nlink = "string"\nplatform = "gpu"\nefficiency = 0.5\nsource = "me"\n'
        '[links.string]\nbytes_per_s = 1.0\nlatency_s = 1.0\nof = "node"\nsource = "me"\n'
    )
    machines = Machines.load(own)
    assert machines.find_device("mine").link == "string"
    assert machines.find_device("h100").label


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[devices.x", "cannot be read"),
        ("[gadgets.x]\n", r"has the tables \['gadgets'\]"),
        ("[links.x]\nspeed = 1\n", "links.x of .*speed"),
        (
            '[links.x]\nbytes_per_s = 0\nlatency_s = 0\nof = "node"\nsource = ""\n',
            "the link 'x' has bytes_per_s=0",
        ),
    ],
)
def test_tables_that_are_not_whole(tmp_path, text, match):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ValueError, match=match):
        Machines.load(tmp_path / "bad.toml")


# plans


def test_a_program_holds_what_jax_takes_of_a_gpu():
    batch, model = tokens(8, 128), Perceptrons(width=2048, hidden=8192)
    for fraction, words in (
        (None, "the 60 GB that JAX takes of its 80 GB"),
        (0.9, "the 72 GB that JAX takes of its 80 GB"),
        (1.0, "into its 80 GB"),
        (1e-3, "does NOT fit into the 80 MB that JAX takes"),
    ):
        plan = zeroxla.plan(model, {"device": 8}, batch, memory_fraction=fraction)
        assert words in plan.verdict()
        assert plan.fits == (fraction != 1e-3)
    for fraction in (0.0, 1.5):
        with pytest.raises(ValueError, match=rf"memory_fraction={fraction}: give the share"):
            zeroxla.plan(model, {"device": 8}, batch, memory_fraction=fraction)
    with pytest.raises(ValueError, match=r"the device 'test' has usable=2; give the share"):
        device(usable=2)


def tokens(rows, length):
    return {"tokens": jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)}


@pytest.mark.smoke
def test_a_plan_of_many_devices_that_are_not_there():
    batch = tokens(1024, 128)
    plan = zeroxla.plan(GPT.small(remat=True), {"node": 128, "device": 8}, batch)
    assert plan.num_parameters == 124_439_808
    assert plan.num_tokens == 1024 * 128
    peak, devices = 989e12, 1024
    flops_per_s = 6 * plan.num_parameters * plan.num_tokens / plan.time.seconds
    assert plan.mfu == pytest.approx(flops_per_s / (peak * devices))
    assert f"a device, {plan.mfu:.0%} MFU)" in plan.verdict()
    # A shard of the master, padding included, and twice that.
    assert 1 <= plan.memory.parameter_bytes / (4 * 124_439_808 / 1024) <= 1.1
    assert plan.memory.optimizer_bytes == pytest.approx(2 * plan.memory.parameter_bytes, rel=0.01)
    assert sum(plan.memory.parts().values()) == plan.memory.total_bytes
    assert plan.fits
    assert "124,439,808 parameters on node=128 x device=8 of NVIDIA H100" in str(plan)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(ZeroConfig(), marks=pytest.mark.slow),
        ZeroConfig.zeropp_min(persistence_threshold=0, quantize_threshold=0),
    ],
    ids=["zero3", "zeropp_min"],
)
def test_the_state_of_a_plan_is_that_of_the_arrays(config):
    mesh, rows = zeroxla.make_mesh(nodes=2), np.zeros((8, 17), np.int32)
    step = zeroxla.make_step(Perceptrons(), mesh, optax.adam(1e-3), config=config)
    state = step.init(jax.random.key(0), {"tokens": rows})
    plan = zeroxla.plan(
        Perceptrons(),
        dict(mesh.shape),
        {"tokens": rows},
        optimizer=optax.adam(1e-3),
        config=config,
    )
    for planned, arrays in (
        (plan.memory.parameter_bytes, state.params),
        (plan.memory.optimizer_bytes, state.opt_state),
        (plan.memory.wire_bytes, state.wire_state),
    ):
        assert planned == max(array_bytes_per_device(arrays).values(), default=0)


def test_a_step_without_devices_is_not_run():
    mesh = AbstractMesh((2, 4), ("node", "device"))
    step = zeroxla.make_step(GPT.tiny(), mesh)
    assert step.abstract_state(tokens(8, 16)).params
    with pytest.raises(ValueError, match=r"'device': 4} is abstract: .* zeroxla.make_mesh"):
        step.init(jax.random.key(0), {"tokens": np.zeros((8, 17), np.int32)})


@pytest.mark.slow
def test_a_slower_link_and_fewer_bytes_change_the_time():
    def seconds(link, config):
        mesh = {"node": 4, "device": 2}
        model = Perceptrons(width=64, hidden=256)
        return zeroxla.plan(model, mesh, tokens(8, 32), link=link, config=config).time.seconds

    plain = ZeroConfig(persistence_threshold=0, compute_dtype="bfloat16")
    zeropp = ZeroConfig.zeropp(
        persistence_threshold=0, quantize_threshold=0, compute_dtype="bfloat16"
    )
    slow = seconds("10mbit", plain)
    assert slow > 5 * seconds("100mbit", plain)
    assert seconds("10mbit", zeropp) < 0.5 * slow


@pytest.mark.parametrize(
    ("mesh", "batch", "options", "match"),
    [
        ({"host": 2}, tokens(8, 32), {}, r"the mesh has the axes \['host'\]"),
        ({"node": 0}, tokens(8, 32), {}, "the mesh has node=0"),
        ({"node": 3}, tokens(8, 32), {}, "8 .* 3"),
        ({"node": 2}, tokens(8, 32), {"device": "h900"}, "no device 'h900'; did you mean h"),
        ({"node": 2}, tokens(8, 32), {"link": "rope"}, "no link 'rope'"),
        ({"pipe": 2}, tokens(8, 32), {}, "pipe=2 and the model is not a pipeline"),
    ],
)
def test_bad_input(mesh, batch, options, match):
    with pytest.raises(ValueError, match=match):
        zeroxla.plan(GPT.tiny(), mesh, batch, **options)


@pytest.mark.parametrize("name", ["llama-7b", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_presets_have_the_parameters_that_people_know(name):
    known = {"gpt2": 124_439_808, "llama-7b": 6_738_415_616}
    model, length = model_named(name)
    plan = zeroxla.plan(model, {"device": 8}, tokens(8, 16))
    assert plan.num_parameters == known[name]
    assert length == PRESETS[name][1]


def test_an_unknown_model_offers_the_nearest():
    with pytest.raises(ValueError, match=r"no model 'lama-7b'; did you mean llama-7b"):
        model_named("lama-7b")


# the command


def test_the_command_prints_and_draws(capsys, tmp_path):
    picture = tmp_path / "plan.png"
    status = main(
        ["plan", "--model", "gpt2", "--nodes", "2", "--length", "64", "--picture", str(picture)]
    )
    out = capsys.readouterr().out
    assert status == 0
    for words in ("Memory of one device", "Collectives of one step on node=2 x device=8"):
        assert words in out
    assert "fits into the 60 GB that JAX takes of its 80 GB" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_counts_what_is_offloaded(capsys, monkeypatch):
    small = Perceptrons(width=512, hidden=2048)
    monkeypatch.setattr("zeroxla.cli.plan.run.model_named", lambda name, remat: (small, 128))
    arguments = ["--nodes", "2", "--devices-per-node", "4", "--zero", "zeropp"]
    places = ["--offload-optimizer", "disk", "--offload-params", "host", "--offload-secondary"]
    assert main(["plan", *arguments, *places, "host"]) == 0
    printed = capsys.readouterr().out
    for words in ("on the host's disk", "in the host's memory", "on the host, secondary shards"):
        assert words in printed
    assert "link of `disk`" in printed


@pytest.mark.slow
def test_the_command_says_when_it_does_not_fit(capsys):
    arguments = ["--nodes", "1", "--devices-per-node", "2", "--device", "l4", "--length", "64"]
    assert main(["plan", "--model", "llama-7b", *arguments]) == 1
    out = capsys.readouterr().out
    assert "does NOT fit into the 18 GB that JAX takes of its 24 GB" in out


def test_the_command_refuses_what_it_does_not_know(capsys):
    assert main(["plan", "--model", "gpt5"]) == 2
    assert "there is no model 'gpt5'" in capsys.readouterr().err


@pytest.mark.slow
def test_seventy_billion_parameters_on_4096_devices_take_seconds():
    code = r"""
import re, time, zeroxla.cli.main
start = time.process_time()
status = zeroxla.cli.main.main(["plan", "--model", "llama-70b", "--nodes", "512"])
# Not `ru_maxrss`, which begins at what the process that started this one has.
used = int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1])
print("status", status, time.process_time() - start, used * 1024)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert "68,976,648,192 parameters on node=512 x device=8" in run.stdout
    status, seconds, num_bytes = run.stdout.rpartition("status ")[2].split()
    assert int(status) == 0
    assert float(seconds) < 20
    assert float(num_bytes) < 2e9


def test_the_picture_has_a_colour_for_each_phase():
    batch = {"tokens": jax.ShapeDtypeStruct((8, 33), jnp.int32)}
    figure = plot_plan(zeroxla.plan(GPT.tiny(), {"node": 2, "device": 2}, batch))
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    colours = [handle.patches[0].get_facecolor() for handle in handles]
    assert {"forward", "backward", "forward gather", "reduce", "update"} <= set(labels)
    assert len(set(colours)) == len(set(labels)) == len(labels)
    assert set(PHASE_COLORS) == set(PHASES)
    assert len(set(PHASE_COLORS.values())) == len(PHASES)
