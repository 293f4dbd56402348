"""ZeRO++ on whole models: what it computes, what it keeps, how it changes from step to step."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.wire import as_it_arrives
from tools.zoo.base import leaves, mse, vectors

import zeroxla
from zeroxla import Checkpointer, Feedback, WireFormat, ZeroConfig
from zeroxla.frontend import adapt
from zeroxla.models import GPT
from zeroxla.wire.error_feedback import quantize_with_error

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(0)
ALL = {"persistence_threshold": 0, "quantize_threshold": 500}
INT8, INT4 = WireFormat(bits=8, block=64), WireFormat(bits=4, block=64)
MODELS = {
    "scanned, remat": GPT.tiny(scan=True, remat=True),
    "scanned": GPT.tiny(scan=True),
    "unrolled": GPT.tiny(scan=False),
}


def products(params, batch, key):
    """The loss of two scanned layers between a table and a head."""
    x = params["table"][batch["tokens"][:, :-1]]
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return jnp.mean((x * params["gain"] @ params["head"]) ** 2)


LEAST = leaves(table=(64, 32), layers=(2, 32, 32), gain=(32,), head=(32, 64)), products


def tokens(rows=16, seed=0):
    return {"tokens": np.random.default_rng(seed).integers(0, 64, (rows, 17), dtype=np.int32)}


@functools.cache
def mesh(nodes=2, devices=4):
    return zeroxla.make_mesh(nodes=nodes, devices_per_node=devices)


def step_of(model, on=None, optimizer=None, **options):
    config = ZeroConfig(**{**ALL, **options})
    return zeroxla.make_step(model, on or mesh(), optimizer or optax.adam(1e-2), config=config)


def gradients(step, batch):
    state = step.init(KEY, batch)
    loss, grads = step.grad(state, batch)
    return float(loss), jax.device_get(grads)


def assert_equal_trees(a, b, rtol=2e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        scale = max(np.abs(np.asarray(y)).max(), 1e-3)
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * scale)


# qwZ


@pytest.mark.parametrize("name", thinned(["least"], slow=MODELS))
def test_gradients_are_those_of_the_quantized_weights(name):
    """One device, `jax.grad`, the weights as the oracle quantizes each layer of each shard."""
    model, batch = {**MODELS, "least": LEAST}[name], tokens()
    step = step_of(model, weight_wire=INT8, hpz_size="node")
    state = step.init(KEY, batch)
    loss, grads = step.grad(state, batch)

    layout = step.programs.layout(state)
    num_quantized = sum(leaf.quantized for leaf in layout)
    assert (2 if name == "least" else 4) <= num_quantized < len(layout.leaves)
    params = [
        as_it_arrives(x, leaf.placement, 8, INT8) if leaf.quantized else x
        for x, leaf in zip(jax.tree.leaves(zeroxla.full_params(state)), layout, strict=True)
    ]
    adapted = adapt(model)

    def mean_loss(params):
        return adapted.loss(params, state.model_state, batch, KEY, train=True)[0]

    expected = jax.value_and_grad(mean_loss)(layout.tree.unflatten(params))
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    assert_equal_trees(grads, expected[1])


# hpZ (tests/tools/equality.py has it without quantization, for every model of the zoo)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_secondary_shards_change_nothing_in_any_form(name):
    model, batch = MODELS[name], tokens(32)
    plain = gradients(step_of(model, accumulate=2, weight_wire=INT8), batch)
    for options in (
        {"hpz_size": "node"},
        {"hpz_size": 2, "secondary": "wire"},
        {"hpz_size": "node", "secondary": "wire", "inter_node_gather": "step"},
    ):
        found = gradients(step_of(model, accumulate=2, weight_wire=INT8, **options), batch)
        assert found[0] == pytest.approx(plain[0], rel=1e-6)
        assert_equal_trees(found[1], plain[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scanned", "unrolled"])
def test_forward_and_backward_round_a_weight_alike(name):
    """Stochastically: gathered again or kept, it is the same weight; and another one next step."""
    options = {"weight_wire": WireFormat(bits=4, block=64, rounding="stochastic")}
    again, kept = (step_of(MODELS[name], **options, **more) for more in ({}, {"hpz_size": "node"}))
    state = again.init(KEY, tokens())
    (loss, first), (_, second) = again.grad(state, tokens()), kept.grad(state, tokens())
    assert_equal_trees(jax.device_get(first), jax.device_get(second))
    later = dataclasses.replace(state, step=state.step + 1)
    assert float(again.grad(later, tokens())[0]) != float(loss)


@pytest.mark.parametrize(
    ("width", "num_layers", "hpz_size"),
    [
        *thinned([], slow=[(128, 2, 4), (128, 2, 2), (128, 2, 1)], rows=True),
        *(
            pytest.param(1024, layers, size, marks=pytest.mark.full)
            for layers in (4, 9)
            for size in (1, 2, 4)
        ),
    ],
)
def test_the_sweep_of_deepspeeds_own_test(width, num_layers, hpz_size):
    """Square dense layers, a cross-entropy loss, all three parts on."""

    def loss(params, batch, key):
        x = batch["x"]
        for i in range(num_layers):
            x = x @ params[f"w{i}"] + params[f"b{i}"]
        return optax.softmax_cross_entropy_with_integer_labels(x, batch["y"]).mean()

    shapes = {f"w{i}": (width, width) for i in range(num_layers)}
    shapes |= {f"b{i}": (width,) for i in range(num_layers)}
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(16, width)).astype(np.float32),
        "y": rng.integers(0, width, 16).astype(np.int32),
    }
    config = ZeroConfig.zeropp(persistence_threshold=0, hpz_size=hpz_size)
    step = zeroxla.make_step((leaves(**shapes), loss), mesh(), optax.adam(1e-3), config=config)
    state = step.init(KEY, batch)
    kept = step.describe().secondary_bytes
    assert (kept > 0) == (hpz_size > 1)
    losses = []
    for _ in range(5):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.9 * losses[0]


# qWD


def shards_of(x):
    """The parts of a global array, by device."""
    return {s.device.id: np.asarray(s.data) for s in x.addressable_shards}


@pytest.mark.slow
@pytest.mark.smoke
def test_copies_are_the_same_on_all_nodes_and_follow_the_weights():
    step = step_of(
        MODELS["scanned"],
        hpz_size="node",
        weight_wire=INT8,
        weight_differences=INT4,
    )
    batch = tokens()
    state = step.init(KEY, batch)
    layout = step.programs.layout(state)
    copied = [i for i, leaf in enumerate(layout) if leaf.quantized]
    assert [x is not None for x in state.wire_state.copies] == [
        i in copied for i in range(len(layout.leaves))
    ]
    for i in range(6):
        before = jax.device_get(jax.tree.leaves(state.params))
        state, metrics = step(state, tokens(seed=i))
        for leaf in copied:
            copy = state.wire_state.copies[leaf]
            parts = shards_of(copy)
            for device in range(4):  # the same position on both nodes
                np.testing.assert_array_equal(parts[device], parts[device + 4])
            # The copy is of the weights that this step used. The first step's is exact.
            off = np.abs(np.asarray(copy) - before[leaf]).max()
            moved = 1e-2  # of an element, by Adam in one step
            assert off <= (0 if i == 0 else 0.25 * moved)
    assert float(metrics["loss"]) < 4.2


@pytest.mark.slow
def test_differences_do_not_add_up_their_errors():
    """The weights stand still after 3 steps: the copies then come ever closer to them."""
    model = MODELS["scanned"]
    options = {"hpz_size": "node", "weight_wire": INT8, "weight_differences": INT4}
    still = optax.adam(optax.piecewise_constant_schedule(1e-2, {3: 0.0}))
    step = step_of(model, optimizer=still, **options)
    state = step.init(KEY, tokens())
    errors = []
    for i in range(8):
        state, _ = step(state, tokens(seed=i))
        pairs = zip(state.wire_state.copies, jax.tree.leaves(state.params), strict=True)
        errors.append(sum(float(jnp.sum((c - p) ** 2)) for c, p in pairs if c is not None) ** 0.5)
    assert errors[3] > 0
    assert all(
        after < 0.3 * before or after < 1e-7 for before, after in itertools.pairwise(errors[3:])
    )


# error feedback


def feedback_step(**options):
    def loss(p, batch, key):
        return jnp.sum(p["w"] * batch["x"].mean(0))

    options = {
        "gradient_wire": WireFormat(bits=8, block=32),
        "inter_node_gradient_wire": WireFormat(bits=4, block=32),
        "inter_node_reduce": "step",
        "error_feedback": Feedback(),
        "quantize_threshold": 0,
        **options,
    }
    return step_of((leaves(w=(64, 32)), loss), optimizer=optax.sgd(1.0), **options)


def fixed_batch():
    x = np.random.default_rng(0).normal(size=(8, 64, 32)).astype(np.float32)
    return {"x": x}


def test_error_feedback_makes_up_for_what_was_lost():
    """The same gradient 20 times: the sum of what arrives nears the sum of what was sent."""
    batch = fixed_batch()
    exact = batch["x"].mean(0)
    errors = {}
    for name, options in (("with", {}), ("without", {"error_feedback": None})):
        step = feedback_step(**options)
        state = step.init(KEY, batch)
        first = zeroxla.full_params(state)["w"]
        for _ in range(20):
            state, _ = step(state, batch)
        moved = first - zeroxla.full_params(state)["w"]
        errors[name] = np.linalg.norm(moved / 20 - exact) / np.linalg.norm(exact)
    assert errors["with"] < 0.2 * errors["without"]


def test_the_error_is_dropped_at_the_reset_and_kept_at_a_skipped_step():
    step = feedback_step(error_feedback=Feedback(reset_every=3))
    batch = fixed_batch()
    state = step.init(KEY, batch)
    errors = []
    for _ in range(3):
        state, _ = step(state, batch)
        errors.append(np.asarray(state.wire_state.errors[0]))
    assert errors[0].any()
    assert errors[1].any()
    assert not errors[2].any()
    state, _ = step(state, batch)
    kept = np.asarray(state.wire_state.errors[0])
    broken = {"x": np.full_like(batch["x"], np.inf)}
    state, metrics = step(state, broken)
    assert not metrics["finite"]
    np.testing.assert_array_equal(np.asarray(state.wire_state.errors[0]), kept)


@pytest.mark.slow
def test_momentum_keeps_a_share_of_the_old_error():
    """The formula in NumPy, over three steps, from the wires' own values."""
    rng = np.random.default_rng(1)
    feedback = Feedback(momentum=0.75, format=WireFormat(bits=8, block=32))
    format = WireFormat(bits=4, block=32)
    opened = functools.partial(zeroxla.quantize.dequantize, shape=(64,))
    error, old = jnp.zeros((2, feedback.num_bytes(64)), jnp.uint8), np.zeros((2, 64))
    for _ in range(3):
        x = rng.normal(size=(2, 64)).astype(np.float32)
        wires, error = quantize_with_error(feedback, jnp.asarray(x), error, format, None)
        lost = x + old - np.asarray(opened(wires))
        new = 0.75 * old + 0.25 * lost
        old = np.asarray(opened(zeroxla.quantize.Wire(error, 64, feedback.format)))
        np.testing.assert_allclose(old, new, atol=np.abs(new).max() / 127)


