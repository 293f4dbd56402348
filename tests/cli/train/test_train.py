"""The command `zeroxla train`, run as a user runs it: on tiny models and texts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from tools.quick import QUICK, quick_compilation, thinned  # noqa: F401
from tools.train import check_no_option, check_refused, copy_at, train, train_as_a_user, values

from zeroxla import Checkpointer, SaveError
from zeroxla.cli.continued_run import newest_run
from zeroxla.cli.run_folder import RunFolder
from zeroxla.cli.train.options import TrainingOptions, TrainOptions
from zeroxla.cli.train.setup import optimizer_for, schedule_for

TINY = [
    *("--layers", "1", "--width", "16", "--heads", "2", "--batch", "8", "--length", "16"),
    *("--eval-batches", "1", "--sample-bytes", "8", "--persistence-threshold", "0"),
]

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A finished run of 12 steps with checkpoints at 5, 10 and 12, and what it printed."""
    run = tmp_path_factory.mktemp("finished") / "run"
    every = ["--save-every", 5, "--eval-every", 5, "--keep", 3]
    return run, train_as_a_user("--run", run, "--data", text, *TINY, "--steps", 12, *every)


class TestFinishedRun:
    @pytest.mark.smoke
    def test_leaves_every_file(self, finished):
        run, _ = finished
        config = json.loads((run / "config.json").read_text())
        assert config["options"]["training"]["steps"] == 12
        assert config["mesh"] == {"node": 2, "device": 4}
        assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert len((run / "sample.txt").read_bytes()) >= len("def ") + 8
        assert list(run.glob("events.out.tfevents.*"))
        assert not (run / "run.lock").exists()
        assert sorted(int(p.name) for p in (run / "checkpoints").iterdir()) == [5, 10, 12]

    def test_records_every_step(self, finished):
        run, _ = finished
        loss = values(run, "loss")
        assert list(loss) == list(range(1, 13))
        assert loss[12] < loss[1]
        assert list(values(run, "valid_loss")) == [5, 10, 12]
        line = next(iter(RunFolder(run).metrics()))
        assert {"grad_norm", "learning_rate", "tokens_per_s", "skipped", "finite"} <= set(line)

    def test_prints_mesh_placement_memory_wire_and_result(self, finished):
        run, printed = finished
        assert "Mesh: node=2 x device=4, cpu devices (simulated)" in printed
        assert "h/mlp/c_fc/kernel" in printed
        assert "Memory of one device" in printed
        assert "received by a device" in printed
        loss, entropy, below = re.search(
            r"Validation loss ([\d.]+) .* entropy of the validation set ([\d.]+): the model is "
            r"([\d.]+) nats (?:below|ABOVE) it",
            printed,
        ).groups()
        assert float(loss) == pytest.approx(values(run, "valid_loss")[12], abs=1e-4)
        assert abs(float(entropy) - float(loss)) == pytest.approx(float(below), abs=2e-4)

    def test_is_not_overwritten(self, finished, text, capsys):
        run, _ = finished
        assert train("--run", run, "--data", text, *TINY) == 2
        assert "already holds a run; continue it with --resume" in capsys.readouterr().err


