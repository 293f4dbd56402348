"""Mixtral: its three routings against NumPy in float64 and each other, balancing, training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla.frontend import adapt
from zeroxla.models import Llama, Mixtral
from zeroxla.models.moe_layers import (
    Experts,
    balance_loss,
    find_places,
    make_mix,
    route,
    route_by_sigmoid,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROWS, LENGTH, EXPERTS, TOP_K = 3, 20, 8, 2
BATCH = {"tokens": np.random.default_rng(7).integers(0, 64, (2, 13), np.int32)}
NOTHING_DROPPED = {"capacity_factor": EXPERTS / TOP_K}
PADDING = np.arange(LENGTH) >= np.array([[0], [7], [19]])


def random_like(shapes, seed=0):
    """A tree of arrays large enough for activations of about 1 and for uneven choices."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape, scale=0.3)), shapes)


@functools.cache
def layer(**options):
    """One block's mixture as a function of its parameters, and parameters for it."""
    model = nnx.eval_shape(lambda: Mixtral.tiny(layers=1, scan=False, **options)(nnx.Rngs(0)))
    graphdef, state = nnx.split(model.layers[0])

    def mixture(params, x, real=None):
        return nnx.merge(graphdef, nnx.State(params), copy=True).mixture(x, real)

    return jax.jit(mixture), random_like(nnx.to_pure_dict(state))


X = random_like(jax.ShapeDtypeStruct((ROWS, LENGTH, 32), jnp.float32), seed=1) / 0.3


def numpy_mixture(params, x, capacity_factor, real=None):
    """The mixture of experts, token by token in float64: outputs, pairs kept, pairs dropped, and
    the balancing loss."""
    kernel = params["router"]["kernel"].astype(np.float64)
    gates, ups, downs = (
        params["experts"][f"{n}_proj"].astype(float) for n in ("gate", "up", "down")
    )
    num_places = int(np.ceil(capacity_factor * TOP_K * LENGTH / EXPERTS))
    y, kept, dropped, balances = np.zeros(x.shape), set(), set(), []
    for row in range(len(x)):
        taken, choices, probs = [0] * EXPERTS, [0] * EXPERTS, np.zeros(EXPERTS)
        for place in range(LENGTH):
            token = x[row, place].astype(np.float64)
            powers = np.exp(token @ kernel)
            best = sorted(range(EXPERTS), key=lambda e: -powers[e])[:TOP_K]
            probs += powers / powers.sum() / LENGTH
            for expert in best:
                choices[expert] += 1
                if real is not None and not real[row, place]:
                    continue
                if taken[expert] == num_places:
                    dropped.add((row, place, expert))
                    continue
                taken[expert] += 1
                kept.add((row, place, expert))
                gate = token @ gates[expert]
                hidden = gate / (1 + np.exp(-gate)) * (token @ ups[expert])
                y[row, place] += powers[expert] / powers[best].sum() * (hidden @ downs[expert])
        share = np.array(choices) / (LENGTH * TOP_K)
        balances.append(EXPERTS * (share * probs).sum())
    return y, kept, dropped, np.mean(balances)


@pytest.mark.smoke
@pytest.mark.parametrize("routing", ["capacity", "ragged", "dense"])
def test_outputs_and_balance_are_those_of_numpy(routing):
    mixture, params = layer(routing=routing, **NOTHING_DROPPED)
    y, statistics = mixture(params, X)
    expected, _, dropped, balance = numpy_mixture(params, X, **NOTHING_DROPPED)
    assert not dropped
    assert np.abs(expected).mean() > 0.1
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(statistics["balance"], balance, rtol=1e-5)
    if routing == "capacity":
        assert statistics["dropped"] == 0
    else:
        assert "dropped" not in statistics


