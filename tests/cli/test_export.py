"""`zeroxla export` and `zeroxla train --init`, run as a user runs them."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from tools.hugging_face import read_file, write_file
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import Checkpointer
from zeroxla.cli.data.text import load_corpus
from zeroxla.cli.data.vocabulary import Bytes, Tokens
from zeroxla.cli.main import main
from zeroxla.cli.run_folder import RunFolder
from zeroxla.models import Llama

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = ["--batch", "8", "--length", "16", "--eval-batches", "1", "--sample-bytes", "8"]
SHAPE = ["--layers", "1", "--width", "16", "--heads", "2", "--persistence-threshold", "0"]


def values(run, name):
    return {x["step"]: x[name] for x in RunFolder(run).metrics() if name in x}


def command(*arguments):
    return main([*map(str, arguments)])


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A run of 4 steps."""
    run = tmp_path_factory.mktemp("finished") / "run"
    assert command("train", "--run", run, "--data", text, *SMALL, *SHAPE, "--steps", 4) == 0
    return run


def params_of(run):
    with Checkpointer(run / "checkpoints") as checkpointer:
        return checkpointer.restore_params()


# out


def test_a_run_becomes_a_hugging_face_folder(finished, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--output", out, "--dtype", "bfloat16", "--max-shard-size", "10KB"]
    assert command("export", finished, *arguments) == 0
    said = capsys.readouterr().out
    assert f"Exported step 4 in bfloat16 to {out}" in said
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(f"{f.name}  {f.stat().st_size:,} bytes" in said for f in files)
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["n_layer"], config["vocab_size"]) == ("gpt2", 1, 256)
    tensors = {name: x for f in files for name, x in read_file(f).items()}
    kernel = params_of(finished)["h"]["attn"]["c_attn"]["kernel"]
    found = tensors["transformer.h.0.attn.c_attn.weight"]
    np.testing.assert_array_equal(found, kernel[0].astype(found.dtype))


