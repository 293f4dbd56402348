"""The step as users meet it: plans follow the batch, donated state, metrics, other programs."""

import dataclasses
import io

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.reference import Reference, relative_errors, remember_gradients, worst
from tools.zoo import CASES
from tools.zoo.base import leaves, mse, tokens, vectors

import zeroxla
from zeroxla.frontend import adapt

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = zeroxla.ZeroConfig(persistence_threshold=0, unit_elements=200)
KEY = jax.random.key(0)


class Net(nn.Module):
    """Any length of sequence; dropout, batch statistics, and a count of its own traces."""

    traces = 0

    @nn.compact
    def __call__(self, tokens, train):
        x = nn.Embed(64, 8)(tokens)
        x = nn.scan(
            Mixer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=2,
        )(train)(x, None)[0]
        # The fast variance, E x^2 - (E x)^2, of four rows would lose digits on either side.
        x = nn.BatchNorm(use_running_average=not train, use_fast_variance=False)(x.mean(1))
        return nn.Dense(3)(x)

    def loss(self, batch, *, train):
        type(self).traces += 1
        y = self(batch["tokens"], train)
        return jnp.mean(y**2), {"mean": jnp.abs(y).mean()}


class Mixer(nn.Module):
    train: bool

    @nn.compact
    def __call__(self, x, _):
        y = nn.Dropout(0.2, deterministic=not self.train)(nn.tanh(nn.Dense(8)(x)))
        return x + y, None


@pytest.fixture(scope="module")
def net():
    """(step, its model) on (2, 4)."""
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    return zeroxla.make_step(Net(), mesh, optax.sgd(0.1), config=CONFIG)


def reference_of(model, world=8, **options):
    adapted = adapt(model)
    return Reference(init=adapted.init, loss=adapted.loss, world=world, **options)


def copy(state):
    """The state's arrays, out of reach of donation."""
    return jax.tree.map(lambda x: x.copy(), state)


@pytest.mark.slow
@pytest.mark.smoke
def test_the_plan_follows_the_shape_of_the_batch(net):
    """A second shape, then the first again, which is not traced a second time."""
    state = net.init(KEY, tokens(32, length=6))
    gradients = jax.jit(reference_of(Net()).gradients)
    traces = []
    for i, (rows, length) in enumerate([(32, 6), (16, 3), (32, 6), (16, 3)]):
        batch = tokens(rows, length=length)
        params, model_state = zeroxla.full_params(state), jax.device_get(state.model_state)
        state, metrics = net(state, batch)
        loss, own, _, new_state = gradients(params, model_state, state.key, i, batch)
        assert float(metrics["loss"]) == pytest.approx(float(loss), rel=5e-6)
        assert float(metrics["mean"]) == pytest.approx(float(own["mean"]), rel=1e-4)
        assert worst(relative_errors(state.model_state, new_state))[1] < 5e-6
        # The reference's own traces are over: count those of the step.
        before = Net.traces
        net(copy(state), batch)
        traces.append(Net.traces - before)
    assert traces == [0, 0, 0, 0]


def test_evaluation_has_a_plan_of_its_own(net):
    batch = tokens(32, length=6)
    state = net.init(KEY, batch)
    for _ in range(2):
        state, _ = net(state, batch)
    params = zeroxla.full_params(state)
    loss = jax.jit(adapt(Net()).loss, static_argnames="train")
    data = tokens(16, length=4)  # of another shape than the batches of training
    metrics = net.eval(state, data)
    want, own, _ = loss(params, state.model_state, data, KEY, train=False)
    assert set(metrics) == {"loss", "mean"}
    assert float(metrics["loss"]) == pytest.approx(float(want), rel=5e-6)
    assert float(metrics["mean"]) == pytest.approx(float(own["mean"]), rel=1e-4)
    # Evaluation changes nothing: the state is still there, and no dropout was drawn.
    assert float(net.eval(state, data)["loss"]) == float(metrics["loss"])
    net(state, batch)