# switching


@pytest.mark.slow
def test_a_config_may_change_between_steps():
    """Plain, then all parts, then others, then plain: one state all the way, nothing of it lost."""
    model, batch = MODELS["scanned"], tokens(32)
    first = step_of(model, accumulate=2)
    kept = {
        "hpz_size": "node",
        "weight_differences": INT8,
        "gradient_wire": INT8,
        "inter_node_reduce": "step",
    }
    configs = [
        ZeroConfig(accumulate=2, **ALL),
        ZeroConfig(weight_wire=INT8, gradient_wire=INT8, hpz_size=2, **ALL),
        ZeroConfig(accumulate=2, error_feedback=Feedback(), **kept, **ALL),
        ZeroConfig(accumulate=2, **kept, **ALL),
        ZeroConfig(accumulate=2, **ALL),
    ]
    state, plain = first.init(KEY, batch), first.init(KEY, batch)
    step = first
    for i, config in enumerate(configs):
        before, step = step, first.with_config(config)
        if i == 3:  # it begins with the copies of the step before, and not with exact ones
            fresh = dataclasses.replace(state, wire_state=None)
            kept_loss, same_loss = (s.grad(state, batch)[0] for s in (step, before))
            assert kept_loss == same_loss
            assert kept_loss != step.grad(fresh, batch)[0]
        state, metrics = step(state, batch)
        plain, expected = first(plain, batch)
        assert int(state.step) == i + 1
        assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=0.02)
        has = state.wire_state
        assert (has is not None) == (config.weight_differences is not None)
        assert has is None or any(x is not None for x in has.errors) == (i == 2)
    # Adam has seen every step, whatever the wires.
    assert int(state.opt_state[0].count) == len(configs)


