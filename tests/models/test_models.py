"""The five models: shapes, counts, mathematics (against Transformers), dtypes, losses."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tools.hugging_face import gpt_tree, llama_tree, recorded
from tools.quick import quick_compilation, thinned  # noqa: F401

from zeroxla.models import GPT, MLP, AlexNet, Llama, Mixtral
from zeroxla.models.alexnet import adaptive_average_pool, alexnet_layers
from zeroxla.models.losses import classification_loss, next_token_loss

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOKENS = {"tokens": np.random.default_rng(7).integers(0, 64, (2, 13), np.int32)}
IMAGES = {"image": np.ones((2, 63, 63, 3), np.float32), "label": np.array([1, 3])}

ALEXNET_COUNTS = [
    *(23296, 0, 0, 307392, 0, 0, 663936, 0, 884992, 0, 590080, 0, 0),
    *(0, 0),
    *(0, 37752832, 0, 0, 16781312, 0, 40970),
]


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@partial(jax.jit, static_argnums=0)
def linen_params(module, batch):
    return module.init(jax.random.key(0), batch, train=False, method="loss")


@partial(jax.jit, static_argnums=0)
def nnx_parts(preset):
    return nnx.split(preset(nnx.Rngs(0)))


def linen_loss(module, variables, batch, train=False, rngs=None):
    return module.apply(variables, batch, train=train, method="loss", rngs=rngs)


def nnx_loss(graphdef, state, batch):
    return nnx.merge(graphdef, state, copy=True).loss(batch, train=True)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (GPT.tiny(), 28_544),
        (GPT.bytes(), 4_870_144),
        (GPT.small(), 124_439_808),
        (GPT.small(scan=False), 124_439_808),
        (GPT.xl(), 1_557_611_200),
    ],
)
def test_gpt_presets_have_the_documented_size(preset, expected):
    assert count(jax.eval_shape(partial(linen_params, preset), TOKENS)) == expected


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (Llama.tiny(), 22_688),
        (Llama.tiny(scan=False, tie=True), 22_688 - 64 * 32),
        (Llama.small(), 124_668_672),
        (Llama.llama3_8b(), 8_030_261_248),
        (Mixtral.tiny(), 35_488),
        (Mixtral.tiny(scan=False, tie=True), 35_488 - 64 * 32),
        (Mixtral.mixtral_8x7b(), 46_702_792_704),
    ],
)
def test_llama_and_mixtral_presets_have_the_documented_size(preset, expected):
    model = nnx.eval_shape(lambda: preset(nnx.Rngs(0)))
    assert count(nnx.state(model, nnx.Param)) == expected
    assert count(nnx.state(model, nnx.Not(nnx.Param))) == 0


@pytest.mark.parametrize(
    ("preset", "channels", "expected"),
    [
        (MLP.tiny(), 1, 26_506),
        (MLP.small(), 1, 669_706),
        (AlexNet.tiny(), 3, 227_150),
        (AlexNet.small(), 3, 3_579_098),
        (AlexNet.full(), 3, 57_044_810),
        (AlexNet.full(classes=1000), 3, 61_100_840),
    ],
)
def test_image_presets_have_the_documented_size(preset, channels, expected):
    batch = {"image": jnp.zeros((2, 28, 28, channels)), "label": jnp.zeros(2, int)}
    assert count(jax.eval_shape(partial(linen_params, preset), batch)) == expected


def test_alexnet_is_the_torchvision_list_of_22_layers():
    shape = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    counts, shapes = [], []
    for layer in alexnet_layers(classes=10):
        if isinstance(layer, nn.Dropout):
            layer = layer.clone(deterministic=True)
        if isinstance(layer, nn.Module):
            shape, variables = jax.eval_shape(
                partial(layer.init_with_output, jax.random.key(0)), shape
            )
        else:
            shape, variables = jax.eval_shape(layer, shape), {}
        counts.append(count(variables))
        shapes.append(shape.shape[1:])
    assert counts == ALEXNET_COUNTS
    assert shapes[0] == (55, 55, 64)
    assert shapes[12] == (6, 6, 256)
    assert shapes[14] == (9216,)

    whole = jax.eval_shape(partial(linen_params, AlexNet.full()), IMAGES)["params"]
    assert {int(name.split("_")[1]): count(leaf) for name, leaf in whole.items()} == {
        i: number for i, number in enumerate(counts) if number
    }


@pytest.mark.parametrize("size", [(8, 8), (28, 28), (62, 80), (63, 63), (96, 64), (224, 224)])
def test_alexnet_takes_images_of_any_size(size):
    model = AlexNet.tiny()
    image = jnp.zeros((2, *size, 3))
    variables = jax.eval_shape(model.init, jax.random.key(0), image)
    assert jax.eval_shape(model.apply, variables, image).shape == (2, 10)


@pytest.mark.parametrize("size", [(1, 1), (6, 6), (7, 13), (5, 12)])
def test_adaptive_pool_averages_the_cells_of_the_definition(size):
    x = np.random.default_rng(0).normal(size=(2, *size, 3)).astype(np.float32)
    expected = np.empty((2, 6, 6, 3))
    for i in range(6):
        for j in range(6):
            rows = slice(i * size[0] // 6, -(-(i + 1) * size[0] // 6))
            columns = slice(j * size[1] // 6, -(-(j + 1) * size[1] // 6))
            expected[:, i, j] = x[:, rows, columns].mean(axis=(1, 2))
    np.testing.assert_allclose(adaptive_average_pool(jnp.asarray(x), size=6), expected, atol=1e-6)


def stack_gpt(variables, layers):
    """Return the scan form of unrolled GPT variables."""
    params = dict(variables["params"])
    blocks = [params.pop(f"h_{i}") for i in range(layers)]
    return {"params": {**params, "h": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}}


@pytest.mark.slow
@pytest.mark.parametrize("change", thinned([{"scan": True, "remat": True}], slow=[{"remat": True}]))
def test_gpt_scan_and_remat_change_neither_loss_nor_gradients(change):
    plain, other = GPT.tiny(scan=False), GPT.tiny(**{"scan": False, **change})
    variables = linen_params(plain, TOKENS)
    convert = partial(stack_gpt, layers=2) if other.scan else lambda tree: tree

    def value_and_grad(model, variables):
        loss = lambda v: linen_loss(model, v, TOKENS)[0]  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(variables)

    loss, grads = value_and_grad(plain, variables)
    other_loss, other_grads = value_and_grad(other, convert(variables))
    np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
    jax.tree.map(
        partial(np.testing.assert_allclose, atol=1e-6, rtol=1e-4), other_grads, convert(grads)
    )


@pytest.mark.slow
@pytest.mark.parametrize("change", thinned([{"scan": True, "remat": True}], slow=[{"remat": True}]))
def test_llama_scan_and_remat_change_neither_loss_nor_gradients(change):
    graphdef, state = nnx_parts(Llama.tiny(scan=False))
    other = nnx.eval_shape(lambda: Llama.tiny(**{"scan": False, **change})(nnx.Rngs(0)))

    def convert(state):
        tree = nnx.to_pure_dict(state)
        if other.scan:
            blocks = [tree["layers"][i] for i in range(2)]
            tree["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
        return tree

    def value_and_grad(graphdef, tree):
        state = nnx.State(tree)
        loss = jax.jit(jax.value_and_grad(lambda state: nnx_loss(graphdef, state, TOKENS)[0]))
        return loss(state)

    loss, grads = value_and_grad(graphdef, nnx.to_pure_dict(state))
    other_loss, other_grads = value_and_grad(nnx.graphdef(other), convert(state))
    np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
    jax.tree.map(
        partial(np.testing.assert_allclose, atol=1e-6, rtol=1e-4),
        nnx.to_pure_dict(other_grads),
        convert(grads),
    )


@pytest.mark.slow
def test_language_models_do_not_see_later_tokens():
    tokens = TOKENS["tokens"][:, :12]
    changed = tokens.copy()
    changed[:, 7] += 1
    gpt = GPT.tiny(tie=False)
    variables = linen_params(gpt, TOKENS)
    graphdef, state = nnx_parts(Llama.tiny())
    for model in (
        jax.jit(partial(gpt.apply, variables)),
        jax.jit(lambda tokens: nnx.merge(graphdef, state, copy=True)(tokens)),
    ):
        before, after = model(tokens), model(changed)
        np.testing.assert_array_equal(before[:, :7], after[:, :7])
        assert jnp.abs(before[:, 7:] - after[:, 7:]).min(axis=-1).max() > 0


def products(jaxpr):
    """Yield every matrix product and convolution of a jaxpr, sub-jaxprs included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from products(inner)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (GPT.tiny(), TOKENS),
        (GPT.tiny(scan=False, tie=False), TOKENS),
        (Llama.tiny(), TOKENS),
        (Mixtral.tiny(), TOKENS),
        (Mixtral.tiny(routing="dense"), TOKENS),
        (MLP.tiny(), IMAGES),
        (AlexNet.tiny(), IMAGES),
    ],
)
def test_bfloat16_parameters_compute_in_bfloat16_with_a_float32_loss(model, batch):
    if isinstance(model, nn.Module):
        state = jax.eval_shape(partial(linen_params, model), batch)
        loss = lambda state: linen_loss(model, state, batch)[0]  # noqa: E731
    else:
        graphdef, state = jax.eval_shape(partial(nnx_parts, model))
        loss = lambda state: nnx_loss(graphdef, state, batch)[0]  # noqa: E731
    low = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), state)
    jaxpr = jax.make_jaxpr(loss)(low)
    assert jaxpr.out_avals[0].dtype == jnp.float32
    found = list(products(jaxpr.jaxpr))
    assert len(found) >= 3
    for eqn in found:
        assert {var.aval.dtype for var in eqn.invars} == {jnp.dtype(jnp.bfloat16)}, eqn


