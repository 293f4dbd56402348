"""Options that are left to a memory budget: it takes micro-batches and secondary shards so that the
step fits, and says which it took."""

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from tools.perceptrons import Perceptrons
from tools.quick import quick_compilation  # noqa: F401
from tools.reference import relative_errors, worst

import zeroxla
from zeroxla import Offload, WireFormat, ZeroConfig
from zeroxla.fetch.keeping.residual_graph import DeviceRates
from zeroxla.models.losses import next_token_loss
from zeroxla.step import setup
from zeroxla.step.memory.device_facts import rates_of
from zeroxla.step.memory.fit import MemoryFitter
from zeroxla.step.memory.step_memory import measured
from zeroxla.step.memory.variants import fit_variants

ROUNDING = 5e-6
BATCH = {"tokens": np.random.default_rng(0).integers(0, 64, (32, 65), np.int32)}

pytestmark = pytest.mark.usefixtures("quick_compilation")


def loss(apply, batch, *, train):
    return next_token_loss(apply(batch["tokens"][:, :-1]), batch)


def step_of(mesh=None, **options):
    config = ZeroConfig(persistence_threshold=0, **options)
    mesh = zeroxla.make_mesh(nodes=1, devices_per_node=2) if mesh is None else mesh
    return zeroxla.make_step(Perceptrons(), mesh, optax.sgd(0.1), loss=loss, config=config)


@pytest.fixture(scope="module")
def plain():
    """A step without a budget, its loss and gradients, and its bytes on a device."""
    step = step_of()
    state = step.init(jax.random.key(0), BATCH)
    taken = zeroxla.inspect.memory(step.lower(state, BATCH).compile())
    return state, step.grad(state, BATCH), taken


