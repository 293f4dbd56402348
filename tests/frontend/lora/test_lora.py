"""LoRA: adapters on dense leaves of unmodified models; only they are trained."""

import dataclasses

import flax.linen as nn
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
from tools.zoo import CASES
from tools.zoo.base import tokens, vectors

import zeroxla
from zeroxla.frontend import adapt
from zeroxla.frontend.lora import at_rest
from zeroxla.models import GPT, Llama

pytestmark = pytest.mark.usefixtures("quick_compilation")
MESHES = {"(2, 4)": (2, 4), "(1, 8)": (1, 8)}


def mesh_of(name):
    nodes, devices = MESHES[name]
    return zeroxla.make_mesh(nodes=nodes, devices_per_node=devices)


def reference_gradients(model, params, state, batch):
    """Loss and gradients of the adapters of a base with the adapters merged by hand."""
    adapted = adapt(model)

    def loss(params, model_state, batch, key, *, train):
        return adapted.loss(merged_by_hand(params), model_state, batch, key, train=train)

    frozen = Reference(
        init=adapted.init, loss=loss, world=8, is_frozen=lambda path: path.startswith("base/")
    )
    return jax.jit(frozen.gradients)(params, state.model_state, state.key, 0, batch)


ROWS = [("pair", "(1, 8)")]
OTHERS = [(n, m) for n in MODELS for m in MESHES if (n, m) not in ROWS]


@pytest.mark.parametrize(
    ("name", "mesh"), ROWS + [pytest.param(*row, marks=pytest.mark.slow) for row in OTHERS]
)
def test_gradients_are_those_of_the_merged_model(name, mesh):
    make, targets, data = MODELS[name]
    batch = data(16)
    _, step = lora_step(make(), mesh_of(mesh), targets)
    state = step.init(KEY, batch)
    params = with_random_b(zeroxla.full_params(state))
    state = replaced(step, state, params)
    loss, grads = step.grad(state, batch)
    want, _, expected, _ = reference_gradients(make(), params, state, batch)
    assert float(loss) == pytest.approx(float(want), rel=5e-6)
    assert worst(relative_errors(grads["lora"], expected["lora"]))[1] < 1e-5
    assert not any(jnp.any(x) for x in jax.tree.leaves(grads["base"]))


@pytest.mark.parametrize("name", thinned([], slow=["pair", "gpt scanned"]))
def test_a_state_begins_as_the_plain_model(name, mesh24):
    """The same random bits for the base, and B is zero: the loss is that of the plain model."""
    make, targets, data = MODELS[name]
    batch = data(16)
    _, step = lora_step(make(), mesh24, targets)
    state = step.init(KEY, batch)
    plain = zeroxla.make_step(make(), mesh24, optax.sgd(0.1), config=CONFIG)
    own = plain.init(KEY, batch)
    for have, want in zip(
        jax.tree.leaves(zeroxla.full_params(state)["base"]),
        jax.tree.leaves(zeroxla.full_params(own)),
        strict=True,
    ):
        np.testing.assert_array_equal(have, want)
    loss = float(plain.eval(own, batch)["loss"])
    assert float(step.eval(state, batch)["loss"]) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(("name", "num"), thinned([("pair", 3)], slow=[("llama", 5)], rows=True))
def test_only_adapters_change_and_only_they_have_optimizer_state(name, num, mesh24):
    make, targets, data = MODELS[name]
    batch = data(16)
    _, step = lora_step(make(), mesh24, targets)
    state = step.init(KEY, batch)
    before = zeroxla.full_params(state)
    adapters = len(jax.tree.leaves(state.params["lora"]))
    assert adapters == 2 * num  # of Llama q, k, v, o and the head
    assert len(jax.tree.leaves(state.opt_state)) == 1 + 2 * adapters
    losses = []
    for _ in range(5):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    after = zeroxla.full_params(state)
    jax.tree.map(np.testing.assert_array_equal, before["base"], after["base"])
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before["lora"], after["lora"])
    assert all(jax.tree.leaves(changed))
    assert losses[-1] < losses[0] - 0.05


def test_a_starts_uniform_within_one_over_the_root_of_the_inputs(mesh24):
    _, step = lora_step(GPT.tiny(), mesh24, r"mlp/c_proj/kernel")
    lora = zeroxla.full_params(step.init(KEY, tokens(8)))["lora"]["h"]
    a, b = lora["mlp"]["c_proj"]["kernel"]["a"], lora["mlp"]["c_proj"]["kernel"]["b"]
    assert (a.shape, b.shape) == ((2, 128, RANK), (2, RANK, 32))
    bound = 128**-0.5
    assert 0.9 * bound < np.abs(a).max() <= bound
    assert np.std(a) == pytest.approx(bound / 3**0.5, rel=0.1)
    assert not b.any()


