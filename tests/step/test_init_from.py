"""Training begins from whole arrays of any kind: the state holds their values, to the bit."""

import gc
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tools.disk import on_disk
from tools.lora import lora_step
from tools.offload import assert_same
from tools.pipelines import step_of
from tools.quick import quick_collection, quick_compilation, thinned  # noqa: F401
from tools.zoo import CASES
from tools.zoo.base import mse, tokens, vectors

import zeroxla
from zeroxla import Offload, Pipeline, ZeroConfig
from zeroxla.mesh.processes.same_program import ProgramCalls
from zeroxla.models import GPT
from zeroxla.step.disk.writer import DiskWriter

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(0)
BATCH = vectors(8)


class Net(nn.Module):
    """Seven, nine and one elements divide over no devices."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(65, name="wide")(x))
        x = nn.tanh(nn.Dense(7, name="odd")(x))
        return nn.Dense(3, name="head")(x) * self.param("gain", nn.initializers.ones, ())

    def loss(self, batch, *, train):
        return mse(self(batch["x"]), batch["y"])


def arrays(seed=0):
    """Return parameters of `Net` as float32 NumPy arrays."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(Net().init, KEY, BATCH["x"])["params"]
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)


@pytest.fixture(scope="module")
def step(mesh24):
    step = zeroxla.make_step(
        Net(), mesh24, optax.adam(1e-2), config=ZeroConfig(persistence_threshold=0)
    )
    step.abstract_state(BATCH)
    return step


def flat(tree):
    return {
        jax.tree_util.keystr(p, simple=True, separator="/"): x
        for p, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def on_mesh(mesh, spec):
    """Return a function that splits the first dim of an array where that can be."""

    def put(x):
        fits = x.ndim and x.shape[0] % mesh.size == 0
        return jax.device_put(x, NamedSharding(mesh, spec if fits else PartitionSpec()))

    return lambda tree: jax.tree.map(put, tree)


class Indexed:
    """An array that is read in parts."""

    def __init__(self, x):
        self.x, self.shape, self.dtype, self.read = x, x.shape, x.dtype, []

    def __getitem__(self, index):
        self.read.append(self.x[index].size)
        return self.x[index]


KINDS = {
    "NumPy": lambda mesh: lambda tree: tree,
    "float64": lambda mesh: lambda tree: jax.tree.map(np.float64, tree),
    "variables": lambda mesh: lambda tree: {"params": tree},
    "JAX": lambda mesh: lambda tree: jax.tree.map(jnp.asarray, tree),
    "replicated": lambda mesh: on_mesh(mesh, PartitionSpec()),
    "split": lambda mesh: on_mesh(mesh, PartitionSpec(("node", "device"))),
    "a mesh of the same devices": lambda mesh: on_mesh(
        jax.make_mesh((4, 2), ("x", "y")), PartitionSpec(("y", "x"))
    ),
    "another mesh": lambda mesh: on_mesh(
        jax.make_mesh((2,), ("x",), devices=jax.devices()[6:]), PartitionSpec("x")
    ),
    "a function a leaf": lambda mesh: lambda tree: jax.tree.map(lambda x: lambda: x, tree),
    "one function": lambda mesh: lambda tree: lambda name, shape: flat(tree)[name].reshape(shape),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_has_the_values_that_were_given(kind, step, mesh24):
    natural = arrays()
    state = step.init_from(KINDS[kind](mesh24)(natural), KEY)
    assert_same(zeroxla.full_params(state), natural)
    found = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state.params)
    assert found == jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), step.shapes().params)


def test_rounded_dtypes_become_float32(step):
    natural = arrays()
    natural["wide"] = jax.tree.map(lambda x: x.astype(np.float16), natural["wide"])
    natural["odd"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), natural["odd"])
    state = step.init_from(natural, KEY)
    expected = jax.tree.map(lambda x: x.astype(np.float32), natural)
    assert_same(zeroxla.full_params(state), expected)


