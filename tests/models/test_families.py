"""Models of public families against recordings of Transformers (PyTorch)."""

import json

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tools.chatglm import CONFIG
from tools.families import (
    DECODERS,
    forward_of,
    leaves_in,
    loss_of,
    recorded,
    tensors_of,
    write_folder,
)
from tools.families import FAMILIES as FOLDERS
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import make_step
from zeroxla.models import GPT, Decoder, DecoderConfig, Llama, from_hugging_face
from zeroxla.models.families import FAMILIES
from zeroxla.models.losses import cross_entropy
from zeroxla.models.rotary import Rotary

pytestmark = pytest.mark.usefixtures("quick_compilation")

UNROLLED = [(name, False) for name in DECODERS if name != "qwen3_moe_mixed"]
"""The mixed one is never scanned."""
QUICK = ("llama", "gemma3_text", "mixtral")
"""Of the others the quick tests look at the logits alone."""
SIMILAR = ("olmo2", "granitemoe", "gemma3", "deepseek_v3_plain")
"""Nearly all that is in these is in others, too."""


@pytest.mark.parametrize(
    ("name", "scan"),
    thinned(
        [(name, None) for name in QUICK],
        slow=[*((name, None) for name in DECODERS if name not in QUICK), *UNROLLED],
        rows=True,
    ),
)
def test_a_tiny_checkpoint_computes_what_transformers_computes(tmp_path, name, scan):
    """Logits, greedy tokens, the loss, and its gradient by every tensor, within 1e-5."""
    data = recorded(name)
    folder = write_folder(tmp_path / "hub", name, tensors_of(name))
    options = {} if scan is None else {"scan": scan}
    model = from_hugging_face(folder, **options)
    leaves = leaves_in(folder, model)
    forward = forward_of(model)
    tokens, mask = data["tokens"], data["mask"]
    prompt, new = 6, data["greedy"].shape[1]
    room = prompt + new - tokens.shape[1]
    padding = [(0, 0), (0, room)]
    tokens, mask = np.pad(tokens, padding), np.pad(mask, padding)

    @jax.jit
    def run(leaves, tokens, mask):
        logits = forward(leaves, tokens, mask_BL=mask)
        loss, gradients = jax.value_and_grad(lambda x: loss_of(forward, x, tokens, mask))(leaves)
        return logits, loss, gradients

    logits, loss, gradients = run(leaves, tokens, mask)
    real = data["mask"] != 0
    found = np.asarray(logits)[:, : real.shape[1]]
    np.testing.assert_allclose(found[real], data["logits"][real], atol=1e-5)
    np.testing.assert_allclose(loss, data["loss"], atol=1e-5)
    grads = {key[5:]: data[key] for key in data.files if key.startswith("grad/")}
    expected = leaves_in(write_folder(tmp_path / "grads", name, grads), model)
    assert set(expected) == set(gradients)
    for path, x in gradients.items():
        np.testing.assert_allclose(x, expected[path], atol=1e-5, err_msg="/".join(path))

    assert data["margin"] > 1e-3  # else rounding could choose
    row = np.array(tokens[:1])
    ones = np.ones_like(row)
    for i in range(new):
        both = np.concatenate([row, row]), np.concatenate([ones, ones])
        row[0, prompt + i] = run(leaves, *both)[0][0, prompt + i - 1].argmax()
    np.testing.assert_array_equal(row[:, prompt:], data["greedy"])


@pytest.mark.parametrize(
    "name", thinned([n for n in DECODERS if n not in (*QUICK, *SIMILAR)], slow=SIMILAR)
)
def test_a_tiny_checkpoint_has_the_logits_of_transformers(tmp_path, name):
    """The quick part of the test above."""
    data = recorded(name)
    folder = write_folder(tmp_path / "hub", name, tensors_of(name))
    model = from_hugging_face(folder)
    logits = jax.jit(forward_of(model))(
        leaves_in(folder, model), data["tokens"], mask_BL=data["mask"]
    )
    real = data["mask"] != 0
    np.testing.assert_allclose(np.asarray(logits)[real], data["logits"][real], atol=1e-5)


@pytest.mark.parametrize("scan", thinned([True], slow=[False]))
def test_a_bert_computes_what_transformers_computes(tmp_path, scan):
    data = recorded("bert")
    folder = write_folder(tmp_path / "hub", "bert", tensors_of("bert"))
    model = from_hugging_face(folder, scan=scan)
    leaves = leaves_in(folder, model)
    forward = forward_of(model)
    tokens, mask = jnp.asarray(data["tokens"]), jnp.asarray(data["mask"])

    @jax.jit
    def run(leaves):
        def loss(leaves):
            logits = forward(leaves, tokens, mask_BL=mask)
            losses = cross_entropy(logits, tokens)
            return (losses * mask).sum() / mask.sum(), logits

        return jax.value_and_grad(loss, has_aux=True)(leaves)

    (loss, logits), gradients = run(leaves)
    real = data["mask"] != 0
    np.testing.assert_allclose(logits[real], data["logits"][real], atol=1e-5)
    np.testing.assert_allclose(loss, data["loss"], atol=1e-5)
    grads = {key[5:]: data[key] for key in data.files if key.startswith("grad/")}
    expected = leaves_in(write_folder(tmp_path / "grads", "bert", grads), model)
    for path, x in gradients.items():
        np.testing.assert_allclose(x, expected[path], atol=1e-5, err_msg="/".join(path))