@pytest.mark.slow
def test_each_leaf_has_a_key_of_its_own():
    lora = zeroxla.lora(Llama.tiny(), targets=r"(k|v)_proj/kernel")
    params, _ = jax.jit(adapt(lora).init)(KEY, tokens(1))
    k, v = (params["lora"]["layers"]["self_attn"][n]["kernel"]["a"] for n in ("k_proj", "v_proj"))
    assert k.shape == v.shape
    assert not np.allclose(k, v)


@pytest.mark.slow
@pytest.mark.parametrize("name", thinned(["gpt scanned"], slow=["llama", "gpt listed"]))
def test_the_merged_model_has_the_same_logits(name, mesh24):
    make, targets, data = MODELS[name]
    batch = data(8)
    lora, step = lora_step(make(), mesh24, targets)
    params = with_random_b(zeroxla.full_params(step.init(KEY, batch)))
    merged = lora.merge(params)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(merged))
    adapted = step.adapted
    inputs = batch["tokens"][:, :-1]
    have = jax.jit(adapted.apply)(params, {}, inputs)
    apply = jax.jit(adapted.base.apply)
    np.testing.assert_allclose(have, apply(merged, {}, inputs), atol=1e-5)
    apart = apply(params["base"], {}, inputs)
    assert np.abs(have - apart).max() > 1e-3  # the adapters do something
    traced = jax.jit(adapted.merge)(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), traced, merged)


def test_merging_is_the_formula(mesh24):
    make, targets, data = MODELS["pair"]
    lora, step = lora_step(make(), mesh24, targets)
    params = with_random_b(zeroxla.full_params(step.init(KEY, data(8))))
    by_hand = merged_by_hand(params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), lora.merge(params), by_hand
    )


@pytest.mark.slow
def test_layers_are_gathered_one_by_one_as_without_adapters(mesh24):
    """In the loop's body, forward and backward; and the step needs less memory than a plain one."""
    gpt = GPT.tiny(layers=6, width=64)
    batch = tokens(8)
    plain = zeroxla.make_step(gpt, mesh24, optax.adam(1e-2), config=CONFIG)
    _, step = lora_step(gpt, mesh24, r"(attn|mlp)/.*kernel")
    temporary = []
    for one in (plain, step):
        shapes = one.abstract_state(batch)
        compiled = one.lower(shapes, batch).compile()
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporary[1] < temporary[0]
    rows = {row.path: row.unit for row in step.describe().rows}
    for path, unit in {row.path: row.unit for row in plain.describe().rows}.items():
        assert rows[f"base/{path}"] == unit
    assert rows["base/h/mlp/c_fc/kernel"].endswith("of a loop")
    assert rows["lora/h/mlp/c_fc/kernel/a"] == rows["base/h/mlp/c_fc/kernel"]


def test_a_users_own_frozen_leaves_stay_frozen_too(mesh24):
    make, _, data = MODELS["pair"]
    config = zeroxla.ZeroConfig(persistence_threshold=0, frozen=r"/a$")
    _, step = lora_step(make(), mesh24, "out", config=config)
    batch = data(8)
    state = step.init(KEY, batch)
    before = zeroxla.full_params(state)["lora"]["out"]
    state, _ = step(state, batch)
    after = zeroxla.full_params(state)["lora"]["out"]
    np.testing.assert_array_equal(before["a"], after["a"])
    assert after["b"].any()
    other = step.with_config(zeroxla.ZeroConfig(frozen=r"/a$"))  # the base stays frozen
    assert other.config.frozen == (r"/a$", "^base/")


@pytest.mark.parametrize("frozen", ["attn", r"/(a|b)$"])
def test_frozen_adapters_are_refused(frozen, mesh24):
    config = zeroxla.ZeroConfig(frozen=frozen)
    _, step = lora_step(GPT.tiny(), mesh24, r"(attn|mlp)/.*kernel", config=config)
    with pytest.raises(ValueError, match=r"both factors of the adapter 'lora/h/attn/c_attn/kernel"):
        step.init(KEY, tokens(8))