def test_a_setting_is_compiled_once(caplog):
    step = step_of(LEAST, hpz_size="node", weight_wire=INT8, weight_differences=INT4)
    bare = step_of(LEAST)
    state = bare.init(KEY, tokens())
    with jax.log_compiles():
        for i in range(3):
            state, _ = step(state, tokens(seed=i))
    said = [record.getMessage() for record in caplog.records]
    assert len([text for text in said if text.startswith("Compiling jit(train)")]) == 1


@pytest.mark.slow
def test_a_copy_made_later_is_exact():
    model, batch = MODELS["scanned"], tokens()
    bare = step_of(model)
    state, _ = bare(bare.init(KEY, batch), batch)
    options = {"hpz_size": "node", "weight_differences": INT4}
    found = step_of(model, **options).grad(state, batch)[1]
    assert_equal_trees(jax.device_get(found), jax.device_get(bare.grad(state, batch)[1]))


@pytest.mark.slow
def test_evaluation_quantizes_as_training_does():
    model, batch = MODELS["scanned"], tokens()
    step = step_of(model, weight_wire=INT4, hpz_size="node")
    state = step.init(KEY, batch)
    loss = float(step.grad(state, batch)[0])
    assert float(step.eval(state, batch)["loss"]) == pytest.approx(loss, rel=1e-5)
    exact = float(step_of(model).eval(state, batch)["loss"])
    assert abs(loss - exact) > 1e-5