@pytest.mark.parametrize(
    ("model", "batch"),
    thinned(
        [(GPT.tiny(dropout=0.3, layers=1), TOKENS)],
        slow=[(MLP.tiny(dropout=0.3), IMAGES)],
        rows=True,
    ),
)
def test_dropout_acts_in_train_only(model, batch):
    variables = linen_params(model, batch)

    def loss(seed, train):
        return linen_loss(model, variables, batch, train, {"dropout": jax.random.key(seed)})[0]

    assert "random_bits" not in str(jax.make_jaxpr(partial(loss, train=False))(0))
    first, again, other = jax.jit(jax.vmap(partial(loss, train=True)))(jnp.array([0, 0, 1]))
    assert first == again
    assert first != other


def test_scanned_gpt_drops_differently_in_each_layer():
    # With all else zero each block adds its own dropout mask times the last bias, so the residual
    # is a sum of two masks: three values if they differ, two if they are the same.
    model = GPT.tiny(dropout=0.5, layers=2, tie=False)
    params = jax.tree.map(jnp.zeros_like, linen_params(model, TOKENS)["params"])
    params["h"]["mlp"]["c_proj"]["bias"] += 1
    params["ln_f"]["scale"] += 1
    params["lm_head"] = jnp.eye(64, 32)
    rngs = {"dropout": jax.random.key(0)}
    logits = jax.jit(partial(model.apply, train=True))(
        {"params": params}, jnp.zeros((1, 4), int), rngs=rngs
    )
    assert np.unique(np.round(logits[0, 0, :32], 4)).size == 3