@pytest.mark.slow
def test_trained_statistics_stay_with_the_weights(mesh24):
    """They are part of what the base computes."""
    case = CASES["batchnorm"]
    batch = case.batch(32)
    whole = zeroxla.make_step(case.make(), mesh24, optax.sgd(0.1), loss=case.loss)
    state = whole.init(KEY, batch)
    for _ in range(3):
        state, _ = whole(state, batch)
    model = zeroxla.lora(case.make(), targets="Dense_0/kernel", rank=2)
    step = zeroxla.make_step(model, mesh24, optax.sgd(0.1), loss=case.loss)
    step.abstract_state(batch)
    params = zeroxla.full_params(state)
    with pytest.warns(UserWarning, match=r"keeps a state .* first 'batch_stats"):
        fresh = model.init_from(step, params, KEY)
    begun = model.init_from(step, params, KEY, state.model_state)
    expected = float(whole.eval(state, batch)["loss"])
    assert float(step.eval(begun, batch)["loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(step.eval(fresh, batch)["loss"]) != pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("preset", thinned(["zeropp"], slow=["zeropp_min"]))
def test_it_trains_with_the_wires_of_zeropp(preset, mesh24):
    config = getattr(zeroxla.ZeroConfig, preset)(
        persistence_threshold=0, quantize_threshold=0, accumulate=2
    )
    _, step = lora_step(GPT.tiny(), mesh24, r"(attn|mlp)/.*kernel", config=config)
    batch = tokens(16)
    state = step.init(KEY, batch)
    losses = []
    for _ in range(5):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.slow
def test_in_bfloat16(mesh24):
    """Adapters compute in bfloat16 beside the base, and their masters are float32."""
    make, targets, data = MODELS["pair"]
    config = zeroxla.ZeroConfig(persistence_threshold=0, compute_dtype="bfloat16")
    _, step = lora_step(make(), mesh24, targets, config=config)
    batch = data(16)
    state = step.init(KEY, batch)
    params = zeroxla.full_params(state)
    state, first = step(state, batch)
    want, *_ = reference_gradients(make(), params, state, batch)
    assert float(first["loss"]) == pytest.approx(float(want), rel=0.02)
    for _ in range(5):
        state, last = step(state, batch)
    assert float(last["loss"]) < float(first["loss"])
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_it_starts_from_given_weights(mesh24):
    make, targets, data = MODELS["pair"]
    batch = data(8)
    plain = zeroxla.make_step(make(), mesh24, optax.sgd(0.1), config=CONFIG)
    own, _ = plain(plain.init(KEY, batch), batch)
    lora, step = lora_step(make(), mesh24, targets)
    step.abstract_state(batch)
    for params in (own.params, zeroxla.full_params(own)):
        state = lora.init_from(step, params, KEY)
        found = zeroxla.full_params(state)
        jax.tree.map(np.testing.assert_array_equal, found["base"], zeroxla.full_params(own))
        fresh = zeroxla.full_params(step.init(KEY, batch))["lora"]
        jax.tree.map(np.testing.assert_array_equal, found["lora"], fresh)
    step(state, batch)


class Experts(nn.Module):
    """A product with batch dims, a cond, a leaf used along both of its dims, an unused one."""

    @nn.compact
    def __call__(self, x):
        normal = nn.initializers.normal()
        experts = self.param("experts", normal, (2, 6, 6))
        both = self.param("both", normal, (6, 6))
        branch = self.param("branch", normal, (6, 6))
        fine = self.param("fine", normal, (6, 3))
        x = jnp.einsum("ebi,eij->ebj", jnp.stack([x, x]), experts).sum(0)
        x = (x @ both) @ both.T
        x = jax.lax.cond(x.sum() > 0, lambda x: x @ branch, lambda x: x, x)
        return x @ fine

    def loss(self, batch, *, train):
        return jnp.mean((self(batch["x"]) - batch["y"]) ** 2)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ("nothing", "targets='nothing' matches no leaf; the dense leaves of the model are fine"),
        ("experts", "experts, which is not dense: its product has batch dims"),
        ("both", "both, which is not dense: its products do not all contract the same dims"),
        ("branch", "branch, which is not dense: the loss passes it to `cond`"),
    ],
)
def test_what_is_not_dense_is_refused(targets, words, mesh24):
    _, step = lora_step(Experts(), mesh24, targets)
    with pytest.raises(ValueError, match=f"(?s).*{words}"):
        step.init(KEY, vectors(8))


def test_an_embedding_is_refused_with_the_dense_leaves_named(mesh24):
    _, step = lora_step(GPT.tiny(), mesh24, "wte")
    message = (
        "matches wte/embedding, which is not dense: the loss passes it to `gather`; the dense "
        "leaves of the model are h/attn/c_attn/kernel, h/attn/c_proj/kernel, h/mlp/c_fc/kernel"
    )
    with pytest.raises(ValueError, match=message):
        step.init(KEY, tokens(8))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"targets": "("}, "is no regular expression"),
        ({"rank": 0}, "rank=0"),
        ({"alpha": 0}, "alpha=0 must be above 0"),
        ({"frozen": "int2"}, "frozen='int2'; choose None, 'int8', 'int4'"),
    ],
)
def test_options_out_of_range(options, words):
    with pytest.raises(ValueError, match=words):
        zeroxla.lora(GPT.tiny(), **{"targets": "kernel", **options})