@pytest.mark.parametrize("preset", ["zeropp_min", "zero3", "zeropp", "zeropp_hq"])
@pytest.mark.slow
def test_the_rest_is_as_init_makes_it(preset, mesh24):
    """Optimizer state, random key, kept copies of the weights and errors of gradients."""
    config = getattr(ZeroConfig, preset)(persistence_threshold=0, quantize_threshold=0)
    step = zeroxla.make_step(Net(), mesh24, optax.adam(1e-2), config=config)
    state = step.init(KEY, BATCH)
    again = zeroxla.init_from(step, zeroxla.full_params(state), KEY, BATCH)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    by_key = [
        [
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            for x in jax.tree.leaves(each)
        ]
        for each in (again, state)
    ]
    assert_same(*by_key)
    losses = [float(step(each, BATCH)[1]["loss"]) for each in (again, state)]
    assert losses[0] == losses[1]


def test_what_was_given_stays_as_it_is(step, mesh24):
    natural = arrays()
    copies = jax.tree.map(np.copy, natural)
    stored = step.init_from(natural, KEY).params
    given = [natural, jax.tree.map(jnp.asarray, natural), stored]
    given.append(jax.tree.map(lambda x: lambda: x, stored))
    for each in given:
        state, _ = step(step.init_from(each, KEY), BATCH)
        jax.block_until_ready(state)
    assert_same(natural, copies)
    assert not any(x.is_deleted() for x in jax.tree.leaves((given[1], stored)))
    assert_same(given[1], copies)


def test_arrays_are_donated_if_told_so(step):
    natural = arrays()
    whole = jax.tree.map(jnp.asarray, natural)
    stored = step.init_from(whole, KEY, donate=True).params
    assert all(x.is_deleted() for x in jax.tree.leaves(whole))
    state = step.init_from(stored, KEY, donate=True)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (state.params, stored)), strict=True))
    assert_same(zeroxla.full_params(state), natural)