def test_masked_evaluation_is_the_mean_over_what_counts():
    """Devices have different numbers of rows that count."""

    def loss(p, batch, key):
        counts = batch["mask"]
        total = jnp.sum(counts[:, None] * (batch["x"] @ p["w"]) ** 2)
        return total / jnp.maximum(counts.sum(), 1), {"weight": counts.sum()}

    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    step = zeroxla.make_step((leaves(w=(6, 3)), loss), mesh, optax.sgd(0.1), config=CONFIG)
    batch = {"x": vectors(16)["x"], "mask": (np.arange(16) % 5 < 2).astype(np.float32)}
    state = step.init(KEY, batch)
    expected, _ = loss(zeroxla.full_params(state), batch, KEY)
    assert float(step.eval(state, batch)["loss"]) == pytest.approx(float(expected), rel=5e-6)


@pytest.mark.slow
def test_masked_evaluation_of_a_gpt_is_the_mean_over_what_counts():
    case = CASES["gpt_masked"]
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    step = zeroxla.make_step(case.make(), mesh, optax.sgd(0.1), config=CONFIG)
    batch = case.batch(16)
    state = step.init(KEY, batch)
    loss, _, _ = adapt(case.make()).loss(zeroxla.full_params(state), {}, batch, KEY, train=False)
    assert float(step.eval(state, batch)["loss"]) == pytest.approx(float(loss), rel=5e-6)


def test_the_state_is_donated(net):
    batch = tokens(32, length=6)
    state = net.init(KEY, batch)
    new, _ = net(state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.model_state)))
    assert not any(x.is_deleted() for x in jax.tree.leaves(new))
    with pytest.raises(ValueError, match="deleted by the step"):
        net(state, batch)
    net(new, batch)


def test_the_state_is_split_and_stays_so(net):
    batch = tokens(32, length=6)
    state = net.init(KEY, batch)
    after, _ = net(copy(state), batch)
    for tree in (state, after):
        for array, want in zip(jax.tree.leaves(tree), jax.tree.leaves(net.abstract_state(batch))):
            assert array.sharding.is_equivalent_to(want.sharding, array.ndim)
            assert array.shape == want.shape
            assert array.dtype == want.dtype
    sizes = [x.addressable_shards[0].data.size for x in jax.tree.leaves(state.params)]
    whole = [x.size for x in jax.tree.leaves(zeroxla.full_params(state))]
    for size, elements in zip(sizes, whole):
        assert size < elements or elements < 8
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(zeroxla.full_params(state)))


def test_whole_parameters_compile_nothing(net, caplog):
    state = net.init(KEY, tokens(32, length=6))
    jax.block_until_ready(state.params)
    with jax.log_compiles():
        zeroxla.full_params(state)
    assert not [r for r in caplog.records if r.getMessage().startswith("Compiling")]


def test_init_is_that_of_the_module_on_one_device(net):
    """The random bits are the same; eager, jitted and sharded code round the last bits apart."""
    batch = tokens(32, length=6)
    state = net.init(KEY, batch)
    rows = {"tokens": batch["tokens"][:4]}
    init = jax.jit(lambda rows: Net().init({"params": KEY}, rows, train=True, method="loss"))
    variables = init(rows)
    found = {"params": zeroxla.full_params(state), **state.model_state}
    assert jax.tree.structure(found) == jax.tree.structure(variables)
    assert worst(relative_errors(found, variables))[1] < 1e-6
    # From shapes alone, and from a raw key, too.
    shapes = {"tokens": jax.ShapeDtypeStruct((32, 7), jnp.int32)}
    again = net.init(jax.random.PRNGKey(0), shapes)
    jax.tree.map(np.testing.assert_array_equal, zeroxla.full_params(again), found["params"])
    assert jax.random.key_data(again.key).tolist() == jax.random.key_data(state.key).tolist()