@pytest.mark.slow
def test_a_checkpoint_keeps_what_wires_remember(tmp_path):
    """Saved after two steps and read into new shapes, it goes on bit for bit."""
    config = ZeroConfig(
        hpz_size="node",
        weight_differences=INT8,
        gradient_wire=INT8,
        inter_node_reduce="step",
        error_feedback=Feedback(),
        **ALL,
    )
    step = zeroxla.make_step(MODELS["scanned"], mesh(), optax.adam(1e-2), config=config)
    state = step.init(KEY, tokens())
    for i in range(2):
        state, _ = step(state, tokens(seed=i))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, state)
        restored = checkpointer.restore(step.abstract_state(tokens())).state
    assert any(x is not None and np.asarray(x).any() for x in restored.wire_state.errors)
    for found in (state, restored):
        assert found.wire_state is not None
    first, second = step(state, tokens(seed=2)), step(restored, tokens(seed=2))
    first, second = (jax.tree.leaves(dataclasses.replace(s, key=None)) for s, _ in (first, second))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_step_lowers_for_a_state_of_other_wires():
    step = step_of(MODELS["scanned"], hpz_size="node", weight_differences=INT8)
    bare = step_of(MODELS["scanned"]).abstract_state(tokens())
    text = step.lower(bare, tokens()).as_text()
    assert text == step.lower(step.abstract_state(tokens()), tokens()).as_text()


# which leaves


def test_small_leaves_norms_and_embeddings_are_not_quantized():
    step = step_of(GPT.tiny(scan=True, tie=False), weight_wire=INT8, gradient_wire=INT4)
    step.abstract_state(tokens())
    wires = {row.path: row.wires for row in step.describe().rows}
    quantized = {path for path, words in wires.items() if words != "float"}
    assert quantized == {
        *(f"h/attn/{name}/kernel" for name in ("c_attn", "c_proj")),
        *(f"h/mlp/{name}/kernel" for name in ("c_fc", "c_proj")),
        "lm_head",
    }
    assert {wires[p] for p in quantized} == {"int8/64, gradient int4/64"}


def test_patterns_choose_what_is_quantized():
    model = GPT.tiny(scan=True)
    step = step_of(model, weight_wire=INT8, unquantized=("attn",))
    step.abstract_state(tokens())
    wires = {row.path: row.wires for row in step.describe().rows}
    assert wires["wte/embedding"] == "int8/64, gradient float"
    assert wires["h/attn/c_attn/kernel"] == "float"
    assert wires["h/mlp/c_fc/kernel"] == "int8/64, gradient float"
    assert wires["h/ln_1/scale"] == "float"  # 32 elements a layer


@pytest.mark.slow
def test_frozen_leaves_have_no_error_and_no_gradient_on_the_wire():
    def loss(p, batch, key):
        return mse(jnp.tanh(batch["x"] @ p["a"]) @ p["b"], batch["y"])

    step = step_of(
        (leaves(a=(6, 64), b=(64, 3)), loss),
        quantize_threshold=0,
        frozen="a",
        hpz_size="node",
        gradient_wire=INT4,
        inter_node_reduce="step",
        error_feedback=Feedback(),
        weight_differences=INT4,
    )
    batch = vectors(16)
    state = step.init(KEY, batch)
    assert [x is None for x in state.wire_state.errors] == [True, False]
    assert [x is None for x in state.wire_state.copies] == [False, False]
    before = zeroxla.full_params(state)["a"]
    for _ in range(2):
        state, metrics = step(state, batch)
    np.testing.assert_array_equal(zeroxla.full_params(state)["a"], before)
    assert np.isfinite(float(metrics["loss"]))