@pytest.mark.usefixtures("quick_collection")
def test_one_leaf_is_there_at_a_time(step):
    """A function's array is gone when the next one is called; arrays are read in parts."""
    alive, most = [], []

    def read(name, shape):
        gc.collect()
        most.append(sum(x() is not None for x in alive))
        x = np.zeros(shape, np.float64)
        alive.append(weakref.ref(x))
        return x

    step.init_from(read, KEY)
    assert len(most) == 7
    assert max(most) == 0
    indexed = jax.tree.map(Indexed, natural := arrays())
    assert_same(zeroxla.full_params(step.init_from(indexed, KEY)), natural)
    kernel = indexed["wide"]["kernel"]
    assert max(kernel.read) <= -(-kernel.x.size // 8) + 6  # 65 columns in 8 parts, padded


@pytest.mark.slow
def test_batch_statistics_come_with_the_variables(mesh24):
    case = CASES["batchnorm"]
    batch = case.batch(64)
    step = zeroxla.make_step(case.make(), mesh24, optax.sgd(0.1))
    state, _ = step(step.init(KEY, batch), batch)
    params = zeroxla.full_params(state)
    variables = {"params": params, **jax.tree.map(np.asarray, state.model_state)}
    for again in (
        step.init_from(variables, KEY),
        step.init_from(params, KEY, model_state=state.model_state),
    ):
        assert_same(again.params, state.params)
        assert_same(again.model_state, state.model_state)
        assert step.eval(again, batch)["loss"] == step.eval(state, batch)["loss"]
    fresh = step.init(KEY, batch).model_state
    with pytest.warns(UserWarning, match="it starts fresh"):
        assert_same(step.init_from({"params": params}, KEY, batch).model_state, fresh)
    with pytest.raises(ValueError, match="leave out one"):
        step.init_from(variables, KEY, model_state=state.model_state)
    del variables["batch_stats"]["BatchNorm_0"]["mean"]
    words = r"batch_stats/BatchNorm_0/mean \(float32\[4\]\) is missing"
    with pytest.raises(ValueError, match=words):
        step.init_from(variables, KEY)


def test_nnx_modules_and_states(mesh24):
    case = CASES["nnx_batchnorm"]
    batch = case.batch(64)
    step = zeroxla.make_step(case.make(), mesh24, optax.sgd(0.1))
    module = case.make()(nnx.Rngs(5))
    expected = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    state = step.init_from(module, KEY, batch)
    assert_same(zeroxla.full_params(state), expected)
    assert_same(state.model_state["table"], module.table)
    state, _ = step(state, batch)
    assert not module.head.kernel.get_raw_value().is_deleted()
    again = step.init_from(nnx.state(module), KEY)
    assert_same(zeroxla.full_params(again), expected)


def test_a_pair_has_its_own_tree(mesh24):
    model = (
        lambda key, batch: [jnp.zeros((6, 5)), {"out": jnp.zeros((5, 3))}],
        lambda params, batch, key: mse(batch["x"] @ params[0] @ params[1]["out"], batch["y"]),
    )
    step = zeroxla.make_step(model, mesh24, optax.sgd(0.1))
    rng = np.random.default_rng(0)
    given = [rng.normal(size=(6, 5)), {"out": rng.normal(size=(5, 3)).astype(np.float32)}]
    state = step.init_from(given, KEY, BATCH)
    assert_same(state.params["1"]["out"][:5, :3], given[1]["out"])
    loss = float(step.eval(state, BATCH)["loss"])
    assert loss == pytest.approx(float(model[1](given, BATCH, KEY)), rel=1e-5)


class Square(nn.Module):
    """A dense leaf with as many elements as a wire needs."""

    @nn.compact
    def __call__(self, x):
        for name in ("up", "square"):
            x = nn.tanh(nn.Dense(64, name=name)(x))
        return nn.Dense(3, name="head")(x)

    def loss(self, batch, *, train):
        return mse(self(batch["x"]), batch["y"])


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [None, "int8", "int4"])
def test_adapters_begin_beside_given_weights(frozen, mesh24):
    lora, step = lora_step(Square(), mesh24, "square/kernel", frozen=frozen)
    expected = step.init(KEY, BATCH)
    plain = zeroxla.make_step(Square(), mesh24)
    own = plain.init(KEY, BATCH)  # the base draws the same bits from the same key
    params = zeroxla.full_params(own)
    for given in ({"params": params}, own.params):
        assert_same(step.init_from(given, KEY).params, expected.params)
    if frozen is None:
        assert_same(zeroxla.full_params(expected)["base"], params)
    # Base and adapters together, the base as it is stored and as floats.
    whole = zeroxla.full_params(expected)
    for base in (whole["base"], params):
        again = step.init_from({"base": base, "lora": whole["lora"]}, jax.random.key(9))
        assert_same(again.params, expected.params)
    with pytest.raises(ValueError, match=r"square/kernel .float32\[64, 64\]. is missing"):
        lora.init_from(step, {"up": params["up"]}, KEY)


@pytest.mark.slow
@pytest.mark.parametrize("as_function", [False, True])
def test_stages_take_their_layers(as_function):
    model, batch = GPT.tiny(layers=4), tokens(8)
    step = step_of(Pipeline.from_model(model), 2, 1, 2, 2)
    params = jax.tree.map(np.asarray, model.init(jax.random.key(5), batch["tokens"])["params"])
    given = (lambda name, shape: flat(params)[name]) if as_function else params
    state = step.init_from(given, KEY, batch)
    assert_same(zeroxla.full_params(state), params)
    assert "pipe" in str(jax.tree.map(lambda x: x.sharding.spec, state.params))
    plain = zeroxla.make_step(model, zeroxla.make_mesh(nodes=1), optax.sgd(0.1))
    loss = plain.eval(plain.init_from(params, KEY, batch), batch)["loss"]
    assert float(step.eval(state, batch)["loss"]) == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize("place", thinned([], slow=["disk", "host"]))
