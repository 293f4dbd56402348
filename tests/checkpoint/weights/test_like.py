"""Weights that come from a folder and go back as they came: bits, dtypes, files beside them."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from tools.families import DECODERS, tensors_of, write_folder
from tools.hugging_face import assert_same_tensors, read_export, write_file
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import export_params, from_pretrained, make_step
from zeroxla.models import MLP, from_hugging_face

pytestmark = pytest.mark.usefixtures("quick_compilation")

BATCH = {"tokens": np.zeros((8, 9), np.int32)}
QUICK = ("gpt_neox", "qwen3_moe", "gemma3")
"""Fused head by head, banks of experts, and text in a folder with images. Slow are, beside others,
those that are fused one after the other ("phi3") or tied ("gemma2")."""


def of_the_text(name, tensors):
    """Of a model of text and images, what it exports alone: a model of text."""
    if name != "gemma3":
        return tensors
    prefix = "language_model."
    return {k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)}


@pytest.mark.parametrize(
    "name", thinned(QUICK, slow=[*(n for n in DECODERS if n not in QUICK), "bert"])
)
def test_every_tensor_comes_back_bit_by_bit(tmp_path, name):
    tensors = tensors_of(name)
    mixed = {  # as files are: most in bfloat16, some in float32
        key: x if x.ndim == 1 else x.astype(ml_dtypes.bfloat16) for key, x in tensors.items()
    }
    hub = write_folder(tmp_path / "hub", name, tensors)
    write_file(hub / "model.safetensors", mixed)
    beside = {
        "generation_config.json": b'{"eos_token_id":  2}\n',
        "tokenizer_config.json": b'{"a": "\xc3\xa9"}',
        "chat_template.jinja": b"{{ messages }}",
        "tokenizer.model": b"\x00\xff",
    }
    for file, content in beside.items():
        (hub / file).write_bytes(content)
    model = from_hugging_face(hub)
    step = make_step(model, zeroxla.make_mesh(nodes=2))
    batch = BATCH if name != "bert" else {**BATCH, "targets": BATCH["tokens"]}
    step.abstract_state(batch)
    state = from_pretrained(model, hub, step)
    out = tmp_path / "out"
    export_params(state, out, model=model, like=hub, max_shard_size="20KB")
    assert_same_tensors(read_export(out), mixed)
    for file, content in {**beside, "config.json": (hub / "config.json").read_bytes()}.items():
        assert (out / file).read_bytes() == content

    # Without it: float32, and a config of the model, to which `zeroxla export` adds the folder's.
    config = json.loads((hub / "config.json").read_text())
    more = {key: x for key, x in config.items() if key not in ("dtype", "torch_dtype")}
    export_params(state, out, model=model, config=more)
    wide = {key: x.astype(np.float32) for key, x in of_the_text(name, mixed).items()}
    assert_same_tensors(read_export(out), wide)
    written = json.loads((out / "config.json").read_text())
    kind = config["model_type"]
    assert written["model_type"] == {"gemma3": "gemma3_text"}.get(kind, kind)
    again = from_hugging_face(out)
    assert from_pretrained(again, out, step) is not None


def test_what_cannot_be_like_a_folder_is_refused(tmp_path):
    hub = write_folder(tmp_path / "hub", "llama3", tensors_of("llama3"))
    model = from_hugging_face(hub)
    step = make_step(model, zeroxla.make_mesh(nodes=1))
    step.abstract_state(BATCH)
    state = from_pretrained(model, hub, step)
    with pytest.raises(ValueError, match=r"config=.* would change it; leave one of them out"):
        export_params(state, tmp_path / "out", model=model, like=hub, config={"a": 1})
    images = make_step(MLP.tiny(), zeroxla.make_mesh(nodes=1))
    state = images.init(
        jax.random.key(0),
        {"image": np.zeros((8, 28, 28)), "label": np.zeros(8, int)},
    )
    with pytest.raises(ValueError, match="only the weights of a model with a Hugging Face format"):
        export_params(state, tmp_path / "out", model=MLP.tiny(), like=hub)
