"""`zeroxla generate --weights --adapter`: weights in few bits, and adapters of PEFT."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from tools.generate_command import LIKELIEST, copied, generate
from tools.lora import with_random_b
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.text_models import numbers, wide_text_folder

import zeroxla
from zeroxla.cli.generate.weights import Weights
from zeroxla.models import from_hugging_face

pytestmark = pytest.mark.usefixtures("quick_compilation")


KERNELS = [
    *(("self_attn", f"{name}_proj") for name in "qkvo"),
    *(("mlp", f"{name}_proj") for name in ("gate", "up", "down")),
]
PROMPT = "t1 t2 t3 t4 t5 t6"


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A folder of a model with layers large enough to be stored in few bits."""
    return wide_text_folder(tmp_path_factory.mktemp("wide") / "llama", "llama")


def read(folder, **lora):
    """Return a folder's model, plain or with adapters, its step and its state."""
    model = from_hugging_face(folder)
    model = zeroxla.lora(model, **lora) if lora else model
    step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=1), optax.set_to_zero())
    step.abstract_state({"tokens": np.zeros((8, 9), np.int32)})
    return model, step, zeroxla.from_pretrained(model, folder, step)


def tokens_of(step, state, prompt):
    """Return the likeliest tokens after a prompt, by the engine of a step."""
    engine = zeroxla.HybridEngine(step)
    answers = engine.generate(
        state, [numbers(prompt)], key=jax.random.key(0), max_new_tokens=12, temperature=0
    )
    return answers.tokens[0].tolist()


@pytest.mark.parametrize(
    ("form", "largest"), thinned([("int4", 0.15)], slow=[("int8", 0.006)], rows=True)
)
def test_in_few_bits_answer_as_the_rounded_weights(wide, form, largest, monkeypatch, capsys):
    """And nothing but the parameters is held."""
    read_weights, held = Weights.read, []

    def kept(self, report):
        held.append((self.model, read_weights(self, report)))
        return held[0][1]

    monkeypatch.setattr(Weights, "read", kept)
    assert generate(wide, "--prompt", PROMPT, "--weights", form, *LIKELIEST) == 0
    said = capsys.readouterr()
    assert f"stored as {form}" in said.err
    ((model, stored),) = held
    assert not jax.tree.leaves(stored.opt_state)
    rounded = model.merge(zeroxla.full_params(stored))  # its adapters are zero
    _, step, state = read(wide)
    given = zeroxla.full_params(state)
    for part, name in KERNELS:
        x, y = (tree["layers"][part][name]["kernel"] for tree in (given, rounded))
        assert 0 < np.abs(x - y).max() / np.abs(x).max() < largest
    want = tokens_of(step, step.init_from(rounded, jax.random.key(0)), PROMPT)
    assert numbers(said.out)[6:] == want


def test_bfloat16_stays_bfloat16_and_no_token_changes(folder_of, tmp_path, monkeypatch, capsys):
    """The state held float32 before, beside the copy in bfloat16 that computes."""
    read_weights, held = Weights.read, []

    def kept(self, report):
        held.append(read_weights(self, report))
        return held[-1]

    monkeypatch.setattr(Weights, "read", kept)
    folder, said = copied(folder_of, "llama", tmp_path, dtype="bfloat16"), []
    for more in ([], ["--weights", "float32"]):
        assert generate(folder, "--prompt", PROMPT, *more, *LIKELIEST) == 0
        said.append(capsys.readouterr())
    for state, form, width, text in zip(held, ("bfloat16", "float32"), (2, 4), said, strict=True):
        leaves = jax.tree.leaves(state.params)
        assert {str(x.dtype) for x in leaves} == {form}
        assert sum(x.nbytes for x in leaves) == width * sum(x.size for x in leaves)
        assert f"stored as {form} (" in text.err
    assert said[0].out == said[1].out


@pytest.mark.slow
def test_that_no_bits_are_saved_is_said(folder_of, capsys):
    with pytest.warns(UserWarning, match="frozen='int8' is without effect: no dense leaf"):
        assert generate(folder_of("llama"), "--prompt", "t1", "--weights=int8", *LIKELIEST) == 0
    assert "stored as float32" in capsys.readouterr().err


@pytest.mark.parametrize("form", thinned(["float32"], slow=["int8"]))
def test_with_an_adapter_of_peft(wide, form, tmp_path, capsys):
    adapter = tmp_path / "adapter"
    frozen = None if form == "float32" else form
    model, step, state = read(wide, frozen=frozen, targets="(q|v)_proj/kernel", rank=2)
    params = zeroxla.full_params(state)
    params = {**jax.tree.map(lambda x: 3 * x, with_random_b(params)), "base": params["base"]}
    state = step.init_from(params, jax.random.key(0))
    zeroxla.export_adapter(state, adapter, model=model)
    told = ["--prompt", PROMPT, "--adapter", adapter, "--weights", form]
    assert generate(wide, *told, *LIKELIEST) == 0
    want = tokens_of(step, state, PROMPT)
    assert want != tokens_of(*read(wide)[1:], PROMPT)
    assert numbers(capsys.readouterr().out)[6:] == want