def test_other_misuse(mesh24):
    lora, step = lora_step(GPT.tiny(), mesh24, r"c_fc/kernel")
    with pytest.raises(ValueError, match="no step has traced yet"):
        lora.merge({})
    with pytest.raises(ValueError, match="has adapters already"):
        zeroxla.lora(lora, targets="kernel")
    with pytest.raises(ValueError, match="give lora the model itself"):
        zeroxla.lora(zeroxla.Pipeline.from_model(GPT.tiny()), targets="kernel")
    step.abstract_state(tokens(8))
    with pytest.raises(ValueError, match="base/h/attn/c_attn/bias has the shape None"):
        lora.merge({"lora": {}})
    with pytest.raises(ValueError, match=r"h/attn/c_attn/bias .* is missing"):
        lora.init_from(step, {}, KEY)


@pytest.mark.slow
def test_alpha_counts(mesh24):
    params = None
    deltas = []
    for alpha in (ALPHA, 3 * ALPHA):
        lora = zeroxla.lora(GPT.tiny(), targets="c_fc/kernel", rank=RANK, alpha=alpha)
        step = zeroxla.make_step(lora, mesh24, optax.sgd(0.1), config=CONFIG)
        params = params or with_random_b(zeroxla.full_params(step.init(KEY, tokens(8))))
        step.abstract_state(tokens(8))
        merged = lora.merge(params)["h"]["mlp"]["c_fc"]["kernel"]
        deltas.append(merged - params["base"]["h"]["mlp"]["c_fc"]["kernel"])
    np.testing.assert_allclose(deltas[1], 3 * deltas[0], rtol=1e-3, atol=1e-6)


def dense_targets(case, batch):
    """A pattern of all dense leaves of a model; None if it has none."""
    lora = zeroxla.lora(case.make(), targets="(?!)")
    adapted = adapt(lora, case.loss)
    with pytest.raises(ValueError) as error:
        jax.eval_shape(adapted.init, KEY, batch)
    names = str(error.value).partition("dense leaves of the model are ")[2].split(" and ")[0]
    return None if names == "none" else "|".join(f"^{n}$" for n in names.split(", "))


# Loops in loops, other layer dims, loops backward, casts before them, remat around and inside,
# leaves read by every turn, state, several inputs' dims, a leaf in two places.
SHAPES = (
    *("nested_scans", "scan_axis_1", "scan_in_reverse", "cast_before_scan", "remat_of_scan"),
    *("remat_in_scan", "recurrent", "batchnorm", "encoder_decoder", "shared_module", "inner_jit"),
    *("nnx_scan_with_state", "scan_with_constants", "alexnet", "gpt_scan_remat"),
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "frozen"), [(name, (None, "int4", "int8")[i % 3]) for i, name in enumerate(SHAPES)]
)
def test_every_dense_leaf_of_other_models(name, frozen, mesh24, monkeypatch):
    monkeypatch.setattr(at_rest, "MIN_ELEMENTS", 16)
    case = CASES[name]
    batch = case.batch(8 * case.rows)
    targets = dense_targets(case, jax.tree.map(lambda x: x[: case.rows], batch))
    assert targets is not None, "the model has no dense leaf"
    lora = zeroxla.lora(case.make(), targets=targets, rank=2, frozen=frozen)
    config = zeroxla.ZeroConfig(persistence_threshold=0, unit_elements=case.unit_elements)
    step = zeroxla.make_step(lora, mesh24, optax.sgd(0.1), loss=case.loss, config=config)
    state = step.init(KEY, batch)
    model_state = jax.device_get(state.model_state)
    params = with_random_b(zeroxla.full_params(state))
    adapted = adapt(case.make(), case.loss)

    def loss(adapters, *args, train):
        return adapted.loss(lora.merge({**params, "lora": adapters}), *args, train=train)

    reference = Reference(init=adapted.init, loss=loss, world=8)
    gradients = jax.jit(reference.gradients)
    want, _, expected, _ = gradients(params["lora"], model_state, state.key, 0, batch)
    new = replaced(step, state, params)
    new = dataclasses.replace(new, model_state=state.model_state, key=state.key)
    value, grads = step.grad(new, batch)
    # x W + (x A) B and x (W + A B) round differently, the more so where the model casts W, but not
    # A and B, to bfloat16; a wrong product is off by tenths.
    tolerance = 2e-2 if name == "cast_before_scan" else 1e-4
    assert float(value) == pytest.approx(float(want), rel=tolerance, abs=1e-6)
    assert worst(relative_errors(grads["lora"], expected))[1] < tolerance