@pytest.mark.parametrize(
    ("factor", "real"), thinned([(0.5, PADDING)], slow=[(0.5, None), (1.0, None)], rows=True)
)
def test_tokens_over_capacity_are_dropped_in_the_order_of_positions(factor, real):
    mixture, params = layer(capacity_factor=factor)
    y, statistics = mixture(params, X, real)
    expected, kept, dropped, _ = numpy_mixture(params, X, factor, real)
    assert dropped
    routes = route(X, params["router"]["kernel"], TOP_K)
    wanted, taken = map(np.asarray, find_places(routes, real, factor))
    assert set(zip(*np.nonzero(taken.any(-1)), strict=True)) == kept
    assert set(zip(*np.nonzero(wanted & ~taken.any(-1)), strict=True)) == dropped
    assert int(taken.sum()) == len(kept)
    assert int(taken.sum(axis=1).max()) == 1  # no place is taken twice
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    share = len(dropped) / (len(dropped) + len(kept))
    np.testing.assert_allclose(statistics["dropped"], share, rtol=1e-6)


def test_gradients_of_all_routings_agree_if_nothing_is_dropped():
    weights = random_like(jax.ShapeDtypeStruct(X.shape, jnp.float32), seed=2)

    def gradients(routing):
        mixture, params = layer(routing=routing, **NOTHING_DROPPED)

        def scalar(params, x):
            y, statistics = mixture(params, x)
            return (y * weights).sum() + statistics["balance"]

        return jax.jit(jax.grad(scalar, argnums=(0, 1)))(params, X)

    expected = gradients("dense")
    assert np.abs(expected[0]["router"]["kernel"]).max() > 0.1
    assert (np.abs(expected[0]["experts"]["gate_proj"]).max((1, 2)) > 0.01).all()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    for routing in ("capacity", "ragged"):
        jax.tree.map(close, gradients(routing), expected)


def test_balance_is_1_if_choices_are_even_and_the_number_of_experts_if_all_are_one():
    identity = jnp.eye(EXPERTS)
    even = route(100 * identity[None], identity, 1)
    np.testing.assert_allclose(balance_loss(even), 1, rtol=1e-6)
    one = route(100 * identity[None, jnp.array([3] * EXPERTS)], identity, 1)
    np.testing.assert_allclose(balance_loss(one), EXPERTS, rtol=1e-6)


def parts(preset):
    return nnx.split(nnx.eval_shape(lambda: preset(nnx.Rngs(0))))


def loss_of(graphdef, tree, batch=BATCH):
    return nnx.merge(graphdef, nnx.State(tree), copy=True).loss(batch, train=True)


def test_the_loss_has_the_balance_and_padding_takes_no_place():
    options = {"layers": 1, "routing": "capacity", "capacity_factor": 0.5, "balance": 0.5}
    model = nnx.jit(lambda: Mixtral.tiny(**options)(nnx.Rngs(0)))()
    tokens = np.random.default_rng(0).integers(0, 64, (2, 17))
    real = np.broadcast_to(np.arange(16) >= 8, (2, 16)).astype(int)

    @nnx.jit
    def run(model, tokens):
        loss, metrics = model.loss({"tokens": tokens}, train=True)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        plain = model(inputs, targets_BL=targets).mean()
        return loss - plain, metrics, model(inputs, mask_BL=real)

    more, metrics, logits = run(model, tokens)
    np.testing.assert_allclose(more, 0.5 * metrics["balance"], rtol=1e-4)
    others = np.where(np.arange(17) < 8, (tokens + 1) % 64, tokens)
    np.testing.assert_allclose(logits[:, 8:], run(model, others)[2][:, 8:], atol=1e-6)


@pytest.mark.slow
def test_scan_and_remat_change_neither_loss_nor_metrics_nor_gradients():
    plain, state = parts(Mixtral.tiny(scan=False))
    other, _ = parts(Mixtral.tiny(scan=True, remat=True))
    tree = random_like(nnx.to_pure_dict(state))

    def scanned(tree):
        blocks = [tree["layers"][i] for i in range(2)]
        return {**tree, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}

    def run(graphdef, tree):
        return jax.jit(jax.value_and_grad(functools.partial(loss_of, graphdef), has_aux=True))(tree)

    (expected, metrics), grads = run(plain, tree)
    assert sorted(metrics) == ["balance", "dropped"]
    assert metrics["dropped"] > 0
    (found, other_metrics), other_grads = run(other, scanned(tree))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, (found, other_metrics), (expected, metrics))
    jax.tree.map(close, other_grads, scanned(grads))