def test_offloaded_parameters(place, mesh24, tmp_path, monkeypatch):
    path = {"path": tmp_path} if place == "disk" else {}
    offload = Offload(optimizer=place, params=place, **path)
    config = ZeroConfig(persistence_threshold=0, offload=offload)
    step = zeroxla.make_step(Net(), mesh24, optax.adam(1e-2), config=config)
    moves, write = [], DiskWriter.write

    def read(name, shape):
        moves.append("read")
        return flat(natural)[name]

    def write_leaf(self, i, array):
        moves.append("write")
        write(self, i, array)

    monkeypatch.setattr(DiskWriter, "write", write_leaf)
    natural = arrays()
    state = step.init_from(read, KEY, BATCH)
    assert_same(zeroxla.full_params(state), natural)
    if place == "disk":
        assert "readwrite" * 3 in "".join(moves)
        assert len(on_disk(state.params)) >= 3
    else:
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.params) if x.size > 64}
        assert kinds == {"pinned_host"}
    plain = zeroxla.make_step(Net(), mesh24, optax.adam(1e-2), config=ZeroConfig())
    losses = [float(plain(plain.init_from(natural, KEY, BATCH), BATCH)[1]["loss"])]
    again = step.init_from(state.params, KEY)  # from the disk to the disk
    assert_same(zeroxla.full_params(again), natural)
    assert float(step(again, BATCH)[1]["loss"]) == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.slow
def test_states_of_another_mesh(step):
    other = zeroxla.make_step(Net(), zeroxla.make_mesh(nodes=1, devices_per_node=3))
    natural = arrays()
    padded = other.init_from(natural, KEY, vectors(6)).params
    assert padded["wide"]["bias"].shape == (66,)
    assert_same(zeroxla.full_params(step.init_from(padded, KEY)), natural)


def test_every_leaf_that_does_not_fit_is_named(step, monkeypatch):
    calls = []
    monkeypatch.setattr(ProgramCalls, "__call__", lambda *args: calls.append(args))
    given = arrays()
    given["odd"]["kernel"] = given["odd"]["kernel"].T
    given["odd"]["bias"] = np.ones(7, np.int64)
    given["wide"]["bias"] = np.ones(72, np.float32)  # the padded shape, of NumPy
    given["Wide"] = {"kernel": given["wide"].pop("kernel")}
    with pytest.raises(ValueError, match="the weights are not of this model") as caught:
        step.init_from(given, KEY)
    assert str(caught.value).splitlines()[1:-1] == [
        "  odd/bias is int64[7], and the model has float32[7]",
        "  odd/kernel is float32[7, 65], and the model has float32[65, 7]",
        "  wide/bias is float32[72], and the model has float32[65]",
        "  wide/kernel (float32[6, 65]) is missing",
        "  Wide/kernel (float32[6, 65]) is not in the model",
    ]
    assert not calls
    with pytest.raises(ValueError, match=r"float64\[8, 3\], and the model has float32\[7, 3\]"):
        step.init_from(lambda name, shape: np.ones([n + (n == 7) for n in shape]), KEY)
    assert not calls


def test_what_is_beyond_a_leaf_must_be_padding(step, mesh24):
    """Unless the array is split as this step splits the leaf, as no other is."""
    natural = arrays()
    for spec in (("node", "device"), ("device", "node")):
        sharding = NamedSharding(mesh24, PartitionSpec(spec))
        wide = {**natural["wide"], "bias": jnp.ones(72, device=sharding)}
        given = {**natural, "wide": wide}
        if spec == ("node", "device"):
            words = r"wide/bias is float32\[72\].* not the zeros of padding"
            with pytest.raises(ValueError, match=words):
                step.init_from(given, KEY)
        else:
            found = zeroxla.full_params(step.init_from(given, KEY))["wide"]["bias"]
            assert_same(found, np.ones(65))


def test_a_state_is_given_in_its_parts(step):
    state = step.init_from(arrays(), KEY)
    with pytest.raises(ValueError, match=r"is a TrainState; give its parts"):
        step.init_from(state, KEY)


def test_a_batch_is_needed_once(mesh24):
    step = zeroxla.make_step(Net(), mesh24)
    with pytest.raises(ValueError, match="the step has seen no batch"):
        step.init_from(arrays(), KEY)
    with pytest.raises(ValueError, match="does not divide over 8 devices"):
        step.init_from(arrays(), KEY, vectors(7))