@pytest.mark.slow
def test_as_many_micro_batches_are_taken_as_fit(plain):
    state, (expected, gradients), taken = plain
    rest = taken.total_bytes - taken.temp_bytes
    step = step_of(memory=rest + taken.temp_bytes // 6, accumulate="auto")
    step.abstract_state(BATCH)
    found, grads = step.grad(state, BATCH)
    fit = step.describe().memory
    count = fit.decided["accumulate"]
    assert count > 1
    assert 32 // 2 % count == 0
    assert fit.best.num_bytes <= fit.total_bytes
    assert f"The budget decided: accumulate={count}." in fit.notes()
    assert abs(float(found - expected)) <= 1e-6 * float(expected)
    assert worst(relative_errors(grads, gradients))[1] < ROUNDING


@pytest.mark.slow
def test_what_the_compiler_refuses_gives_way_to_more_micro_batches(plain):
    step = step_of(memory="1GB", accumulate="auto", max_live_parameters=0)
    state, programs = step.abstract_state(BATCH), step.programs
    batch = step.batches.shapes(BATCH)
    searched = []

    def live(programs, _):
        return measured(programs, state, batch)

    def compiled(programs, budget):
        count = programs.config.num_micro_batches
        searched.append(count)
        num_bytes, temp_bytes = live(programs, budget)
        return (num_bytes if count > 1 else 10**10), temp_bytes

    rates = functools.partial(rates_of, step.mesh)
    fit, chosen = fit_variants(programs, batch, 10**9, rates, compiled, live)
    assert searched[0] == 1
    assert fit.decided == {"accumulate": 2}
    assert chosen.config.accumulate == 2
    assert fit.best.num_bytes < 10**9


@pytest.mark.parametrize("rate", [1e13, 1e7], ids=["fast links", "slow links"])
def test_gathers_run_ahead_if_the_room_is_worth_no_more(monkeypatch, rate):
    monkeypatch.setattr(setup, "platform_of", lambda _: "gpu")  # where gathers run ahead
    step = step_of(memory="1GB", max_live_parameters=0)
    state, programs = step.abstract_state(BATCH), step.programs
    batch = step.batches.shapes(BATCH)

    def rates(config):
        links = dict.fromkeys(("gathered_bytes_per_s", "sent_bytes_per_s"), rate)
        ahead = config.prefetch_bucket is None
        return DeviceRates(flops_per_s=1e10, bytes_per_s=1e9, gathers_beside=ahead, **links)

    def live(programs, _):
        return measured(programs, state, batch)

    config = dataclasses.replace(programs.config, prefetch_bucket=0)
    least = live(dataclasses.replace(programs, config=config), None)[0]
    most = live(programs, None)[0]
    assert least < most
    assert fit_variants(programs, batch, most, rates, live, live)[0].decided == {}
    fit, chosen = fit_variants(programs, batch, least, rates, live, live)
    assert fit.best is not None
    if rate > 1e10:
        assert fit.decided == {"prefetch_bucket": 0}
        assert "The budget decided: prefetch_bucket=0." in fit.notes()
        assert fit.best.seconds == 0
    else:
        assert fit.decided == {}
        assert chosen.config.prefetch_bucket is None
        assert fit.best.seconds > 0


@pytest.mark.slow
def test_a_variant_is_compiled_with_the_options_of_its_own_prefetch(monkeypatch):
    monkeypatch.setattr(setup, "platform_of", lambda _: "gpu")
    step = step_of(memory="1GB", max_live_parameters=0)
    state, programs = step.abstract_state(BATCH), step.programs
    batch = step.batches.shapes(BATCH)
    at_once = dataclasses.replace(programs.config, prefetch_bucket=0)
    least = measured(dataclasses.replace(programs, config=at_once), state, batch)[0]
    seen = []

    def jit(function, *, compiler_options, **options):
        seen.append((function.__self__.config.prefetch_bucket, bool(compiler_options)))
        return jax.jit(function, **options)  # the CPU's compiler knows none of them

    fitter = MemoryFitter(programs, jit)
    monkeypatch.setattr(MemoryFitter, "total_bytes", least)
    with programs.tracing(), contextlib.suppress(ValueError):  # the compiler's figure is another
        fitter.fitted(state, batch)
    assert (0, False) in seen
    assert set(seen) <= {(0, False), (None, True)}


@pytest.mark.slow
def test_a_step_with_room_has_one_micro_batch_and_trains(plain):
    state = plain[0]
    step = step_of(memory="1GB", accumulate="auto", hpz_size="auto")
    step.abstract_state(BATCH)
    assert step.with_config(step.config).config.accumulate == "auto"
    step.lower(state, BATCH)
    assert step.describe().memory.decided == {"accumulate": 1, "hpz_size": 1}


@pytest.mark.slow
def test_secondary_shards_spare_a_slow_link():
    batch = {"tokens": jax.ShapeDtypeStruct((16, 65), "int32")}
    model = Perceptrons(layers=4, width=512, hidden=2048)

    def decided(hosts, **options):
        config = ZeroConfig(hpz_size="auto", **options)
        found = zeroxla.plan(
            model, {"node": hosts, "device": 4}, batch, loss=loss, link="10gbit", config=config
        )
        return found.fit.decided["hpz_size"], found.fit.best

    # The whole leaves, 34 MB, do not fit beside the rest.
    size, best = decided(2, memory="50MB")
    assert size == "node"
    assert best.num_bytes <= 50e6
    assert decided(1, memory="50MB")[0] == 1
    assert decided(2, memory="40MB", offload=Offload(secondary="host"))[0] == "node"
    assert decided(2, memory="1GB", max_live_parameters=0)[0] == "node"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"accumulate": "auto"}, "accumulate='auto': no budget decides it; give memory="),
        ({"accumulate": "many", "memory": "1GB"}, "accumulate='many' must be a whole number"),
        (
            {"accumulate": "auto", "memory": "1GB", "micro_batch": 2},
            "accumulate='auto' with micro_batch=2: the one decides the other",
        ),
        ({"hpz_size": "auto"}, "hpz_size='auto': no budget decides it; give memory="),
        (
            {"hpz_size": "auto", "memory": "1GB", "inter_node_gather": "step"},
            "hpz_size='auto' with inter_node_gather='step', which needs secondary shards",
        ),
        (
            {
                "hpz_size": "auto",
                "memory": "1GB",
                "weight_wire": WireFormat(bits=8),
                "weight_differences": WireFormat(bits=4),
            },
            "hpz_size='auto' with weight_differences, which needs secondary shards",
        ),
    ],
)
def test_what_cannot_be_left_to_a_budget(options, text):
    with pytest.raises(ValueError, match=text):
        ZeroConfig(**options)


def test_micro_batches_of_axes_and_given_ones_are_no_ones_to_decide():
    mesh = zeroxla.make_mesh(nodes=1, devices_per_node=2, tensor=2)
    step = step_of(mesh, memory="1GB", accumulate="auto")
    with pytest.raises(NotImplementedError, match="accumulate='auto' with axes"):
        step.abstract_state(BATCH)
    with pytest.raises(ValueError, match="accumulate='auto' contradict"):
        zeroxla.make_step(
            Perceptrons(),
            zeroxla.make_mesh(nodes=1),
            loss=loss,
            config=ZeroConfig(memory="1GB", accumulate="auto"),
            microbatches=2,
        )