def test_masked_loss_counts_only_the_mask():
    logits = jax.random.normal(jax.random.key(0), (2, 12, 64))
    mask = jnp.zeros((2, 12), bool).at[0, 3:7].set(True).at[1, 11].set(True)
    loss, metrics = next_token_loss(logits, {**TOKENS, "mask": mask})
    logp = np.asarray(jax.nn.log_softmax(logits))
    chosen = np.take_along_axis(logp, np.asarray(TOKENS["tokens"])[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(loss, -chosen[np.asarray(mask)].mean(), rtol=1e-6)
    assert metrics == {"weight": 5}
    nothing, metrics = next_token_loss(logits, {**TOKENS, "mask": jnp.zeros((2, 12))})
    assert nothing == 0
    assert metrics == {"weight": 0}


def test_classification_loss_and_accuracy():
    logits = jnp.array([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 0.5]])
    label = np.array([0, 1, 1, 1])
    loss, metrics = classification_loss(logits, jnp.asarray(label))
    expected = -np.asarray(jax.nn.log_softmax(logits))[np.arange(4), label].mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert metrics["accuracy"] == 0.75


def test_a_sequence_beyond_the_positions_is_an_error():
    with pytest.raises(ValueError, match=r"sequence of 33 tokens.*32 positions.*length=33"):
        GPT.tiny().init(jax.random.key(0), jnp.zeros((1, 33), int))


def test_heads_that_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match="width 32 does not divide into 5 heads"):
        GPT.tiny(heads=5).init(jax.random.key(0), jnp.zeros((1, 4), int))
    with pytest.raises(ValueError, match="width 32, heads 4, kv_heads 3"):
        Llama.tiny(kv_heads=3)(nnx.Rngs(0))