class TestResume:
    @pytest.mark.slow
    def test_repeats_the_uninterrupted_run_bit_for_bit(self, finished, tmp_path):
        run = copy_at(finished[0], tmp_path, 5)
        assert train("--resume", "--run", run) == 0
        assert values(run, "loss") == values(finished[0], "loss")
        assert values(run, "grad_norm") == values(finished[0], "grad_norm")
        assert values(run, "valid_loss") == values(finished[0], "valid_loss")

    @pytest.mark.slow
    def test_a_restart_by_the_launcher_goes_on_from_the_checkpoint(
        self, finished, tmp_path, monkeypatch, text
    ):
        """With the command line of the first start, which does not say --resume."""
        run = copy_at(finished[0], tmp_path, 5)
        monkeypatch.setenv("ZEROXLA_RESTART", "1")
        monkeypatch.setenv("ZEROXLA_STARTED", "x")
        arguments = ["--run", run, "--data", text, *TINY, "--save-every", 5, "--eval-every", 5]
        assert train(*arguments, "--steps", 12, "--keep", 3) == 0
        assert values(run, "loss") == values(finished[0], "loss")

    @pytest.mark.slow
    def test_a_restart_without_a_checkpoint_starts_anew(
        self, finished, tmp_path, monkeypatch, text
    ):
        monkeypatch.chdir(tmp_path)
        run = tmp_path / "runs" / "train-x"  # what the launcher's first start has called it
        shutil.copytree(finished[0], run)
        shutil.rmtree(run / "checkpoints")
        monkeypatch.setenv("ZEROXLA_RESTART", "1")
        monkeypatch.setenv("ZEROXLA_STARTED", "x")
        assert train("--data", text, *TINY, "--steps", 12, "--save-every", 10) == 0
        assert values(run, "loss") == values(finished[0], "loss")

    @pytest.mark.slow
    def test_options_that_are_free_may_change(self, finished, tmp_path, capsys):
        run = copy_at(finished[0], tmp_path, 12)
        assert train("--resume", "--run", run, "--prompt", "x", "--steps", "13") == 0
        assert list(values(run, "loss")) == list(range(1, 14))
        assert (run / "sample.txt").read_text().startswith("x")

    def test_another_configuration_is_refused(self, finished, capsys):
        assert train("--resume", "--run", finished[0], "--width", "32", "--seed", "5") == 2
        error = capsys.readouterr().err
        assert "--width is 16 there and 32 here" in error
        assert "--seed is 0 there and 5 here" in error

    def test_another_text_is_refused(self, finished, tmp_path, capsys):
        run = copy_at(finished[0], tmp_path, 12)
        config = json.loads((run / "config.json").read_text())
        config["text"]["fingerprint"] = "0" * 32
        (run / "config.json").write_text(json.dumps(config))
        assert train("--resume", "--run", run) == 2
        assert "the run began with other text" in capsys.readouterr().err

    @pytest.mark.slow
    def test_goes_on_on_another_mesh(self, finished, tmp_path):
        run = copy_at(finished[0], tmp_path, 5)
        assert train("--resume", "--run", run, "--nodes", "1", "--devices-per-node", "4") == 0
        for name in ("loss", "grad_norm", "valid_loss"):
            found, expected = values(run, name), values(finished[0], name)
            assert found == pytest.approx(expected, rel=1e-5)

    @pytest.mark.slow
    def test_passes_over_a_damaged_checkpoint(self, finished, tmp_path, capsys):
        run = copy_at(finished[0], tmp_path, 10)
        about = run / "checkpoints" / "10" / "state" / "about.json"
        about.write_text(about.read_text()[:-1])
        assert train("--resume", "--run", run) == 0
        assert "the checkpoint of step 10 is damaged and passed over" in capsys.readouterr().out
        assert values(run, "loss") == values(finished[0], "loss")

    def test_a_run_of_another_version_is_refused(self, finished, tmp_path, capsys):
        run = copy_at(finished[0], tmp_path, 12)
        config = json.loads((run / "config.json").read_text())
        config["options"]["model"]["experts"] = 3
        (run / "config.json").write_text(json.dumps(config))
        assert train("--resume", "--run", run) == 2
        assert "another version of zeroxla" in capsys.readouterr().err

    def test_without_a_folder_takes_the_newest_run(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        assert train("--resume") == 2
        assert "found no run with a checkpoint under runs/" in capsys.readouterr().err
        for i, name in enumerate(("older", "newest", "empty")):
            folder = tmp_path / "runs" / name / "checkpoints"
            (folder if name == "empty" else folder / "1").mkdir(parents=True)
            os.utime(folder, (i, i))
        assert newest_run(tmp_path / "runs").name == "newest"

    def test_a_folder_without_a_run(self, tmp_path, capsys):
        assert train("--resume", "--run", tmp_path) == 2
        assert "holds no run to resume" in capsys.readouterr().err

    def test_a_complete_run_is_not_evaluated_again_by_a_job_that_starts_again(
        self, finished, text, tmp_path, capsys
    ):
        run = copy_at(finished[0], tmp_path, 12)
        before = (run / "metrics.jsonl").read_text()
        arguments = ["--data", text, *TINY, "--steps", 12, "--save-every", 5, "--eval-every", 5]
        assert train("--run", run, *arguments, "--resume", "auto") == 0
        said = "Nothing is left to do: the run has taken 12 steps, and --steps is 12"
        assert said in capsys.readouterr().out
        assert (run / "metrics.jsonl").read_text() == before


def printed_step(printed):
    """Return the step after which a run says that it has stopped."""
    return int(re.search(r"Stopped after step (\d+) and saved", printed)[1])


class TestInterrupt:
    @pytest.mark.parametrize("number", thinned([signal.SIGTERM], slow=[signal.SIGINT]))
    def test_saves_says_how_to_resume_and_the_rest_is_as_if_nothing_happened(
        self, number, finished, text, tmp_path, capsys, monkeypatch
    ):
        run = tmp_path / "run"
        log = RunFolder.log

        def log_and_interrupt(self, step, values):
            log(self, step, values)
            if step == 3:
                os.kill(os.getpid(), number)

        monkeypatch.setattr(RunFolder, "log", log_and_interrupt)
        arguments = ["--run", run, "--data", text, *TINY, "--steps", "12", "--save-every", "100"]
        arguments += ["--resume", "auto"]
        assert train(*arguments) == 75
        printed = capsys.readouterr().out
        assert "Stopping after this step" in printed
        assert f"zeroxla train --resume --run {run}" in printed
        assert 3 <= printed_step(printed) < 12
        monkeypatch.undo()

        assert train(*arguments) == 0
        assert values(run, "loss") == values(finished[0], "loss")
        assert f"Resuming {run} after step {printed_step(printed)}" in capsys.readouterr().out


@pytest.mark.slow
class TestKilled:
    def test_a_run_whose_optimizer_is_on_disk_goes_on_from_its_last_checkpoint(
        self, finished, text, tmp_path
    ):
        run = tmp_path / "run"
        disk = ["--offload-optimizer", "disk", "--offload-path", tmp_path / "disk"]
        begin = ["--run", run, "--data", text, *TINY, "--steps", "12", "--save-every", "1", *disk]
        arguments = begin
        for killed_after in (2, 5, 9):
            command = [sys.executable, "-m", "zeroxla", "train", *map(str, arguments)]
            process = subprocess.Popen(
                command, env={**os.environ, **QUICK}, stdout=subprocess.DEVNULL
            )
            while process.poll() is None:
                saved = [p.name for p in run.glob("checkpoints/*") if p.name.isdigit()]
                if max(map(int, saved), default=0) >= killed_after:
                    process.kill()
                    break
                time.sleep(0.01)
            assert process.wait() == -signal.SIGKILL
            arguments = ["--resume", "--run", run]
        # What is left of it in memory.
        arguments += ["--offload-optimizer", "none"]
        assert train(*arguments) == 0
        assert values(run, "loss") == values(finished[0], "loss")


@pytest.mark.slow
class TestFullDisk:
    def test_a_failing_checkpoint_is_reported_and_training_ends_with_status_1(
        self, text, tmp_path, capsys, monkeypatch
    ):
        run = tmp_path / "run"
        save = Checkpointer.save

        def full_after_step_2(self, step, *rest, **options):
            if step > 2 and (step % self.every == 0 or options["force"]):
                raise SaveError(f"the checkpoint of step {step} could not be written")
            return save(self, step, *rest, **options)

        monkeypatch.setattr(Checkpointer, "save", full_after_step_2)
        arguments = ["--run", run, "--data", text, *TINY, "--steps", "6", "--save-every", "2"]
        assert train(*arguments) == 1
        printed = capsys.readouterr().out
        assert "warning: the checkpoint of step 4 could not be written" in printed
        assert "warning: the checkpoint of step 6 could not be written" in printed
        assert list(values(run, "loss")) == [1, 2, 3, 4, 5, 6]
        assert [p.name for p in (run / "checkpoints").iterdir()] == ["2"]


class TestOptimizer:
    def test_learning_rate_rises_to_its_peak_and_falls_to_a_twentieth(self):
        training = TrainingOptions(steps=100, warmup=0.1, learning_rate=1.0)
        schedule = schedule_for(TrainOptions(training=training))
        rates = [float(schedule(i)) for i in range(101)]
        assert 0 < rates[0] < 0.1
        assert max(rates) == rates[10] == 1
        assert rates[10:] == sorted(rates[10:], reverse=True)
        assert rates[100] == pytest.approx(0.05)

    def test_weight_decay_is_on_matrices_only(self):
        params = {"h": {"kernel": jnp.ones((2, 3, 3)), "bias": jnp.ones((2, 3))}}
        options = TrainOptions(training=TrainingOptions(weight_decay=0.5, clip=0))
        optimizer = optimizer_for(options, schedule_for(options))
        zero = jax.tree.map(jnp.zeros_like, params)
        updates, _ = optimizer.update(zero, optimizer.init(params), params)
        assert (updates["h"]["kernel"] < 0).all()
        assert (updates["h"]["bias"] == 0).all()


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--data", "EMPTY"], "holds no visible file"),
            (["--data", "EMPTY/missing"], "No such file or directory"),
            (["--batch", "12"], "12"),
            (["--batch", "100000"], "fewer than one batch"),
            (["--devices-per-node", "5"], "needs 10 devices"),
            (["--run", "EMPTY/file/run"], "cannot write the run folder"),
        ],
    )
    def test_is_one_clear_error_and_status_2(
        self, arguments, message, text, tmp_path, capsys, monkeypatch
    ):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "empty").mkdir()
        if "EMPTY/file/run" in arguments:
            (tmp_path / "empty" / "file").write_text("")
        arguments = [a.replace("EMPTY", str(tmp_path / "empty")) for a in arguments]
        # A later --data replaces an earlier one.
        check_refused(["--data", text, *TINY, *arguments], message, capsys)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--steps", "0"], "--steps 0 must be at least 1"),
            (["--heads", "3"], "does not divide into --heads 3"),
            (["--warmup", "2"], "at most 1"),
            (["--offload-optimizer", "disk"], "without --offload-path"),
            (
                ["--offload-params", "disk", "--offload-path", "x", "--pipe", "2"],
                "--offload-params disk with --pipe 2",
            ),
            (["--offload-secondary", "host"], "--offload-secondary host with --zero zero3"),
            (["--layer", "3"], "Perhaps you meant"),
        ],
    )
    def test_option_that_cannot_be(self, arguments, message, capsys):
        check_no_option(arguments, message, capsys)


@pytest.mark.slow
def test_other_wires_are_trained_with_and_resumed(text, tmp_path, capsys):
    """`--zero zeropp_min`, whose state holds copies of the weights: stopped after 2 steps of 4."""
    options = ["--data", text, *TINY, "--width", "64", "--zero", "zeropp_min", "--steps"]
    assert train("--run", tmp_path / "whole", *options, 4) == 0
    assert "int8/256" in capsys.readouterr().out
    assert train("--run", tmp_path / "parts", *options, 4, "--save-every", 2) == 0
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "4")
    assert train("--run", tmp_path / "parts", "--resume") == 0
    assert values(tmp_path / "parts", "loss") == values(tmp_path / "whole", "loss")


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as exit:
        train("--help")
    assert exit.value.code == 0
    printed = capsys.readouterr().out
    for option in ("--data", "--layers", "--steps", "--nodes", "--run", "--resume", "--prompt"):
        assert option in printed