def test_a_chatglm_is_a_glm_under_other_names(tmp_path):
    """Its class comes with its files; the tensors of the recorded GLM are put under its names."""
    data, glm = recorded("glm"), tensors_of("glm")
    inside = {
        "input_layernorm.weight": "input_layernorm.weight",
        "post_attention_layernorm.weight": "post_attention_layernorm.weight",
        "self_attn.o_proj.weight": "self_attention.dense.weight",
        "mlp.gate_up_proj.weight": "mlp.dense_h_to_4h.weight",
        "mlp.down_proj.weight": "mlp.dense_4h_to_h.weight",
    }
    tensors = {
        "transformer.embedding.word_embeddings.weight": glm["model.embed_tokens.weight"],
        "transformer.encoder.final_layernorm.weight": glm["model.norm.weight"],
        "transformer.output_layer.weight": glm["lm_head.weight"],
        "transformer.rotary_pos_emb.inv_freq": np.zeros(2, np.float32),
    }
    for i in range(2):
        there, here = f"transformer.encoder.layers.{i}.", f"model.layers.{i}."
        tensors |= {there + name: glm[here + own] for own, name in inside.items()}
        for kind in ("weight", "bias"):
            parts = [glm[f"{here}self_attn.{x}_proj.{kind}"] for x in "qkv"]
            tensors[f"{there}self_attention.query_key_value.{kind}"] = np.concatenate(parts)
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = from_hugging_face(folder)
    logits = forward_of(model)(leaves_in(folder, model), data["tokens"], mask_BL=data["mask"])
    real = data["mask"] != 0
    np.testing.assert_allclose(logits[real], data["logits"][real], atol=1e-5)


def test_the_text_of_gemma_3_has_several_names_in_files(tmp_path):
    """Transformers 4.52 saves it as `model.language_model.`, others as `language_model.model.`"""
    tensors = tensors_of("gemma3")
    newer = {
        f"model.{key.replace('language_model.model.', 'language_model.')}": x
        for key, x in tensors.items()
    }
    first, second = (
        write_folder(tmp_path / folder, "gemma3", own)
        for folder, own in (("old", tensors), ("new", newer))
    )
    model = from_hugging_face(first)
    found = leaves_in(second, model)
    for path, x in leaves_in(first, model).items():
        np.testing.assert_array_equal(found[path], x)


def test_adapters_of_gemma_3_have_the_names_of_its_modules(tmp_path):
    """Under those of the text alone, PEFT would find none of them in the model with images."""
    config = json.loads((FOLDERS / "gemma3" / "config.json").read_text())
    adapted = zeroxla.lora(from_hugging_face(config), targets="self_attn/q_proj", rank=2)
    step = make_step(adapted, zeroxla.make_mesh(nodes=1, devices=jax.devices()[:1]))
    state = step.init(jax.random.key(0), {"tokens": np.zeros((1, 9), np.int32)})
    zeroxla.export_adapter(state, tmp_path, model=adapted)
    names = load_file(tmp_path / "adapter_model.safetensors")
    place = "base_model.model.model.language_model.layers.{}.self_attn.q_proj.lora_{}.weight"
    assert set(names) == {place.format(layer, part) for layer in range(4) for part in "AB"}
    found = zeroxla.lora_from_adapter(from_hugging_face(config), tmp_path)
    assert found.rank == 2


def test_the_layer_of_deepseek_that_predicts_a_second_token_is_left_aside(tmp_path):
    """Public files have it; an export that is like them has it again."""
    more = {f"model.layers.61.{x}.weight": np.ones((2, 2), "f4") for x in ("eh_proj", "enorm")}
    tensors = {**tensors_of("deepseek_v3"), **more}
    folder = write_folder(tmp_path, "deepseek_v3", tensors)
    assert leaves_in(folder, from_hugging_face(folder))
    assert FAMILIES["deepseek_v3"].is_kept("layers.61.eh_proj.weight")
    assert not FAMILIES["deepseek_v3"].is_kept("layers.6.eh_proj.weight")


def test_every_family_has_a_recording():
    kinds = {name.split("_")[0] if name.startswith("llama") else name for name in DECODERS}
    assert set(FAMILIES) - {"chatglm"} <= kinds  # chatglm: see its own test


TINY = {
    "vocab": 16,
    "layers": 2,
    "width": 16,
    "heads": 2,
    "kv_heads": 1,
    "head_width": 8,
    "hidden": 16,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "positions='rotary', rotary=None: rotary positions need rotary"),
        ({"rotary": Rotary(theta=1e4, width=12)}, "rotary width 12, head_width 8"),
        ({"positions": "alibi", "kv_heads": 3}, "kv_heads must divide heads"),
        ({"positions": "alibi", "windowed": (True, False)}, "window=None, windowed="),
        ({"positions": "alibi", "window": 0}, "window=0: a query sees at least its own"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**{**TINY, **changes})