def test_metrics(net):
    batch = tokens(32, length=6)
    state = net.init(KEY, batch)
    _, gradients = net.grad(state, batch)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradients)))
    net = net.with_config(net.config)  # a new step, which has measured no time yet
    state, first = net(state, batch)
    assert set(first) == {"loss", "grad_norm", "finite", "skipped", "mean"}
    assert float(first["grad_norm"]) == pytest.approx(float(norm), rel=5e-6)
    assert bool(first["finite"])
    assert int(first["skipped"]) == 0
    _, second = net(state, batch)
    assert set(second) - set(first) == {"examples_per_s", "tokens_per_s"}
    assert second["tokens_per_s"] == pytest.approx(6 * second["examples_per_s"])


def test_dropout_differs_by_step_and_device_and_repeats_with_the_state(net):
    """Dropout is the only difference between steps here: the learning rate is 0."""
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)

    def loss(p, batch, key):
        drawn = jax.random.uniform(key)
        return drawn + 0 * p["w"].sum(), {"square": drawn**2}

    step = zeroxla.make_step((leaves(w=(8, 2)), loss), mesh, optax.sgd(0.0), config=CONFIG)
    state = step.init(KEY, vectors(8))
    again, metrics = step(copy(state), vectors(8))
    _, same = step(state, vectors(8))
    _, later = step(again, vectors(8))
    assert float(metrics["loss"]) == float(same["loss"]) != float(later["loss"])
    # Eight numbers that differ have a variance: mean of squares above the square of the mean.
    assert float(metrics["square"]) > float(metrics["loss"]) ** 2 + 0.01


@pytest.mark.slow
def test_accumulation_is_the_same_mean():
    """Without dropout or batch statistics, micro-batches only split the sum."""
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    case = CASES["odd_dims"]
    step = zeroxla.make_step(case.make(), mesh, optax.sgd(0.1), config=CONFIG)
    state, batch = step.init(KEY, case.batch(64)), case.batch(64)
    loss, gradients = step.grad(state, batch)
    for accumulate in (2, 4):
        other = step.with_config(dataclasses.replace(CONFIG, accumulate=accumulate))
        other_loss, other_gradients = other.grad(state, batch)
        assert float(other_loss) == pytest.approx(float(loss), rel=1e-6)
        assert worst(relative_errors(other_gradients, gradients))[1] < 1e-6


def test_another_program_for_the_same_state(net):
    batch = tokens(32, length=6)
    state = net.init(KEY, batch)
    other = net.with_config(zeroxla.ZeroConfig())
    assert other.mesh is net.mesh
    assert other.optimizer is net.optimizer
    a, first = net(copy(state), batch)
    b, second = other(copy(state), batch)
    assert float(first["loss"]) == pytest.approx(float(second["loss"]), rel=1e-6)
    assert worst(relative_errors(a.params, b.params))[1] < 1e-6
    a, _ = other(a, batch)  # And back.
    net(a, batch)
    assert {row.unit for row in other.describe().rows} == {"persistent", "kept whole"}