# Parity with Hugging Face Transformers.


def gpt_forward(config, scan):
    model = GPT(
        vocab=config["vocab_size"],
        length=config["n_positions"],
        layers=config["n_layer"],
        width=config["n_embd"],
        heads=config["n_head"],
        scan=scan,
    )

    def forward(params, tokens, positions=None, mask=None):
        variables = {"params": params}
        if scan:
            variables = stack_gpt(variables, config["n_layer"])
        return model.apply(variables, tokens, positions_BL=positions, mask_BL=mask)

    return forward


def llama_forward(config, scan):
    model = nnx.eval_shape(
        lambda: Llama(
            vocab=config["vocab_size"],
            layers=config["num_hidden_layers"],
            width=config["hidden_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            hidden=config["intermediate_size"],
            theta=config["rope_parameters"]["rope_theta"],
            eps=config["rms_norm_eps"],
            tie=config["tie_word_embeddings"],
            scan=scan,
            rngs=nnx.Rngs(0),
        )
    )

    def forward(params, tokens, positions=None, mask=None):
        blocks = [params["layers"][str(i)] for i in range(config["num_hidden_layers"])]
        if scan:
            layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
        else:
            layers = dict(enumerate(blocks))
        module = nnx.merge(nnx.graphdef(model), nnx.State({**params, "layers": layers}), copy=True)
        return module(tokens, positions_BL=positions, mask_BL=mask)

    return forward


@pytest.mark.parametrize(
    ("name", "scan"), [("d_gpt2", True), ("d_llama_mha", False), ("d_llama_gqa_tied", True)]
)
def test_logits_and_loss_equal_transformers(name, scan):
    config, tensors, data = recorded(name)
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    is_gpt = name == "d_gpt2"
    forward = (gpt_forward if is_gpt else llama_forward)(config, scan)
    # The recorded loss counts every target that is a token, also the first one of a padded row.
    mask = data["labels"][:, 1:] != -100

    @jax.jit
    def results(params, tokens, positions, real):
        padded = forward(params, tokens, positions, real)
        loss, _ = next_token_loss(padded[:, :-1], {"tokens": tokens, "mask": mask})
        return padded, forward(params, tokens[2:3]), loss

    params = (gpt_tree if is_gpt else llama_tree)(tensors)
    keys = ("input_ids", "position_ids", "attention_mask")
    padded, alone, loss = results(params, *(data[key] for key in keys))
    np.testing.assert_allclose(alone, data["logits_row2_float64"], atol=1e-4)
    real = data["attention_mask"] != 0
    np.testing.assert_allclose(padded[real], data["logits_leftpad"][real], atol=1e-4)
    np.testing.assert_allclose(loss, data["loss"], atol=1e-5)
