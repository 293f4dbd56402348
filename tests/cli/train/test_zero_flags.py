"""`zeroxla train` with options of the library: a DeepSpeed file, adapters, a file of options."""

from __future__ import annotations

import json

import pytest
from tools.quick import quick_compilation  # noqa: F401
from tools.train import train, values

from zeroxla import Checkpointer
from zeroxla.cli.main import main
from zeroxla.cli.run_folder import read_config

TINY = [
    *("--layers", "1", "--width", "16", "--heads", "2", "--batch", "16", "--length", "16"),
    *("--eval-batches", "1", "--sample-bytes", "8", "--persistence-threshold", "0"),
    *("--nodes", "1", "--devices-per-node", "2"),
]

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow
def test_a_deepspeed_file_is_kept_and_resumed_without_the_file(text, tmp_path, capsys):
    file, run = tmp_path / "ds.json", tmp_path / "run"
    optimizer = {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}
    file.write_text(json.dumps({"gradient_accumulation_steps": 2, "optimizer": optimizer}))
    assert train("--run", run, "--data", text, *TINY, "--steps", 2, "--deepspeed", file) == 0
    rates = values(run, "learning_rate")  # the file's
    assert rates == {1: pytest.approx(0.01), 2: pytest.approx(0.01)}
    file.unlink()
    assert train("--run", run, "--resume", "--steps", 3) == 0
    assert list(values(run, "loss")) == [1, 2, 3]
    capsys.readouterr()
    assert train("--run", run, "--resume", "--steps", 1) == 0
    assert "Nothing is left to do: the run has taken 3 steps, and --steps is 1" in (
        capsys.readouterr().out
    )
    arguments = ["--run", tmp_path / "other", "--data", text, *TINY, "--learning-rate", "1"]
    assert train(*arguments, "--deepspeed", run / "deepspeed.json") == 2
    assert "--learning-rate: without effect, --deepspeed says" in capsys.readouterr().err


@pytest.mark.slow
def test_adapters_from_a_file_of_options_train_alone_and_are_exported(text, tmp_path):
    file, run = tmp_path / "options.toml", tmp_path / "run"
    file.write_text('optimizer = "lion"\nsteps = 9\n[lora]\nlora-rank = 2\nlora_base = "int8"\n')
    arguments = ["--run", run, "--data", text, *TINY, "--width", 64, "--config", file]
    assert train(*arguments, "--steps", 2) == 0
    options = read_config(run)["options"]
    assert (options["training"]["steps"], options["lora"]["lora_rank"]) == (2, 2)
    with Checkpointer(run / "checkpoints") as checkpointer:
        params = checkpointer.restore_params()
    assert params.keys() == {"base", "lora"}
    assert main(["export", str(run)]) == 0
    config = json.loads((run / "export" / "config.json").read_text())
    assert config["n_embd"] == 64


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--weights", "tick"], ["--memory", "low"]])
def test_stages_gather_in_every_tick_or_stash_less(more, text, tmp_path):
    stages = ["--pipe", 2, "--layers", 2, "--steps", 2, "--data", text]
    assert train("--run", tmp_path / "usual", *TINY, *stages) == 0
    assert train("--run", tmp_path / "other", *TINY, *stages, *more) == 0
    usual, other = values(tmp_path / "usual", "loss"), values(tmp_path / "other", "loss")
    assert other == pytest.approx(usual, rel=1e-4)
    assert read_config(tmp_path / "other")["options"]["pipeline"][more[0][2:]] == more[1]