@pytest.mark.slow
def test_gradients_are_those_that_the_optimizer_gets():
    case = CASES["frozen_leaves"]
    mesh = zeroxla.make_mesh(nodes=3, devices_per_node=2)
    config = dataclasses.replace(CONFIG, frozen=case.frozen)
    optimizer = optax.chain(remember_gradients(), optax.sgd(0.1))
    step = zeroxla.make_step(case.make(), mesh, optimizer, config=config)
    state, batch = step.init(KEY, case.batch(12)), case.batch(12)
    params = zeroxla.full_params(state)
    loss, gradients = step.grad(state, batch)
    assert jax.tree.structure(gradients) == jax.tree.structure(params)
    reference = reference_of(case.make(), world=6, is_frozen=config.is_frozen)
    want_loss, _, want, _ = reference.gradients(params, {}, state.key, 0, batch)
    assert float(loss) == pytest.approx(float(want_loss), rel=5e-6)
    assert worst(relative_errors(gradients, want))[1] < 5e-6
    assert float(jnp.abs(gradients["encoder"]["kernel"]).max()) == 0
    after, _ = step(state, batch)
    seen = zip(jax.tree.leaves(after.opt_state[0]), jax.tree.leaves(reference.masked(gradients)))
    for stored, gradient in seen:
        natural = np.asarray(stored)[tuple(map(slice, gradient.shape))]
        np.testing.assert_allclose(natural, gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.smoke
@pytest.mark.parametrize("bad", thinned([np.nan], slow=[np.inf]))
def test_a_gradient_that_is_not_finite_changes_nothing_but_the_counts(bad):
    """One bad row in one device's micro-batch; the next step goes on as if it had not been."""
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    case = CASES["nnx_scan_with_state"]
    config = dataclasses.replace(CONFIG, accumulate=2)
    step = zeroxla.make_step(case.make(), mesh, optax.adam(0.1), config=config)
    good, poisoned = case.batch(64), case.batch(64)
    poisoned["x"][37, 2] = bad
    state, _ = step(step.init(KEY, good), good)
    before = jax.device_get((state.params, state.opt_state, state.model_state))
    state, metrics = step(state, poisoned)
    assert not bool(metrics["finite"])
    assert int(metrics["skipped"]) == 1
    after = jax.device_get((state.params, state.opt_state, state.model_state))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert int(state.step) == 2
    state, metrics = step(state, good)
    assert bool(metrics["finite"])
    assert int(metrics["skipped"]) == 1
    assert not np.array_equal(jax.tree.leaves(state.params)[0], jax.tree.leaves(before[0])[0])


def test_a_batch_in_which_nothing_counts_is_skipped():
    """Its mean is 0 / 0."""

    def loss(p, batch, key):
        weight = batch["mask"].sum()
        total = jnp.sum(batch["mask"][:, None] * (batch["x"] @ p["w"]) ** 2)
        return total / jnp.maximum(weight, 1), {"weight": weight}

    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    step = zeroxla.make_step((leaves(w=(6, 3)), loss), mesh, optax.adam(0.1), config=CONFIG)
    x = vectors(16)["x"]
    state = step.init(KEY, {"x": x, "mask": np.ones(16, np.float32)})
    before = zeroxla.full_params(state)
    state, metrics = step(state, {"x": x, "mask": np.zeros(16, np.float32)})
    assert not bool(metrics["finite"])
    jax.tree.map(np.testing.assert_array_equal, zeroxla.full_params(state), before)
    # One row that counts decides alone, whichever device holds it.
    mask = (np.arange(16) == 11).astype(np.float32)
    state, metrics = step(state, {"x": x, "mask": mask})
    expected = np.sum((x[11] @ before["w"]) ** 2)
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)
    assert bool(metrics["finite"])


def test_describe_lists_every_leaf():
    def loss(p, batch, key):
        def turn(x, w):
            return jnp.tanh(x @ w), None

        x = jnp.tanh(batch["x"] @ p["in"])
        return mse(jax.lax.scan(turn, x, p["layers"])[0] @ p["out"] * p["gain"], batch["y"])

    shapes = {"in": (6, 8), "layers": (3, 8, 8), "out": (8, 3), "gain": (), "unused": (5, 7)}
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    config = zeroxla.ZeroConfig(persistence_threshold=24, unit_elements=48, frozen="^in$")
    step = zeroxla.make_step((leaves(**shapes), loss), mesh, optax.sgd(0.1), config=config)
    with pytest.raises(ValueError, match=r"nothing to describe yet; call step.init"):
        step.describe()
    step.init(KEY, vectors(16))
    table = step.describe()
    rows = {row.path: (row.shape, row.placement, row.unit, row.shard_bytes) for row in table.rows}
    assert rows == {
        "gain": ((), "whole on every device", "kept whole", 4),
        "in": ((6, 8), "dim 1 over 8, frozen", "0", 24),
        "layers": ((3, 8, 8), "dim 1 over 8", "1.0 of a loop", 96),
        "out": ((8, 3), "dim 0 over 8", "persistent", 12),
        "unused": ((5, 7), "dim 1 over 8 (+1 zeros)", "unused", 20),
    }
    assert table.shard_bytes == 4 + 24 + 96 + 12 + 20
    assert table.num_parameters == 1 + 48 + 192 + 24 + 35
    text = str(table)
    for word in ("300 parameters on 2 node(s) x 4 device(s)", "3x8x8", "scalar", "+1 zeros"):
        assert word in text, text
    # In a narrow terminal paths take several lines, and numbers stay whole.
    paths = (dataclasses.replace(row, path=f"{row.path}/" * 20) for row in table.rows)
    console = Console(width=80, file=io.StringIO())
    console.print(dataclasses.replace(table, rows=tuple(paths)).table())
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert sum(line.endswith((" 4 │", "24 │", "96 │", "12 │", "20 │")) for line in lines) == 5