@pytest.mark.slow
def test_one_expert_is_llama_and_its_balance_is_1():
    shape = {"scan": False, "hidden": 64}
    graphdef, state = parts(Llama.tiny(**shape))
    tree = random_like(nnx.to_pure_dict(state))
    blocks = {}
    for i, block in tree["layers"].items():
        perceptron = {name: leaf["kernel"][None] for name, leaf in block["mlp"].items()}
        router = {"kernel": np.ones((32, 1), np.float32)}
        rest = {name: part for name, part in block.items() if name != "mlp"}
        blocks[i] = {**rest, "experts": perceptron, "router": router}
    batch = {**BATCH, "mask": np.arange(12) % 2 + np.zeros((2, 1))}
    run = jax.jit(loss_of, static_argnums=0)
    expected, _ = run(graphdef, tree, batch)
    mixtral, _ = parts(Mixtral.tiny(**shape, experts=1, top_k=1, balance=0.5))
    found, metrics = run(mixtral, {**tree, "layers": blocks}, batch)
    np.testing.assert_allclose(found, expected + 0.5, rtol=1e-5)
    assert metrics == {"weight": 12, "balance": 1, "dropped": 0}


@pytest.mark.slow
def test_a_token_that_is_dropped_does_not_depend_on_later_ones():
    graphdef, state = parts(Mixtral.tiny(capacity_factor=0.5))
    tree = random_like(nnx.to_pure_dict(state))
    call = jax.jit(lambda tokens: nnx.merge(graphdef, nnx.State(tree), copy=True)(tokens))
    tokens = BATCH["tokens"]
    changed = tokens.copy()
    changed[:, 7] = (changed[:, 7] + 1) % 64
    before, after = call(tokens), call(changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.abs(before[:, 7] - after[:, 7]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "nodes", "devices"),
    thinned(
        [({"capacity_factor": 0.75, "layers": 1, "scan": False}, 1, 2)],
        slow=[({"capacity_factor": 0.75}, 2, 4), ({"routing": "ragged"}, 2, 4)],
        rows=True,
    ),
)
def test_a_step_trains_it_as_one_device_does(options, nodes, devices):
    """With every leaf split. Places and balance are counted in each row."""
    preset, optimizer = Mixtral.tiny(**options), optax.adam(1e-2)
    batch = {"tokens": np.random.default_rng(3).integers(0, 64, (8, 17), np.int32)}
    config = zeroxla.ZeroConfig(persistence_threshold=0)
    mesh = zeroxla.make_mesh(nodes=nodes, devices_per_node=devices)
    step = zeroxla.make_step(preset, mesh, optimizer, config=config)
    state = step.init(jax.random.key(0), batch)
    params = zeroxla.full_params(state)
    adapted, key = adapt(preset), jax.random.key(0)

    @jax.jit
    def update(params, moments):
        loss = lambda p: adapted.loss(p, {}, batch, key, train=True)[:2]  # noqa: E731
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params)
        changes, moments = optimizer.update(grads, moments)
        return optax.apply_updates(params, changes), moments, {**metrics, "loss": value}

    moments, losses = optimizer.init(params), []
    for _ in range(6):
        params, moments, expected = update(params, moments)
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9}, "top_k=9, experts=8: a token takes from 1 to 8 experts; lower top_k"),
        ({"top_k": 0}, "top_k=0, experts=8"),
        ({"routing": "sorted"}, "routing='sorted': take capacity, ragged or dense"),
        ({"capacity_factor": 0.0}, r"capacity_factor=0.0: it must be above 0; 1.25 leaves"),
        ({"capacity_factor": float("nan")}, "capacity_factor=nan"),
        ({"kv_heads": 3}, "width 32, heads 4, kv_heads 3: kv_heads must divide heads"),
    ],
)
def test_bad_values_are_named_with_a_remedy(options, message):
    with pytest.raises(ValueError, match=message):
        Mixtral.tiny(**options)(nnx.Rngs(0))


