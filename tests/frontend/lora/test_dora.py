"""DoRA and rank-stabilized adapters: magnitudes, scaling, and all that a state goes through."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.lora import (
    ALPHA,
    CONFIG,
    KEY,
    MODELS,
    RANK,
    lora_step,
    merged_by_hand,
    replaced,
    with_random_b,
)
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.reference import Reference, relative_errors, worst
from tools.zoo.base import tokens

import zeroxla
from zeroxla.frontend import adapt
from zeroxla.frontend.lora import at_rest
from zeroxla.frontend.lora.leaf_plan import Adapter, LoraPlan
from zeroxla.frontend.lora.magnitudes import SMALLEST, scales, squared_norms_with
from zeroxla.frontend.lora.uses import DenseLeaf
from zeroxla.models import GPT
from zeroxla.step.adapters import without_adapters

pytestmark = pytest.mark.usefixtures("quick_compilation")

KERNELS = r"(attn|mlp)/.*kernel"


def unfrozen(lora, params):
    """The base of parameters, in floats."""
    plan = lora.plan
    without = {"base": params["base"], "lora": params["lora"]}
    leaves = [
        np.asarray(plan.merged(tuple(k.key for k in path), x, None))
        for path, x in jax.tree_util.tree_leaves_with_path(without["base"])
    ]
    return jax.tree.unflatten(jax.tree.structure(params["base"]), leaves)


def reference_gradients(model, params, base, state, batch):
    """Loss and gradients of the adapters of a base in floats, merged by hand."""
    adapted = adapt(model)

    def loss(adapters, model_state, batch, key, *, train):
        merged = merged_by_hand({"base": base, "lora": adapters})
        return adapted.loss(merged, model_state, batch, key, train=train)

    reference = Reference(init=adapted.init, loss=loss, world=8)
    return jax.jit(reference.gradients)(params["lora"], state.model_state, state.key, 0, batch)


@pytest.mark.parametrize(
    ("name", "frozen"),
    thinned(
        [("pair", "int8")],
        slow=[
            ("pair", None),
            ("gpt scanned", "int8"),
            ("gpt listed", None),
            ("llama", "int4"),
            ("llama", None),
        ],
        rows=True,
    ),
)
def test_gradients_are_those_of_the_merged_model(name, frozen, mesh24, monkeypatch):
    monkeypatch.setattr(at_rest, "MIN_ELEMENTS", 16)
    make, targets, data = MODELS[name]
    batch = data(16)
    lora, step = lora_step(make(), mesh24, targets, dora=True, frozen=frozen)
    state = step.init(KEY, batch)
    params = with_random_b(zeroxla.full_params(state))
    base = unfrozen(lora, params)
    state = replaced(step, state, params)
    loss, grads = step.grad(state, batch)
    want, _, expected, _ = reference_gradients(make(), params, base, state, batch)
    assert float(loss) == pytest.approx(float(want), rel=1e-5)
    assert worst(relative_errors(grads["lora"], expected))[1] < 2e-5
    merged = merged_by_hand({**params, "base": base})
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), lora.merge(params), merged
    )


def leaf_of(tree, path):
    for name in path.split("/"):
        tree = tree[name]
    return tree


WIDE = (lambda: GPT.tiny(width=64), KERNELS, tokens)


@pytest.mark.parametrize(
    ("model", "frozen", "path", "inputs"),
    thinned(
        [(MODELS["pair"], "int8", "out", (0, 1))],
        slow=[(WIDE, None, "h/mlp/c_fc/kernel", 1), (WIDE, "int8", "h/mlp/c_fc/kernel", 1)],
        rows=True,
    ),
    ids=["pair-int8", "gpt-None", "gpt-int8"],
)
def test_a_state_begins_as_the_base(model, frozen, path, inputs, mesh24, monkeypatch):
    """With the base that it has stored, from `init` and from given weights."""
    monkeypatch.setattr(at_rest, "MIN_ELEMENTS", 16)
    make, targets, data = model
    batch = data(8)
    lora, step = lora_step(make(), mesh24, targets, dora=True, frozen=frozen)
    _, without = lora_step(make(), mesh24, targets, frozen=frozen)
    plain = zeroxla.make_step(make(), mesh24, config=CONFIG)
    loss = float(without.eval(without.init(KEY, batch), batch)["loss"])
    begun = step.init(KEY, batch)
    assert float(step.eval(begun, batch)["loss"]) == pytest.approx(loss, rel=1e-6)
    given = plain.init(KEY, batch).params
    state = step.init_from(given, KEY)
    for have, want in zip(
        jax.tree.leaves(zeroxla.full_params(state)["lora"]),
        jax.tree.leaves(zeroxla.full_params(begun)["lora"]),
        strict=True,
    ):
        np.testing.assert_allclose(have, want, rtol=1e-6)
    params = zeroxla.full_params(state)
    norms = np.linalg.norm(leaf_of(unfrozen(lora, params), path), axis=inputs)
    m = leaf_of(params["lora"], path)["m"]
    np.testing.assert_allclose(m, norms, rtol=1e-6)
    # Training, then the same state with adapters that change nothing.
    state, first = step(state, batch)
    for _ in range(4):
        state, last = step(state, batch)
    assert float(last["loss"]) < float(first["loss"]) - 0.05
    assert not np.allclose(leaf_of(zeroxla.full_params(state)["lora"], path)["m"], m)
    back = without_adapters(state, lora.plan)
    assert float(step.eval(back, batch)["loss"]) == pytest.approx(loss, rel=1e-6)


def test_rank_stabilized_adapters_count_by_the_root_of_the_rank(mesh24):
    make, targets, data = MODELS["pair"]
    lora, step = lora_step(make(), mesh24, targets, rank_stabilized=True)
    params = with_random_b(zeroxla.full_params(step.init(KEY, data(8))))
    assert lora.scaling == ALPHA / math.sqrt(RANK)
    by_hand = merged_by_hand(params, scaling=ALPHA / math.sqrt(RANK))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), lora.merge(params), by_hand
    )
    batch = data(8)
    loss = float(step.eval(replaced(step, step.init(KEY, batch), params), batch)["loss"])
    whole = zeroxla.make_step(make(), mesh24, config=CONFIG)
    merged = whole.init_from(lora.merge(params), KEY, batch)
    assert loss == pytest.approx(float(whole.eval(merged, batch)["loss"]), rel=1e-5)


@pytest.mark.slow
def test_generation_sees_the_magnitudes(mesh24):
    lora, step = lora_step(GPT.tiny(), mesh24, KERNELS, dora=True)
    params = with_random_b(zeroxla.full_params(step.init(KEY, tokens(8))))
    state = step.init_from(params, KEY)
    engine = zeroxla.HybridEngine(step, tensor=2)
    rows = tokens(8)["tokens"]
    logits = jax.jit(step.adapted.base.apply)(lora.merge(params), {}, rows)
    np.testing.assert_allclose(engine.logits(state, rows), logits, atol=1e-5)


@pytest.mark.slow
def test_over_the_axis_tensor():
    """The search splits the products of the norms like any others."""
    batch = tokens(16)
    losses, grads = [], []
    for mesh in (
        zeroxla.make_mesh(nodes=2, devices_per_node=4),
        zeroxla.make_mesh(nodes=2, devices_per_node=2, tensor=2),
    ):
        _, step = lora_step(GPT.tiny(layers=1), mesh, r"mlp/.*kernel", dora=True)
        state = step.init(KEY, batch)
        params = with_random_b(zeroxla.full_params(state))
        loss, grad = step.grad(step.init_from(params, KEY), batch)
        losses.append(float(loss))
        grads.append(jax.device_get(grad["lora"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert worst(relative_errors(grads[1], grads[0]))[1] < 2e-5


def test_magnitudes_alone_may_train(mesh24):
    config = zeroxla.ZeroConfig(persistence_threshold=0, frozen=r"/(a|b)$")
    make, targets, data = MODELS["pair"]
    _, step = lora_step(make(), mesh24, targets, dora=True, config=config)
    batch = data(16)
    state = step.init(KEY, batch)
    before = zeroxla.full_params(state)["lora"]["out"]
    state, _ = step(state, batch)
    after = zeroxla.full_params(state)["lora"]["out"]
    np.testing.assert_array_equal(before["a"], after["a"])
    assert (before["m"] != after["m"]).any()


@pytest.mark.slow
def test_in_bfloat16(mesh24):
    config = zeroxla.ZeroConfig(persistence_threshold=0, compute_dtype="bfloat16")
    batch = tokens(16)
    losses = []
    for one in (CONFIG, config):
        _, step = lora_step(GPT.tiny(), mesh24, KERNELS, dora=True, config=one)
        params = with_random_b(zeroxla.full_params(step.init(KEY, batch)))
        losses.append(float(step.eval(step.init_from(params, KEY), batch)["loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_the_squared_norms_are_those_of_the_sum():
    rng = np.random.default_rng(0)
    w, a, b = (rng.normal(size=s) for s in ((3, 5, 2, 4), (5, 3, 2), (2, 2, 4)))
    want = ((w + 1.5 * np.einsum("jir,rkl->ijkl", a, b)) ** 2).sum((0, 1))
    have = squared_norms_with(*map(jnp.asarray, (w, a.transpose(1, 0, 2), b)), (0, 1), 1.5)
    np.testing.assert_allclose(have, want, rtol=1e-5)
    # The columns that are zero stay zero, and have no NaN.
    nothing = squared_norms_with(jnp.zeros((3, 2)), jnp.ones((3, 1)), jnp.zeros((1, 2)), (0,), 1.0)
    assert (nothing == SMALLEST).all()
    assert not scales(jnp.zeros(2), nothing).any()


def test_a_merged_column_of_zeros_stays_one():
    leaf = DenseLeaf(shape=(2, 3), layer_dims=(), contracted=(0,))
    plan = LoraPlan(
        **{"shapes": {}, "dense": {("w",): leaf}, "targets": (("w",),), "rank": 1},
        **{"scaling": 2.0, "dora": True, "frozen": None},
    )
    values = np.array([[3.0, 0, 0], [4.0, 0, 1.0]], np.float32)
    adapter = Adapter(np.ones((2, 1)), np.array([[0, 0, 1.0]]), np.array([10.0, 0, 1.0]))
    want = [[6, 0, 2 / 13**0.5], [8, 0, 3 / 13**0.5]]  # (0 + 2, 1 + 2), of length 1
    np.testing.assert_allclose(plan.merged(("w",), values, adapter), want, rtol=1e-6)


@pytest.mark.parametrize("name", ["dora", "rank_stabilized"])
def test_flags_are_flags(name):
    with pytest.raises(ValueError, match=f"{name}=1; give True or False"):
        zeroxla.lora(GPT.tiny(), targets=KERNELS, **{name: 1})


@pytest.mark.slow
def test_it_trains_on_stages():
    mesh = zeroxla.make_mesh(nodes=1, devices_per_node=4, pipe=2)
    model = zeroxla.lora(GPT.tiny(), targets=KERNELS, rank=RANK, dora=True, frozen="int8")
    staged = zeroxla.Pipeline.from_model(model)
    config = zeroxla.ZeroConfig(accumulate=2)
    step = zeroxla.make_step(staged, mesh, optax.adam(1e-2), config=config)
    batch = tokens(16)
    state = step.init(KEY, batch)
    losses = []
    for _ in range(4):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.05
    alone = zeroxla.make_step(
        zeroxla.lora(GPT.tiny(), targets=KERNELS, rank=RANK, dora=True, frozen="int8"),
        zeroxla.make_mesh(nodes=2, devices_per_node=4),
        optax.adam(1e-2),
        config=config,
    )
    other = alone.init(KEY, batch)
    assert losses[0] == pytest.approx(float(alone(other, batch)[1]["loss"]), rel=1e-5)
