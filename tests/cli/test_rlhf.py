"""The command `zeroxla rlhf`, run as a user runs it: on a tiny model and text."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from tools.chat_folder import write_chat_folder
from tools.hugging_face import read_file
from tools.quick import QUICK, quick_compilation  # noqa: F401
from tools.train import copy_at, values

from zeroxla.cli.continued_run import newest_run
from zeroxla.cli.main import main
from zeroxla.cli.rlhf.options import RlhfOptions

TINY = [
    *("--layers", "1", "--width", "16", "--heads", "2", "--length", "16", "--pretrain-steps", "4"),
    *("--nodes", "1", "--devices-per-node", "2", "--persistence-threshold", "0"),
    *("--rows", "16", "--minibatch", "8", "--prompt-length", "4", "--new-tokens", "6"),
]

pytestmark = pytest.mark.usefixtures("quick_compilation")


def rlhf(*arguments) -> int:
    """Run `zeroxla rlhf` in this process."""
    jax.devices()  # starts JAX: otherwise the command would simulate only the devices it asks for
    return main(["rlhf", *map(str, arguments)])


def command(*arguments) -> list[str]:
    return [sys.executable, "-m", "zeroxla", "rlhf", *map(str, arguments)]


def run_as_a_user(run, text, *options) -> str:
    """Run 5 iterations in a process of its own, with checkpoints at 2, 4 and 5; return what it
    printed."""
    usual = [*TINY, "--steps", 5, "--save-every", 2, "--keep", 3]
    done = subprocess.run(
        command("--run", run, "--data", text, *usual, *options),
        env={**os.environ, **QUICK},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A finished run of GRPO, and what it printed."""
    run = tmp_path_factory.mktemp("finished") / "run"
    return run, run_as_a_user(run, text)


@pytest.fixture(scope="module")
def with_critic(text, tmp_path_factory):
    """A finished run of PPO."""
    run = tmp_path_factory.mktemp("ppo") / "run"
    run_as_a_user(run, text, "--algorithm", "ppo")
    return run


class TestFinishedRun:
    def test_a_log_has_a_line_for_each_iteration_and_checkpoint(self, finished):
        """The pipe is no terminal."""
        _, printed = finished
        lines = [x.split(":")[0] for x in printed.splitlines() if x.startswith("iteration ")]
        each = [f"iteration {i}/5" for i in range(1, 6)]
        for i in (2, 4):
            each.insert(each.index(f"iteration {i}/5") + 1, f"iteration {i}")
        assert lines == [*each, "iteration 5"]
        assert "text step 4/4: loss " in printed
        assert "usual for a small new model" in printed

    def test_leaves_every_file(self, finished):
        run, _ = finished
        config = json.loads((run / "config.json").read_text())
        assert config["command"] == "rlhf"
        assert config["options"]["learning"]["steps"] == 5
        assert config["mesh"] == {"node": 1, "device": 2}
        assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert len((run / "samples_before.txt").read_text().splitlines()) == 4
        assert len((run / "samples_after.txt").read_text().splitlines()) == 4
        assert sorted(int(p.name) for p in (run / "checkpoints").iterdir()) == [2, 4, 5]
        assert not (run / "critic").exists()
        assert [p.name for p in (run / "start").iterdir()] == ["0"]

    def test_records_every_iteration(self, finished):
        run, _ = finished
        assert list(values(run, "reward")) == [1, 2, 3, 4, 5]
        line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
        assert {"kl", "entropy", "clipped", "generate_s", "score_s", "train_s"} <= set(line)

    def test_prints_the_outcome_and_memory(self, finished):
        run, printed = finished
        assert "Mesh: node=1 x device=2, cpu devices (simulated)" in printed
        reward = re.search(r"Reward \(brackets\) ([\d.]+) at first, ([\d.]+) in the last", printed)
        found = list(values(run, "reward").values())
        assert float(reward[1]) == pytest.approx(found[0], abs=1e-3)
        assert float(reward[2]) == pytest.approx(sum(found) / 5, abs=1e-3)
        memory = json.loads((run / "memory.json").read_text())
        assert set(memory) == {"generate", "score", "train"}
        assert "Memory of one device, by phase" in printed
        assert re.search(r"An iteration took [\d.]+ s: generate", printed)

    def test_exports_its_weights(self, finished, tmp_path):
        assert main(["export", str(finished[0]), "--output", str(tmp_path)]) == 0
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gpt2"

    def test_is_no_run_of_train(self, finished, capsys):
        assert main(["train", "--resume", "--run", str(finished[0])]) == 2
        error = capsys.readouterr().err
        assert "is a run of `zeroxla rlhf`, and this needs one of `zeroxla train`" in error