@pytest.mark.parametrize(("groups", "normalized"), [(4, True), (1, False)])
def test_sigmoids_choose_as_the_formula_says(groups, normalized):
    """In float64: the two groups with the best pairs, the three best in them by sigmoid and
    correction, their sigmoids as weights."""
    draw = np.random.default_rng(3)
    x, kernel = draw.normal(size=(2, 9, 16)), draw.normal(size=(16, EXPERTS))
    correction = draw.normal(size=EXPERTS)
    x, kernel, correction = (a.astype(np.float32) for a in (x, kernel, correction))
    options = {"groups": groups, "top_groups": min(groups, 2), "is_normalized": normalized}
    run = jax.jit(
        lambda *a: dataclasses.astuple(route_by_sigmoid(*a[:2], 3, correction_E=a[2], **options))
    )
    logits, experts, found_weights = map(np.asarray, run(x, kernel, correction))
    for row, place in np.ndindex(2, 9):
        scores = 1 / (1 + np.exp(-(x[row, place].astype(float) @ kernel.astype(float))))
        chosen_by = scores + correction
        size = EXPERTS // groups
        pairs = [sorted(chosen_by[g * size : (g + 1) * size])[-2:] for g in range(groups)]
        allowed = sorted(range(groups), key=lambda g: -sum(pairs[g]))[:2]
        best = sorted(
            (e for e in range(EXPERTS) if e // size in allowed), key=lambda e: -chosen_by[e]
        )[:3]
        assert experts[row, place].tolist() == best
        weights = scores[best] / (scores[best].sum() if normalized else 1)
        np.testing.assert_allclose(found_weights[row, place], weights, rtol=1e-5)
    shares = np.exp(logits[0, 0]) / np.exp(logits[0, 0]).sum()
    scores = 1 / (1 + np.exp(-(x[0, 0].astype(float) @ kernel.astype(float))))
    np.testing.assert_allclose(shares, scores / scores.sum(), rtol=1e-5)


def test_a_correction_has_no_gradient():
    draw = np.random.default_rng(3)
    x, kernel = draw.normal(size=(1, 4, 8)), draw.normal(size=(8, EXPERTS))

    def weights(correction):
        return route_by_sigmoid(x, kernel, 2, correction_E=correction).weights_BLK.sum()

    assert not np.any(jax.jit(jax.grad(weights))(jnp.ones(EXPERTS)))


def test_experts_with_biases_are_the_same_by_every_routing():
    """A place of an expert that no token takes has a bias, too, and adds nothing."""
    make = functools.partial(Experts, 4, 8, 6, bias=True, clamp=0.7)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    params = random_like(nnx.to_pure_dict(state))
    x = np.float32(np.random.default_rng(1).normal(size=(2, 5, 8)))
    kernel = np.float32(np.random.default_rng(2).normal(size=(8, 4)))

    @functools.partial(jax.jit, static_argnums=1)
    def mixed(params, routing):
        experts = nnx.merge(graphdef, nnx.State(params), copy=True)
        return make_mix(routing, 2.0)(x, experts, route(x, kernel, 2), None)[0]

    def numpy_expert(e, token):
        p = {name: a[e].astype(float) for name, a in params.items()}
        gate = np.minimum(token @ p["gate_proj"] + p["gate_bias"], 0.7)
        up = np.clip(token @ p["up_proj"] + p["up_bias"], -0.7, 0.7)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1) @ p["down_proj"] + p["down_bias"]

    want = np.zeros_like(x)
    for row, place in np.ndindex(2, 5):
        token = x[row, place].astype(float)
        powers = np.exp(token @ kernel)
        best = np.argsort(-powers)[:2]
        shares = powers[best] / powers[best].sum()
        want[row, place] = sum(
            share * numpy_expert(e, token) for share, e in zip(shares, best, strict=True)
        )
    for routing in ("ragged", "dense", "capacity"):
        np.testing.assert_allclose(mixed(params, routing), want, rtol=1e-5, atol=1e-5)