def test_the_default_folder_and_an_older_step(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    assert command("export", run) == 0
    assert (run / "export" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "--max-shard-size", "0"], "max_shard_size='0'"),
        (["RUN", "--step", "3"], "holds no checkpoint"),
        (["RUN", "--adapter"], "has no adapters; leave it out"),
        (["RUN", "--output", "RUN/config.json/x"], "cannot write the export"),
        (["EMPTY"], "holds no run"),
    ],
)
def test_export_errors(finished, tmp_path, capsys, arguments, message):
    places = {"RUN": str(finished), "EMPTY": str(tmp_path)}
    told = [re.sub("RUN|EMPTY", lambda m: places[m[0]], x) for x in arguments]
    assert command("export", *told) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_a_damaged_newest_checkpoint_is_passed_over(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(run / "checkpoints" / "4", run / "checkpoints" / "9")
    (run / "checkpoints" / "9" / "state" / "about.json").write_text("")
    assert command("export", run) == 0
    said = capsys.readouterr().out
    assert "the checkpoint of step 9 is damaged and passed over" in said
    assert "Exported step 4" in said


# in


@pytest.mark.slow
def test_training_goes_on_from_an_export(finished, text, tmp_path, capsys):
    assert command("export", finished, "--output", tmp_path / "out") == 0
    run = tmp_path / "run"
    told = ["--init", tmp_path / "out", "--run", run, "--data", text, *SMALL]
    assert command("train", *told, "--learning-rate", 0, "--steps", 1) == 0
    assert values(run, "valid_loss")[1] == pytest.approx(values(finished, "valid_loss")[4])
    assert "nats per byte" in capsys.readouterr().out


@pytest.fixture(scope="module")
def pretrained(text, tmp_path_factory):
    """A small Llama with a tokenizer, as Hugging Face saves them."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    folder = tmp_path_factory.mktemp("pretrained")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(f) for f in sorted(text.iterdir())], trainer)
    model = Llama.tiny(vocab=304)
    tokens = {"tokens": np.zeros((8, 9), np.int32)}
    step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=2, devices_per_node=4))
    state = step.init(jax.random.key(0), tokens)
    zeroxla.export_params(state, folder, model=model, config={"bos_token_id": 0})
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.slow
def test_a_pretrained_model_is_trained_on_its_own_tokens(pretrained, text, tmp_path, capsys):
    init = shutil.copytree(pretrained, tmp_path / "init")
    (init / "generation_config.json").write_text('{"eos_token_id":  0}')
    known = json.loads((init / "config.json").read_text())
    known |= {"a_key_of_others": [1, 2], "pad_token_id": 7}
    (init / "config.json").write_text(json.dumps(known))
    run = tmp_path / "run"
    told = ["train", "--run", run, "--init", init, "--data", text, *SMALL]
    assert command(*told, "--steps", 3, "--save-every", 2) == 0
    said = capsys.readouterr().out
    assert "nats per token; token-unigram entropy" in said
    assert (run / "sample.txt").read_text().startswith("def ")
    losses = values(run, "loss")
    # It goes on without the folder that it came from.
    shutil.rmtree(init)
    shutil.rmtree(run / "checkpoints" / "3")
    assert command("train", "--resume", "--run", run) == 0
    assert values(run, "loss") == losses
    assert command("export", run) == 0
    config = json.loads((run / "export" / "config.json").read_text())
    assert config == known  # of which none is lost
    assert (run / "export" / "generation_config.json").read_text() == '{"eos_token_id":  0}'
    for name in ("tokenizer.json",):
        kept, before = ((folder / name).read_bytes() for folder in (run / "export", pretrained))
        assert kept == before
    state = nnx.eval_shape(lambda: Llama.tiny(vocab=304)(nnx.Rngs(0)))
    assert params_of(run)["norm"]["scale"].shape == state.norm.scale.shape


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "3"], "leave out --layers, or --init"),
        (["--dropout", "0.5"], "has none; leave it out"),
        (["--init", "NOWHERE"], "config.json cannot be read"),
    ],
)
def test_init_errors(pretrained, text, tmp_path, capsys, arguments, message):
    told = [x.replace("NOWHERE", str(tmp_path / "nowhere")) for x in arguments]
    first = ["train", "--run", tmp_path / "run", "--init", pretrained, "--data", text]
    assert command(*first, *SMALL, *told) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_model_that_sees_both_sides_is_refused(text, tmp_path, capsys):
    init = tmp_path / "init"
    init.mkdir()
    (init / "config.json").write_text('{"model_type": "bert", "num_hidden_layers": 1}')
    assert command("train", "--init", init, "--run", tmp_path / "run", "--data", text) == 2
    assert "sees both sides of a token (bert)" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_model_without_its_tokenizer_is_refused(pretrained, text, tmp_path, capsys):
    init = shutil.copytree(pretrained, tmp_path / "init")
    (init / "tokenizer.json").unlink()
    assert command("train", "--init", init, "--run", tmp_path / "run", "--data", text) == 2
    assert "holds no tokenizer.json" in capsys.readouterr().err
    (init / "tokenizer.json").write_text("{")
    assert command("train", "--init", init, "--run", tmp_path / "run", "--data", text) == 2
    assert "is damaged or no tokenizer" in capsys.readouterr().err


def test_numbers_that_are_not_finite_and_tokens_that_do_not_fit_are_refused(
    pretrained, text, tmp_path, capsys
):
    init = shutil.copytree(pretrained, tmp_path / "init")
    told = ["train", "--init", init, "--run", tmp_path / "run", "--data", text, *SMALL]
    weights = init / "model.safetensors"
    tensors = read_file(weights)
    tensors["model.norm.weight"] = np.where(np.arange(32) == 3, np.nan, 1).astype(np.float32)
    write_file(weights, tensors)
    assert command(*told) == 2
    assert "model.norm.weight in" in (error := capsys.readouterr().err)
    assert "holds 1 numbers that are NaN or infinite" in error
    config = json.loads((init / "config.json").read_text())
    for changed, message in (
        ({"bos_token_id": 400}, "begins a document with the token 400, and"),
        ({"vocab_size": 100}, "has tokens up to 299, and the model a vocabulary of 100"),
    ):
        (init / "config.json").write_text(json.dumps({**config, **changed}))
        assert command(*told) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_leaves_numbers_out_has_the_size_of_its_largest(pretrained, tmp_path):
    init = shutil.copytree(pretrained, tmp_path / "init")
    tokenizer = json.loads((init / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    token = max(vocabulary, key=vocabulary.get)
    vocabulary[token] = 1000
    (init / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert Tokens(init, {}).size == 1001


def test_more_than_the_positions_of_a_model(finished, text, tmp_path, capsys):
    assert command("export", finished, "--output", tmp_path / "out") == 0
    told = ["--init", tmp_path / "out", "--run", tmp_path / "run", "--data", text]
    assert command("train", *told, "--length", 17) == 2
    assert "--length 17 is more than the 16 positions" in capsys.readouterr().err


# vocabularies


def test_documents_keep_apart_and_text_comes_back(pretrained, text):
    corpus = load_corpus([text])
    vocabulary = Tokens(pretrained, {"bos_token_id": 0})
    found = vocabulary.corpus(corpus)
    assert (found.train == 0).sum() == corpus.num_train_files
    assert len(found.train) < len(corpus.train) / 2
    whole = vocabulary.decode(found.train.tolist()).replace("<s>", "\0")
    assert whole.encode() == corpus.train.tobytes()
    assert vocabulary.encode("") == [0]
    assert vocabulary.decode(vocabulary.encode("line 3: é")) == "line 3: é"
    with pytest.raises(ValueError, match=r"a prompt is empty \(--prompt\)"):
        Tokens(pretrained, {}).encode("")


def test_bytes():
    assert Bytes().encode("é") == [195, 169]
    assert Bytes().encode("") == [0]
    assert Bytes().decode([195, 169, 255]) == "é\N{REPLACEMENT CHARACTER}"
