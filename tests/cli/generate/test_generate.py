"""`zeroxla generate` continues texts, as Transformers recorded it; and what it refuses."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from tools.families import DECODERS
from tools.generate_command import LIKELIEST, copied, generate
from tools.hugging_face import read_file, write_file
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.text_models import greedy, numbers, words

pytestmark = pytest.mark.usefixtures("quick_compilation")

QUICK = [("llama", 2, "float32")]
SLOW = [
    *((name, 2, "float32") for name in DECODERS if name != "llama"),
    ("llama", 1, "float32"),
    ("gpt2", 4, "float32"),
]


@pytest.mark.parametrize(("name", "tensor", "weights"), thinned(QUICK, slow=SLOW, rows=True))
def test_texts_are_continued_as_by_transformers(folder_of, name, tensor, weights, tmp_path, capsys):
    """And shown one after another, each after its prompt."""
    prompt, want = greedy(name)
    folder = copied(folder_of, name, tmp_path, eos_token_id=None)
    asked = {"do_sample": True, "repetition_penalty": 1.2}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    told = ["--prompt", prompt, "--prompt", "t1 t2", "--tensor", tensor, "--weights", weights]
    assert generate(folder, *told, *LIKELIEST) == 0
    said = capsys.readouterr()
    first, second = said.out.removesuffix("\n").split("\n\n")
    assert first == f"{prompt} {words(want)}"
    assert second.startswith("t1 t2 t")
    assert len(numbers(second)) == 14
    assert f"tensor={tensor}" in said.err
    assert "Sampling: the likeliest token each time; an answer ends after 12 tokens\n" in said.err
    assert "24 tokens, the first after" in said.err
    assert "tokens/s" in said.err
    assert "generation_config.json has repetition_penalty=1.2, which is not followed" in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["LLAMA"], "no prompt: give one of --prompt TEXT, --file FILE and --chat"),
        (["LLAMA", "--prompt", "t1", "--chat"], "--prompt and --chat: give one of"),
        (["LLAMA", "--file", "x.jsonl"], "--file x.jsonl: give --output too"),
        (["LLAMA", "--prompt", "t1", "--output", "x"], "--output: without effect beside --prompt"),
        (["LLAMA", "--prompt", "t1", "--system", "t"], "--system: without effect beside --prompt"),
        (["LLAMA", "--prompt", "t1", "--chat-template", "t"], "--chat-template t: without effect"),
        (["LLAMA", "--prompt", "t1", "--temperature", "-1"], "--temperature -1.0 must be at least"),
        (["LLAMA", "--prompt", "t1", "--top-p", "0"], "--top-p 0.0 must be above 0"),
        (["LLAMA", "--prompt", "t1", "--stop", ""], "--stop with an empty text"),
        (
            ["LLAMA", "--prompt", "t1", "--eos", "99"],
            "the token 99 is to end an answer",
        ),
        (["LLAMA", "--prompt", "t1", "--step", "3"], "--step 3: without effect"),
        (["LLAMA", "--prompt", "t1", "--tensor", "3"], "tensor=3 does not divide the 8 devices"),
        (["LLAMA", "--prompt", "t1", "--max-new-tokens", "64"], "ask for 63 new ones at most"),
        (["LLAMA", "--prompt", "t1 " * 64], "there is no room for an answer"),
        (["LLAMA", "--prompt", "t1", "--adapter", "EMPTY"], "adapter_config.json cannot be read"),
        (["LLAMA", "--file", "EMPTY/x.txt", "--output", "x"], "ends with .txt"),
        (["LLAMA", "--file", "EMPTY/x.jsonl", "--output", "x"], "No such file"),
        (["LLAMA", "--chat", "--nodes", "2"], "--chat with --nodes 2: one process reads"),
        (["NO_SYSTEM", "--chat", "--system", "t1"], "the chat template refuses the conversation"),
        (["BERT", "--prompt", "t1"], "sees both sides of a token (bert)"),
        (["EMPTY", "--prompt", "t1"], "holds no run to generate from"),
        (["EMPTY/nothing", "--prompt", "t1"], "is no folder"),
    ],
)
def test_bad_inputs(folder_of, tmp_path, capsys, arguments, message):
    """All are found before anything is compiled, and nothing is written."""
    places = {"LLAMA": folder_of("llama"), "BERT": folder_of("bert"), "EMPTY": tmp_path}
    places["NO_SYSTEM"] = places["LLAMA"].with_name("no_system")
    if not places["NO_SYSTEM"].exists():
        shutil.copytree(places["LLAMA"], places["NO_SYSTEM"])
        (places["NO_SYSTEM"] / "chat_template.jinja").write_text(
            "{{ raise_exception('no system') if messages[0].role == 'system' }}"
        )
    told = []
    for word in arguments:
        for name, place in places.items():
            word = word.replace(name, str(place))
        told.append(word)
    assert generate(*told) == 2
    said = capsys.readouterr()
    assert "error: " in said.err
    assert message in said.err.replace("\n", " ")
    assert not said.out
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_weights_that_are_not_finite_are_an_error(folder_of, tmp_path, capsys):
    folder = copied(folder_of, "llama", tmp_path)
    tensors = read_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = np.full_like(tensors["lm_head.weight"], 3e38)
    write_file(folder / "model.safetensors", tensors)
    assert generate(folder, "--prompt", "t1", *LIKELIEST) == 2
    assert "the logits of the rows [0] are not finite" in capsys.readouterr().err
