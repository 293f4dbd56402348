"""A memory budget: the step fits it by the compiler's figure, and computes what it did."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.reference import relative_errors, worst

import zeroxla
from zeroxla import Offload, ZeroConfig
from zeroxla.fetch.keeping.budget import ActivationBudget
from zeroxla.fetch.keeping.places import PlaceFinder
from zeroxla.fetch.keeping.residual_graph import DeviceRates
from zeroxla.mesh.machines import Machines
from zeroxla.models import GPT, MLP
from zeroxla.step.memory.device_facts import rates_with

LENGTH = 64
BATCH = {"tokens": np.random.default_rng(0).integers(0, 64, (16, LENGTH + 1), np.int32)}
ROUNDING = 5e-6

pytestmark = pytest.mark.usefixtures("quick_compilation")


def gpt(**options):
    return GPT(vocab=64, length=LENGTH, layers=2, width=32, heads=4, **options)


class Layer(nn.Module):
    """A product whose result is a quarter of what the layer computes on the way."""

    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(128, use_bias=False)(x)
        for _ in range(2):
            y = jnp.sin(jnp.tanh(y))
        return x + nn.Dense(32, use_bias=False)(y), None


class Perceptron(nn.Module):
    """The least model that has something to compute again: two scanned layers."""

    remat: bool = False

    @nn.compact
    def loss(self, batch, *, train):
        x = nn.Embed(64, 32)(batch["tokens"][:, :-1])
        layers = nn.scan(
            nn.remat(Layer) if self.remat else Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        x, _ = layers(name="layers")(x, None)
        return jnp.mean(x**2)


MODELS = {
    "perceptron": Perceptron,
    "scanned": lambda: gpt(scan=True),
    "written out": lambda: gpt(scan=False),
}


def step_of(model, **options):
    config = ZeroConfig(persistence_threshold=0, **options)
    return zeroxla.make_step(model, zeroxla.make_mesh(nodes=2), optax.sgd(0.1), config=config)


def bytes_of(step):
    program = step.lower(step.abstract_state(BATCH), BATCH).compile()
    return zeroxla.inspect.memory(program)


@pytest.fixture(scope="module", params=thinned(["perceptron"], slow=["scanned", "written out"]))
def plain(request):
    """A model, its step without a budget, a state, its gradients, and what it takes."""
    model = MODELS[request.param]()
    step = step_of(model)
    state = step.init(jax.random.key(0), BATCH)
    return model, step, state, step.grad(state, BATCH), bytes_of(step)


@pytest.mark.parametrize("share", [0.75, pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_step_fits_and_computes_the_same(plain, share):
    model, _, state, (loss, gradients), taken = plain
    budget = taken.total_bytes - int((1 - share) * taken.temp_bytes)
    step = step_of(model, memory=budget)
    step.init(jax.random.key(0), BATCH)
    found_loss, found = step.grad(state, BATCH)
    assert bytes_of(step).total_bytes <= budget
    assert abs(float(found_loss - loss)) <= 1e-6 * float(loss)
    assert worst(relative_errors(found, gradients))[1] < ROUNDING
    fit = step.describe().memory
    assert fit.best.num_bytes <= budget < fit.tries[0].num_bytes
    assert fit.best.keeping.flops > 0
    assert any("computes" in note and "again" in note for note in fit.notes())


def test_a_budget_that_needs_nothing_gives_the_program_without_one(plain):
    model, _, state, (loss, gradients), taken = plain
    step = step_of(model, memory=taken.total_bytes, max_live_parameters=0)
    step.init(jax.random.key(0), BATCH)
    found_loss, found = step.grad(state, BATCH)
    assert float(found_loss) == float(loss)
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(gradients)))
    assert len(step.describe().memory.tries) == 1


def test_gathered_leaves_stay_where_there_is_room(plain):
    model, own, state, (loss, gradients), taken = plain
    gathered = zeroxla.inspect.comms(own.lower(state, BATCH), own.mesh).total_bytes(phase="gather")
    step = step_of(model, memory="1GB")
    step.init(jax.random.key(0), BATCH)
    found_loss, found = step.grad(state, BATCH)
    assert float(found_loss) == float(loss)
    assert worst(relative_errors(found, gradients))[1] < ROUNDING
    lowered = step.lower(state, BATCH)
    once = zeroxla.inspect.comms(lowered, step.mesh).total_bytes(phase="gather")
    assert once <= 0.55 * gathered  # backward gathers nothing
    reused = step.describe().memory.best.keeping.reused
    assert reused.again_bytes == 0
    assert reused.num_bytes > 0
    more = zeroxla.inspect.memory(lowered.compile()).temp_bytes - taken.temp_bytes
    assert 0 < more <= 1.5 * reused.num_bytes  # in loops the compiler copies some


def test_what_cannot_fit_is_refused_with_the_least_that_can(plain):
    model, _, state, _, taken = plain
    step = step_of(model, memory=taken.total_bytes - taken.temp_bytes)
    with pytest.raises(ValueError, match=r"a step of 16 rows on 8 devices takes .* at least"):
        step(state, BATCH)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state.params))


@pytest.mark.slow
def test_the_pieces_of_a_block_run_twice_where_nothing_else_fits():
    own = step_of(gpt(scan=True).clone(layers=8))
    state = own.init(jax.random.key(0), BATCH)
    loss, gradients = own.grad(state, BATCH)
    taken = bytes_of(own)
    budget = taken.total_bytes - int(0.85 * taken.temp_bytes)
    step = step_of(gpt(scan=True).clone(layers=8), memory=budget)
    step.init(jax.random.key(0), BATCH)
    found_loss, found = step.grad(state, BATCH)
    best = step.describe().memory.best
    assert best.keeping.twice_flops > 0
    assert abs(float(found_loss - loss)) <= 1e-6 * float(loss)
    assert worst(relative_errors(found, gradients))[1] < ROUNDING


def test_values_may_wait_on_the_host(plain):
    _, step, state, (loss, gradients), _ = plain
    free = ActivationBudget(finder=PlaceFinder(DeviceRates(host_bytes_per_s=1e20)), limit=0.0)
    programs = dataclasses.replace(step.programs, activations=free)
    with programs.tracing():
        found_loss, found = jax.jit(programs.gradients)(state, BATCH)
        text = str(jax.make_jaxpr(programs.gradients)(state, BATCH))
    assert free.newest.host_bytes > 2 * free.newest.kept_bytes
    assert "Space.Host" in text or "<host>" in text
    assert abs(float(found_loss - loss)) <= 1e-6 * float(loss)
    assert worst(relative_errors(found, gradients))[1] < ROUNDING


def test_a_slow_link_to_the_host_is_left_alone_where_computing_again_will_do(plain):
    _, step, state, _, _ = plain

    def chosen(limit, **rates):
        budget = ActivationBudget(finder=PlaceFinder(DeviceRates(**rates)), limit=limit)
        programs = dataclasses.replace(step.programs, activations=budget)
        with programs.tracing():
            jax.eval_shape(programs.gradients, state, BATCH)
        return budget.newest

    least = chosen(0.0)
    assert least.host_bytes == 0
    assert chosen(least.num_bytes, host_bytes_per_s=1e3).host_bytes == 0
    assert chosen(least.num_bytes, host_bytes_per_s=1e20).host_bytes > 0


def test_remat_of_the_model_is_replaced(plain):
    model, _, state, (loss, gradients), _ = plain
    step = step_of(model.clone(remat=True), memory="1GB", remat="replace", max_live_parameters=0)
    step.init(jax.random.key(0), BATCH)
    found_loss, found = step.grad(state, BATCH)
    assert float(found_loss) == float(loss)
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(gradients)))


@pytest.mark.slow
def test_remat_of_the_model_is_respected_and_refined():
    own = step_of(gpt(remat=True))
    state = own.init(jax.random.key(0), BATCH)
    loss, gradients = own.grad(state, BATCH)
    step = step_of(gpt(remat=True), memory=bytes_of(own).total_bytes - 10_000)
    step.init(jax.random.key(0), BATCH)
    found_loss, found = step.grad(state, BATCH)
    assert step.describe().memory.best.keeping is not None
    assert abs(float(found_loss - loss)) <= 1e-6 * float(loss)
    assert worst(relative_errors(found, gradients))[1] < ROUNDING


def test_each_shape_of_a_batch_is_fitted():
    def loss(params, batch, key):
        return jnp.mean(jnp.tanh(batch["x"] @ params["w"]) ** 2)

    step = step_of((lambda key, batch: {"w": jnp.ones((8, 64))}, loss), memory="1GB")
    batch = {"x": np.ones((1024, 8), np.float32)}
    state, _ = step(step.init(jax.random.key(0), batch), batch)
    longer = step.describe().memory
    step(state, {"x": batch["x"][:512]})
    assert step.describe().memory.best.num_bytes < longer.best.num_bytes


@pytest.mark.smoke
def test_a_leaf_is_gathered_again_at_the_rate_of_the_slowest_link():
    machines = Machines.load()
    h100, slow = machines.find_device("h100"), machines.find_link("10mbit")
    links = {"node": slow, "device": machines.find_link(h100.link)}
    to_host, two = machines.find_link(h100.host_link), {"node": 2, "device": 8}
    rates = rates_with(h100, links, to_host, two, ZeroConfig())
    assert rates.gathered_bytes_per_s == pytest.approx(10e6 / 8 / 8)  # 8 devices share it
    assert rates.host_bytes_per_s is None
    assert rates.gathers_beside
    one_node = rates_with(h100, links, to_host, {"node": 1, "device": 8}, ZeroConfig())
    within = rates_with(h100, links, to_host, two, ZeroConfig(hpz_size="node", prefetch_bucket=0))
    assert within.gathered_bytes_per_s == links["device"].bytes_per_s
    assert one_node.gathered_bytes_per_s == links["device"].bytes_per_s
    assert not within.gathers_beside


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ("24GB", 24 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("512mib", 2**29),
        (1e9, 10**9),
        (12345, 12345),
        ("device", "device"),
        (None, None),
    ],
)
def test_amounts_of_memory(memory, expected):
    assert ZeroConfig(memory=memory).memory == expected


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"memory": "much"}, r"memory='much' is no amount of memory; give bytes"),
        ({"memory": "24 XB"}, "is no amount of memory"),
        ({"memory": 0}, "memory=0 is no amount"),
        ({"memory": -1.0}, "is no amount"),
        ({"memory": True}, "is no amount"),
        ({"memory": float("inf")}, "is no amount"),
        ({"memory": "1GB", "remat": "never"}, "remat='never' is neither 'respect' nor 'replace'"),
        ({"remat": "replace"}, "remat='replace': without effect, no budget decides"),
        ({"offload": Offload(activations="host")}, "without effect, no budget decides"),
        (
            {"memory": "1GB", "offload": Offload(optimizer="disk", path="x")},
            "memory=1000000000 with a state on disk",
        ),
    ],
)
def test_bad_options_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        ZeroConfig(**options)


def test_a_device_that_does_not_say_how_much_it_has_is_refused():
    batch = {"image": np.zeros((8, 28, 28), np.float32), "label": np.zeros(8, np.int32)}
    step = zeroxla.make_step(
        MLP.tiny(), zeroxla.make_mesh(nodes=1), config=ZeroConfig(memory="device")
    )
    state = step.init(jax.random.key(0), batch)
    with pytest.raises(ValueError, match=r"memory='device': a device of kind .* give an amount"):
        step(state, batch)