class TestResume:
    def test_takes_the_newest_run_of_its_own_kind(self, finished, tmp_path):
        shutil.copytree(finished[0], tmp_path / "mine")
        (tmp_path / "other" / "checkpoints" / "7").mkdir(parents=True)
        (tmp_path / "other" / "config.json").write_text('{"command": "train"}')
        assert newest_run(tmp_path, "rlhf").name == "mine"
        assert newest_run(tmp_path, "train").name == "other"

    @pytest.mark.slow
    def test_repeats_the_uninterrupted_run_bit_for_bit(self, with_critic, tmp_path):
        run = copy_at(with_critic, tmp_path, 2)
        shutil.rmtree(run / "critic" / "5")  # the one at 4 is newer than the actor's
        assert rlhf("--resume", "--run", run) == 0
        for name in ("reward", "kl", "grad_norm", "value_loss"):
            assert values(run, name) == values(with_critic, name)
        assert sorted(int(p.name) for p in (run / "critic").iterdir()) == [2, 4, 5]

    def test_another_configuration_is_refused(self, finished, capsys):
        assert rlhf("--resume", "--run", finished[0], "--seed", 5, "--reward", "vowels") == 2
        error = capsys.readouterr().err
        assert "--seed is 0 there and 5 here" in error
        assert "--reward is 'brackets' there and 'vowels' here" in error

    @pytest.mark.slow
    def test_an_interrupted_run_is_saved_and_resumed(self, with_critic, text, tmp_path):
        run = tmp_path / "run"
        options = [*TINY, "--algorithm", "ppo", "--steps", 500, "--save-every", 1000]
        process = subprocess.Popen(
            command("--run", run, "--data", text, *options),
            env={**os.environ, **QUICK},
            stdout=subprocess.PIPE,
            text=True,
        )
        while not (run / "metrics.jsonl").exists() or len(values(run, "reward")) < 3:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 75
        assert f"zeroxla rlhf --resume --run {run}" in printed
        number = max(values(run, "reward"))
        assert (run / "checkpoints" / str(number)).exists()
        assert rlhf("--resume", "--run", run, "--steps", number + 1) == 0
        found, wanted = values(run, "reward"), values(with_critic, "reward")
        assert max(found) == number + 1
        assert {i: found[i] for i in (1, 2, 3)} == {i: wanted[i] for i in (1, 2, 3)}