def test_a_step_lowers_from_shapes(net):
    batch = {"tokens": jax.ShapeDtypeStruct((32, 7), jnp.int32)}
    lowered = net.lower(net.abstract_state(batch), batch)
    assert lowered.as_text().count("stablehlo.all_gather") >= 4
    compiled = lowered.compile()
    state, data = net.init(KEY, tokens(32, length=6)), tokens(32, length=6)
    data = jax.device_put(data, jax.tree.leaves(compiled.input_shardings[0])[-1])
    _, metrics = compiled(copy(state), data)
    assert float(metrics["loss"]) == pytest.approx(float(net(state, data)[1]["loss"]), rel=1e-6)


def test_batches_of_other_dtypes_and_places(net):
    """int64 and lists of arrays from NumPy, arrays on one device, arrays already split."""
    batch = tokens(32, length=6)
    state = net.init(KEY, batch)
    want = float(net.eval(state, batch)["loss"])
    wide = {"tokens": batch["tokens"].astype(np.int64)}
    assert float(net.eval(state, wide)["loss"]) == want
    assert float(net.eval(state, jax.tree.map(jnp.asarray, batch))["loss"]) == want
    explicit = jax.make_mesh((2, 4), ("node", "device"))
    rows = jax.sharding.PartitionSpec(("node", "device"))
    split = jax.device_put(batch, jax.sharding.NamedSharding(explicit, rows))
    assert float(net.eval(state, split)["loss"]) == want
    net.lower(net.abstract_state(wide), wide)
    net.init(KEY, split)


def test_a_users_explicit_mesh_is_accepted():
    mesh = jax.make_mesh((2, 4), ("node", "device"))  # Explicit axes by default.
    case = CASES["odd_dims"]
    with jax.set_mesh(mesh):
        step = zeroxla.make_step(case.make(), mesh, optax.sgd(0.1), config=CONFIG)
        state, metrics = step(step.init(KEY, case.batch(16)), case.batch(16))
        step.eval(state, case.batch(16))
    auto = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    other = zeroxla.make_step(case.make(), auto, optax.sgd(0.1), config=CONFIG)
    _, want = other(other.init(KEY, case.batch(16)), case.batch(16))
    assert float(metrics["loss"]) == pytest.approx(float(want["loss"]), rel=1e-6)


def test_tokens_of_any_rank_train():
    """Only [B, L + 1] tokens have a rate."""

    def loss(p, batch, key):
        return jnp.mean(p["table"][batch["tokens"]] ** 2)

    mesh = zeroxla.make_mesh(nodes=1)
    step = zeroxla.make_step((leaves(table=(64, 8)), loss), mesh, optax.sgd(0.1))
    for shape in ((8,), (8, 2, 5)):
        batch = {"tokens": np.zeros(shape, np.int32)}
        state = step.init(KEY, batch)
        for _ in range(2):
            state, metrics = step(state, batch)
        assert "examples_per_s" in metrics
        assert "tokens_per_s" not in metrics