def test_what_a_config_decides_cannot_be_overridden(tmp_path):
    folder = write_folder(tmp_path, "mistral", tensors_of("mistral"))
    with pytest.raises(ValueError, match="hidden would not fit the weights"):
        from_hugging_face(folder, hidden=3)
    with pytest.raises(ValueError, match="routing: the model has no experts"):
        from_hugging_face(folder, routing="capacity")
    with pytest.raises(ValueError, match="scan=True, and only some of the blocks have experts"):
        from_hugging_face(
            write_folder(tmp_path / "mixed", "qwen3_moe_mixed", {"x": np.zeros(1)}), scan=True
        )


def test_a_config_of_other_experts_is_another_model():
    """How tokens come to experts is the user's; how many there are of a token is not."""
    config = json.loads((FOLDERS / "qwen3_moe" / "config.json").read_text())
    build = from_hugging_face(config, routing="capacity", balance=0.3)
    model = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    format = FAMILIES["qwen3_moe"]
    assert format.differences(config, model) == []
    other = {**config, "num_experts_per_tok": 1, "norm_topk_prob": False, "rms_norm_eps": 1e-5}
    assert format.differences(other, model) == [
        "eps is 1e-05, and the model has 1e-06",
        "experts.top_k is 1, and the model has 2",
        "experts.is_normalized is False, and the model has True",
    ]


@pytest.mark.slow
def test_a_row_of_several_documents_is_as_if_each_had_its_own():
    """Packed rows, with a window and slopes too."""
    draw = np.random.default_rng(0)
    lengths = (5, 7, 4)
    tokens = draw.integers(0, 16, (1, sum(lengths)))
    segments = np.repeat([1, 2, 3], lengths)[None]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    rotary = {"rotary": Rotary(theta=1e4, width=8)}
    for more in (rotary, {**rotary, "window": 3}, {"positions": "alibi"}):
        for block in (512, 4):
            config = DecoderConfig(**TINY, **more)
            model = Decoder(config, attention_block=block, rngs=nnx.Rngs(0))
            found = model(
                jnp.asarray(tokens), positions_BL=jnp.asarray(positions), segments_BL=segments
            )
            start = 0
            for n in lengths:
                own = model(jnp.asarray(tokens[:, start : start + n]))
                np.testing.assert_allclose(found[:, start : start + n], own, atol=2e-6)
                start += n


def test_a_loss_reads_segments_and_positions():
    """The quick part of the test below."""
    draw = np.random.default_rng(0)
    batch = {
        "tokens": draw.integers(0, 16, (1, 9)),
        "segments": np.array([[1, 1, 1, 2, 2, 2, 2, 2]]),
        "positions": np.array([[0, 1, 2, 0, 1, 2, 3, 4]]),
    }
    changes = {"layers": 1, "positions": "learned", "length": 8}
    config = DecoderConfig(**{**TINY, **changes})
    graph, state = nnx.split(nnx.jit(lambda: Decoder(config, scan=False, rngs=nnx.Rngs(0)))())
    state = jax.tree.map(lambda x: 20 * x, state)  # scores that matter

    @jax.jit
    def loss(batch):
        return nnx.merge(graph, state).loss(batch, train=True)[0]

    one_document = {"segments": np.ones((1, 8), int), "positions": np.arange(8)[None]}
    found = [
        float(loss({**batch, **changes}))
        for changes in ({}, *({name: x} for name, x in one_document.items()))
    ]
    assert min(abs(found[0] - found[1]), abs(found[0] - found[2])) > 1e-4


@pytest.mark.parametrize("preset", thinned([], slow=[GPT, Llama]))
def test_packed_rows_have_the_loss_of_their_documents(preset):
    """The mean over all targets that count."""
    draw = np.random.default_rng(0)
    lengths = (5, 9, 4)
    rows = [draw.integers(0, 64, n + 1) for n in lengths]
    packed = {
        "tokens": np.concatenate([row[:-1] for row in rows] + [rows[-1][-1:]])[None],
        "segments": np.repeat([1, 2, 3], lengths)[None],
        "positions": np.concatenate([np.arange(n) for n in lengths])[None],
    }
    # A document's last token has no target in a packed row, unless the row ends there.
    ends = np.cumsum(lengths) - 1
    packed["mask"] = np.ones((1, sum(lengths)))
    packed["mask"][0, ends[:-1]] = 0
    adapted = make_step(
        preset.tiny(), zeroxla.make_mesh(nodes=1, devices=jax.devices()[:1])
    ).adapted
    params, state = jax.jit(adapted.init)(jax.random.key(0), packed)

    def loss(batch):
        return adapted.loss(params, state, batch, jax.random.key(1), train=True)[0]

    total = 0.0
    for i, row in enumerate(rows):
        counted = len(row) - 1 - (i < 2)
        mask = (np.arange(len(row) - 1) < counted)[None]
        total += float(loss({"tokens": row[None], "mask": mask})) * counted
    np.testing.assert_allclose(loss(packed), total / packed["mask"].sum(), rtol=1e-6)