@pytest.mark.slow
def test_a_run_that_begins_anew_keeps_nothing_of_an_earlier_attempt(with_critic, text, tmp_path):
    """That one ended before its first checkpoint; the reference is made from what begins now."""
    run = tmp_path / "run"
    shutil.copytree(with_critic, run)
    shutil.rmtree(run / "checkpoints")
    assert (run / "start" / "0").is_dir()
    left = [run / "start" / "0" / "left", run / "critic" / "2" / "left"]
    for file in left:
        file.touch()
    options = [*TINY, "--algorithm", "ppo", "--steps", 2, "--save-every", 2, "--seed", 3]
    assert rlhf("--run", run, "--data", text, *options, "--resume", "auto") == 0
    assert (run / "start" / "0").is_dir()
    assert (run / "critic" / "2").is_dir()
    assert not any(file.exists() for file in left)


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A run of `zeroxla train`."""
    run = tmp_path_factory.mktemp("trained") / "run"
    shape = ["--layers", "1", "--width", "16", "--heads", "2", "--batch", "8", "--length", "16"]
    mesh = ["--nodes", "1", "--devices-per-node", "2"]
    rest = ["--eval-batches", "1", "--sample-bytes", "0", "--steps", "3"]
    arguments = ["train", "--run", str(run), "--data", str(text), *shape, *mesh, *rest]
    assert main(arguments) == 0
    return run


@pytest.mark.slow
def test_state_on_disk(text, tmp_path):
    """The same iterations of PPO as with the state on the devices, and resumed."""
    disk = ["--offload-params", "disk", "--offload-optimizer", "disk", "--offload-path", tmp_path]
    usual = ["--data", text, *TINY, "--algorithm", "ppo", "--steps"]
    assert rlhf("--run", tmp_path / "devices", *usual, 2) == 0
    assert rlhf("--run", tmp_path / "disk", *usual, 1, *disk) == 0
    assert rlhf("--run", tmp_path / "disk", "--resume", "--steps", 2) == 0
    assert values(tmp_path / "disk", "loss") == values(tmp_path / "devices", "loss")


@pytest.mark.slow
def test_state_on_the_host_another_optimizer_and_a_kept_deepspeed_file(text, tmp_path):
    """The same iterations as with the state on the devices, and resumed without the file."""
    file = tmp_path / "ds.json"
    file.write_text('{"optimizer": {"type": "Lion", "params": {"lr": 0.01}}}')
    usual = ["--data", text, *TINY, "--deepspeed", file, "--steps"]
    assert rlhf("--run", tmp_path / "devices", *usual, 2) == 0
    host = ["--offload-optimizer", "host"]
    assert rlhf("--run", tmp_path / "host", *usual, 1, *host) == 0
    file.unlink()
    assert rlhf("--run", tmp_path / "host", "--resume", "--steps", 2) == 0
    assert values(tmp_path / "host", "loss") == values(tmp_path / "devices", "loss")


class TestStartingFromARun:
    @pytest.mark.slow
    def test_with_adapters(self, trained, tmp_path, capsys):
        """The actor's base is the run's model, and the reference is that base."""
        run = tmp_path / "run"
        options = [*TINY[10:], "--lora-rank", 2, "--lora-targets", "kernel", "--steps", 2]
        options.append("--lora-dora")
        assert rlhf("--run", run, "--init-run", trained, *options) == 0
        assert "learning text" not in capsys.readouterr().out
        assert values(run, "kl")[1] == pytest.approx(0, abs=1e-5)
        assert values(run, "kl")[2] != 0
        assert rlhf("--resume", "--run", run, "--steps", 3) == 0
        assert list(values(run, "kl")) == [1, 2, 3]
        assert main(["export", str(run), "--output", str(tmp_path / "export")]) == 0
        files = {path.name for path in (tmp_path / "export").iterdir()}
        assert {"config.json", "model.safetensors"} <= files
        assert main(["export", str(run), "--adapter"]) == 0
        adapter = json.loads((run / "adapter" / "adapter_config.json").read_text())
        assert (adapter["r"], adapter["use_dora"], adapter["use_rslora"]) == (2, True, False)
        assert rlhf("--run", run, "--init-run", trained, *options) == 2
        assert "already holds a run; continue it with --resume" in capsys.readouterr().err

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--width", "8"], "--width: without effect, --init-run says what the model is"),
            (["--new-tokens", "20"], "make 36 tokens, and the model's context is 16"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, trained, tmp_path, capsys, options, message):
        run = tmp_path / "run"
        assert rlhf("--run", run, "--init-run", trained, *options) == 2
        assert message in capsys.readouterr().err
        assert not run.exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "base"
    return write_chat_folder(folder, layers=1, width=16, heads=2, length=32)


class TestStartingFromAFolder:
    """Any folder of a known family; here a Qwen3 with a tokenizer of its own."""

    @pytest.mark.slow
    def test_the_folder_s_weights_are_trained_in_its_tokens(self, folder, text, tmp_path, capsys):
        run, export = tmp_path / "run", tmp_path / "export"
        options = [*TINY[10:], "--steps", 1, "--samples", 1, "--learning-rate", 1e-30]
        options += ["--reference", "float32", "--kl", 0.5]
        assert rlhf("--run", run, "--init", folder, "--data", text, *options) == 0
        assert "learning text" not in capsys.readouterr().out
        assert values(run, "kl")[1] == pytest.approx(0, abs=1e-5)  # it is its own reference
        assert main(["export", str(run), "--output", str(export), "--dtype", "float32"]) == 0
        found, want = (read_file(x / "model.safetensors") for x in (export, folder))
        for name, x in want.items():
            np.testing.assert_allclose(found[name], x, rtol=1e-6, err_msg=name)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (export / name).read_bytes() == (folder / name).read_bytes()

    @pytest.mark.slow
    @pytest.mark.parametrize("more", [["--lora-rank", 2], ["--algorithm", "ppo"]])
    def test_a_run_goes_on_without_the_folder(self, folder, text, tmp_path, more):
        init, run = shutil.copytree(folder, tmp_path / "init"), tmp_path / "run"
        options = [*TINY[10:], "--save-every", 1, "--samples", 1, *more]
        told = ["--data", text, "--learning-rate", 1e-3, *options]
        assert rlhf("--run", run, "--init", init, *told, "--steps", 3) == 0
        again = copy_at(run, tmp_path / "again", 1)
        shutil.rmtree(init)
        assert rlhf("--resume", "--run", again, "--steps", 3) == 0
        for name in ("reward", "kl", "loss"):
            assert values(again, name) == values(run, name), name
        assert main(["export", str(again), "--output", str(tmp_path / "export")]) == 0
        assert main(["generate", str(again), "--prompt", "def", "--max-new-tokens", "3"]) == 0

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--layers", "2"], "--layers: without effect, --init says what the model is"),
            (["--init-run", "RUN"], "--init-run RUN: a run begins from one of them; leave the oth"),
            (["--new-tokens", "40"], "make 44 tokens, and the model's context is 32"),
            (["--init", "nowhere"], "nowhere"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, folder, text, tmp_path, capsys, options, message):
        run = tmp_path / "run"
        told = ["--init", folder, "--data", text, *TINY[10:], *options]
        assert rlhf("--run", run, *told) == 2
        assert message in capsys.readouterr().err
        assert not run.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "12", "--group-size", "5"], "rows=12 do not divide into group=5"),
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--reward", "brief"], "--reward brief: without an end token"),
        (["--lora-rank", "0"], "rank=0; give a whole number, at least 1"),
        (["--learning-rate", "0"], "--learning-rate 0.0 must be above 0"),
    ],
)
def test_options_out_of_range_are_refused(options, message, capsys):
    assert rlhf(*options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--critic-learning-rate", "1"], "grpo has no critic; leave out, or give --algorithm ppo"),
        (["--lora-alpha", "8"], "there are no adapters; give --lora-rank 8"),
        (["--lora-dora"], "there are no adapters; give --lora-rank 8"),
        (["--init-run", "nowhere"], "nowhere holds no run"),
    ],
)
def test_options_that_cannot_work_together_are_refused(options, message, tmp_path, capsys):
    assert rlhf("--run", tmp_path / "run", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_options_survive_the_run_folder():
    options = RlhfOptions()
    assert RlhfOptions.from_dict(json.loads(json.dumps(options.to_dict()))) == options
    with pytest.raises(ValueError, match="another version of zeroxla"):
        RlhfOptions.from_dict({**options.to_dict(), "task": {"unknown": 1}})
