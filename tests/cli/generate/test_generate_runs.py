"""`zeroxla generate` from runs: it continues texts as the commands that trained the models do."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401

from zeroxla.cli.generate.weights import Weights
from zeroxla.cli.main import main

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPT = "the "
SHAPE = ["--layers", "1", "--width", "64", "--heads", "2", "--length", "24"]
TRAIN = ["--batch", "8", "--steps", "40", "--learning-rate", "0.01", "--eval-batches", "1"]
SAMPLE = ["--sample-bytes", "12", "--prompt", PROMPT, "--temperature", "0"]
LIKELIEST = ["--temperature", "0", "--max-new-tokens", "12"]


def command(*arguments):
    return main([*map(str, arguments)])


def generate(*arguments):
    return command("generate", *arguments, "--devices-per-node=8")


@pytest.fixture(scope="module")
def run_of(text, tmp_path_factory):
    """Runs by their options, made when asked for."""
    made = {}

    def get(*options):
        if options not in made:
            run = tmp_path_factory.mktemp("runs") / "run"
            told = ["--run", run, "--data", text, *SHAPE, *TRAIN, *SAMPLE, *options]
            assert command("train", *told) == 0
            made[options] = run
        return made[options]

    return get


RUNS = thinned(
    [((), 1)],
    slow=[
        (("--lora-rank", "2", "--lora-base", "int8"), 2),
        ((), 2),
        (("--pipe", "2"), 1),
        (("--compute-dtype", "bfloat16"), 1),
        (
            (
                "--lora-rank",
                "2",
            ),
            1,
        ),
    ],
    rows=True,
)


@pytest.mark.parametrize(("options", "tensor"), RUNS)
def test_a_text_is_continued_as_at_the_end_of_training(run_of, options, tensor, capsys):
    """There by whole passes, here with a cache. A text ends where its documents end."""
    run = run_of(*options)
    want = (run / "sample.txt").read_text().encode()
    assert "--lora-rank" in options or want == b"the quick brown "
    capsys.readouterr()
    assert generate(run, "--prompt", PROMPT, *LIKELIEST, "--tensor", tensor) == 0
    said = capsys.readouterr()
    assert said.out.encode() == want.split(b"\0")[0] + b"\n"
    assert f"stored as {'int8' if '--lora-base' in options else 'float32'}" in said.err
    assert ("computed in bfloat16" in said.err) == ("bfloat16" in options)


class TestOfAPlainRun:
    @pytest.fixture
    def run(self, run_of):
        return run_of()

    @pytest.mark.slow
    def test_an_older_checkpoint_and_one_that_is_not_there(self, run, capsys):
        assert generate(run, "--prompt", PROMPT, *LIKELIEST, "--step", 40) == 0
        assert generate(run, "--prompt", PROMPT, *LIKELIEST, "--step", 2) == 2
        assert "holds no complete checkpoint of step 2" in capsys.readouterr().err

    @pytest.mark.slow
    @pytest.mark.parametrize("form", ["int8", "int4"])
    def test_its_weights_in_few_bits(self, run, form, capsys, monkeypatch):
        """They say the same; and nothing but the parameters is held."""
        read, states = Weights.read, []

        def kept(self, report):
            states.append(read(self, report))
            return states[0]

        monkeypatch.setattr(Weights, "read", kept)
        capsys.readouterr()
        assert generate(run, "--prompt", PROMPT, *LIKELIEST, "--weights", form) == 0
        said = capsys.readouterr()
        assert said.out == "the quick brown \n"
        assert f"stored as {form}" in said.err
        (state,) = states
        assert not jax.tree.leaves(state.opt_state)
        wires = [x for x in jax.tree.leaves(state.params) if x.dtype == np.uint8]
        assert len(wires) == 4

    @pytest.mark.slow
    def test_sampling_follows_the_seed(self, run, capsys):
        def drawn(*arguments):
            capsys.readouterr()
            assert generate(run, "--prompt", PROMPT, "--max-new-tokens", 16, *arguments) == 0
            return capsys.readouterr().out

        often = ["--temperature", 3]  # the model is sure of the few lines that it has learned
        first = drawn("--seed", 1, *often)
        assert first == drawn("--seed", 1, *often)
        assert first != drawn("--seed", 2, *often)
        assert drawn("--top-k", 1) == drawn("--temperature", 0)


@pytest.mark.slow
def test_adapters_on_floats_may_be_given_a_base_in_few_bits(run_of, capsys):
    run = run_of("--lora-rank", "2")
    assert generate(run, "--prompt", PROMPT, *LIKELIEST, "--weights", "int8") == 0
    assert "stored as int8" in capsys.readouterr().err
    run = run_of("--lora-rank", "2", "--lora-base", "int8")
    assert generate(run, "--prompt", PROMPT, *LIKELIEST, "--weights", "int4") == 2
    assert "stores its frozen base as int8, and it stays so" in capsys.readouterr().err
    assert generate(run, "--prompt", PROMPT, *LIKELIEST, "--adapter", run) == 2
    assert "has adapters of its own" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_on_conversations_is_asked_by_its_template(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    pairs = [{"prompt": f"{i} ", "response": "yes"} for i in range(20)]
    rows.write_text("\n".join(map(json.dumps, [*pairs, *[{"messages": messages}] * 20])))
    run = tmp_path / "run"
    told = [
        "--data",
        rows,
        *SHAPE,
        "--length",
        40,
        *TRAIN,
        *SAMPLE[4:],
        "--sample-bytes",
        8,
        "--prompt",
        "a",
    ]
    assert command("train", "--run", run, *told) == 0
    want = (run / "sample.txt").read_text().encode()
    asked, out = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    asked.write_text(json.dumps({"messages": messages[:1]}))
    options = ["--temperature", 0, "--max-new-tokens", 8]
    assert generate(run, "--file", asked, "--output", out, *options) == 0
    (answer,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert f"a{answer['response']}".encode() == want.split(b"\0")[0]
    assert "chat_template.jinja" in capsys.readouterr().err.replace("\n", "")


@pytest.mark.slow
def test_a_run_of_rlhf(tmp_path, text, capsys):
    run = tmp_path / "run"
    told = ["--pretrain-steps", 2, "--steps", 1, "--rows", 16, "--minibatch", 16, "--layers", 1]
    told += [
        "--length",
        24,
        "--prompt-length",
        4,
        "--new-tokens",
        4,
        "--reward",
        "brief",
        "--eos",
        10,
    ]
    assert command("rlhf", "--run", run, "--data", text, *told, "--lora-rank", 2) == 0
    assert generate(run, "--prompt", PROMPT, *LIKELIEST) == 0
    said = capsys.readouterr().err
    assert "stored as int8" in said
    assert r"at '\x00' or '\n'" in said


@pytest.mark.slow
def test_an_adapter_of_peft_on_a_run(run_of, tmp_path, capsys):
    adapter = tmp_path / "adapter"
    assert command("export", run_of("--lora-rank", "2"), "--adapter", "--output", adapter) == 0
    for form in ("float32", "int8"):
        told = ["--adapter", adapter, "--weights", form]
        assert generate(run_of(), "--prompt", PROMPT, *LIKELIEST, *told) == 0
        assert f"stored as {form}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_images_is_refused(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    run = tmp_path / "run"
    told = ["--image-size", 63, "--width-multiplier", 0.02, "--steps", 1, "--batch", 8]
    assert command("train", "--model", "alexnet", "--run", run, *told, "--eval-batches", 1) == 0
    assert generate(run, "--prompt", PROMPT) == 2
    assert "is a run of alexnet, which tells images apart" in capsys.readouterr().err
