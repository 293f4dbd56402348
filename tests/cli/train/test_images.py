"""`zeroxla train --model alexnet` and `--pipe`, run as a user runs them: on tiny models."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from tools.cifar import write_binary, write_python
from tools.quick import quick_compilation  # noqa: F401
from tools.train import check_no_option, check_refused, copy_at, train, train_as_a_user, values

from zeroxla.cli.main import main
from zeroxla.cli.mesh_options import AxesOptions, PipelineOptions
from zeroxla.cli.train.images import draw_predictions
from zeroxla.cli.train.options import TrainOptions
from zeroxla.cli.train.setup import config_for, mesh_for

ALEXNET = [
    *("--model", "alexnet", "--image-size", "63", "--width-multiplier", "0.125"),
    *("--dropout", "0", "--learning-rate", "3e-3", "--eval-batches", "2"),
]
TWO = ["--pipe", "2", "--nodes", "1", "--devices-per-node", "2"]
GPT = [
    *("--layers", "2", "--width", "16", "--heads", "2", "--batch", "16", "--length", "16"),
    *("--eval-batches", "1", "--sample-bytes", "8", "--persistence-threshold", "0"),
]

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of two stages, with checkpoints at 20 and 30, and what it printed."""
    run = tmp_path_factory.mktemp("finished") / "run"
    steps = ["--steps", 30, "--save-every", 20]
    return run, train_as_a_user("--run", run, *ALEXNET, *TWO, *steps)


def is_picture(file):
    return file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5000


@pytest.mark.slow
class TestFinishedRun:
    def test_leaves_every_file(self, finished):
        run, _ = finished
        config = json.loads((run / "config.json").read_text())
        assert config["mesh"] == {"pipe": 2, "node": 1, "device": 2}
        assert config["images"]["train_images"] == 1438
        assert config["options"]["pipeline"]["pipe"] == 2
        for name in ("loss.png", "predictions.png", "schedule.png"):
            assert is_picture(run / name), name
        assert "Layers, cut at [0, 19, 22]" in (run / "pipeline.txt").read_text()

    def test_learns(self, finished):
        run, _ = finished
        loss = values(run, "loss")
        assert list(loss) == list(range(1, 31))
        assert np.mean([loss[i] for i in range(26, 31)]) < 0.8 * loss[1]
        assert values(run, "accuracy").keys() == loss.keys()
        assert values(run, "valid_loss")[30] < 0.8 * loss[1]
        assert 0.3 < values(run, "valid_accuracy")[30] <= 1
        assert values(run, "images_per_s")[3] > 0

    def test_prints_the_partition_the_schedule_and_the_result(self, finished):
        run, printed = finished
        assert "Mesh: pipe=2 x node=1 x device=2" in printed
        assert "the 1797 digits of scikit-learn, enlarged to 63 x 63; 1,438 to train" in printed
        layers = re.findall(r"^│ +(\d+) │ (\w+) +│ +([\d,]+) │ +(\d) │$", printed, re.MULTILINE)
        assert [int(number) for number, *_ in layers] == list(range(22))
        assert "".join(stage for *_, stage in layers) == "0" * 19 + "1" * 3
        # An eighth of the channels of what DESIGN lists.
        parameters = [int(count.replace(",", "")) for *_, count, _ in layers]
        assert sum(parameters) == 899_378
        assert [i for i, count in enumerate(parameters) if count] == [0, 3, 6, 8, 10, 16, 19, 21]
        assert "Schedule 1f1b (stages: 2, micro-batches: 4)" in printed
        accuracy = re.search(r"Validation accuracy ([\d.]+)%", printed)[1]
        assert float(accuracy) == pytest.approx(100 * values(run, "valid_accuracy")[30], abs=0.06)
        assert "label entropy of the validation set 2.30" in printed
        assert re.search(r"Of 32 validation images \d+ are recognized", printed)


@pytest.mark.slow
class TestResume:
    @pytest.mark.parametrize(
        ("arguments", "tolerance"),
        [
            ((), 0),
            (("--pipe", 1), 1e-4),
            (("--pipe", 4, "--devices-per-node", 1, "--schedule", "zb-h1"), 1e-4),
        ],
    )
    def test_goes_on_with_other_stages(self, finished, tmp_path, arguments, tolerance):
        run = copy_at(finished[0], tmp_path, 20)
        assert train("--resume", "--run", run, *arguments) == 0
        for name in ("loss", "valid_loss"):
            assert values(run, name) == pytest.approx(values(finished[0], name), rel=tolerance)
        if not arguments:
            assert values(run, "loss") == values(finished[0], "loss")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--image-size", 64), "--image-size is 63 there and 64 here"),
            (("--model", "gpt"), "--model is 'alexnet' there and 'gpt' here"),
            (("--data", "DATA"), "--data is"),
            (("--pipe", 4, "--partition", "0,19,22"), "4 stages have 5"),
        ],
    )
    def test_what_it_refuses(self, finished, tmp_path, arguments, message, capsys):
        arguments = [write_binary(tmp_path / "c") if x == "DATA" else x for x in arguments]
        assert train("--resume", "--run", finished[0], *arguments) == 2
        assert message in capsys.readouterr().err


class TestCifar10:
    @pytest.mark.slow
    @pytest.mark.parametrize("write", [write_binary, write_python])
    def test_is_read_and_drawn(self, write, tmp_path, capsys):
        folder, run = write(tmp_path / "cifar"), tmp_path / "run"
        arguments = ["--run", run, "--data", folder, "--batch", 4, "--steps", 2]
        assert train(*arguments, *ALEXNET, "--devices-per-node", 1, "--nodes", 1) == 0
        printed = capsys.readouterr().out
        assert f"CIFAR-10 from {folder}, enlarged to 63 x 63; 15 to train on, 3 held out" in printed
        assert "Of 3 validation images" in printed
        config = json.loads((run / "config.json").read_text())
        assert config["mesh"] == {"node": 1, "device": 1}
        assert is_picture(run / "predictions.png")

    def test_a_file_that_is_missing(self, tmp_path, capsys):
        folder = write_binary(tmp_path)
        (folder / "test_batch.bin").unlink()
        assert train(*ALEXNET, "--data", folder) == 2
        assert "lacks test_batch.bin" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gpt_of_two_stages_has_the_losses_of_one(schedule, text, tmp_path, capsys):
    """At first: later ones differ as much as rounding grows."""
    options = ["--data", text, *GPT, "--steps", 3]
    staged = [*TWO, "--schedule", schedule, "--partition", "uniform"]
    assert train("--run", tmp_path / "staged", *options, *staged) == 0
    printed = capsys.readouterr().out
    assert "Layers, cut at [0, 3, 5]" in printed
    assert f"Schedule {schedule}" in printed
    assert len((tmp_path / "staged" / "sample.txt").read_bytes()) >= len("def ") + 8
    assert train("--run", tmp_path / "whole", *options, *TWO[2:]) == 0
    found, wanted = (values(tmp_path / name, "loss") for name in ("staged", "whole"))
    assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(
    ("pipe", "mesh", "microbatches"),
    [(1, (2, 4), 1), (2, (2, 2, 2), 4), (3, (3, 2, 1), 4), (4, (4, 2, 1), 8), (8, (8, 1, 1), 16)],
)
def test_simulated_devices_fit_the_stages(pipe, mesh, microbatches):
    options = TrainOptions(pipeline=PipelineOptions(pipe=pipe))
    found = mesh_for(options)
    assert found.devices.shape == mesh
    assert config_for(options, found).accumulate == microbatches


def test_axes_that_split_work_are_those_of_the_options():
    options = TrainOptions(axes=AxesOptions(tensor=2, context=2))
    assert dict(mesh_for(options).shape) == {"node": 2, "device": 1, "context": 2, "tensor": 2}


@pytest.mark.slow
def test_exports_its_weights(finished, tmp_path):
    assert main(["export", str(finished[0]), "--output", str(tmp_path)]) == 0
    header = (tmp_path / "model.safetensors").read_bytes()[8:600].decode(errors="replace")
    assert "layers_0.kernel" in header


def test_predictions_are_named():
    images = np.zeros((3, 4, 4, 3), np.float32)
    figure = draw_predictions(images, np.array([0, 1, 1]), np.array([0, 0, 1]), ("cat", "dog"))
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == ["cat", "cat, is dog", "dog"]


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([*ALEXNET, "--layers", "4"], "--layers: without effect on --model alexnet"),
            ([*ALEXNET, "--prompt=x"], "--prompt: without effect on --model alexnet"),
            (["--image_size", "224"], "--image-size: without effect on --model gpt"),
            ([*GPT, "--schedule", "gpipe"], "--schedule: without effect on one stage"),
            ([*ALEXNET, "--pipe", "2", "--accumulate", "3"], "use a multiple of 12"),
            ([*ALEXNET, "--batch", "6"], "does not divide over 8 devices (node=2, device=4)"),
            ([*ALEXNET, "--pipe", "3", "--nodes", "1", "--devices-per-node", "3"], "needs 9 dev"),
            ([*GPT, "--pipe", "8", "--nodes", "1"], "5 layers do not fill 8 stages"),
            ([*ALEXNET, "--pipe", "2", "--partition", "0,22"], "2 stages have 3"),
            ([*ALEXNET, "--pipe", "2", "--partition", "size"], "partition='size' is unknown"),
            ([*ALEXNET, "--pipe", "2", "--partition", "type:LSTM"], "matches no layer"),
        ],
    )
    def test_is_one_clear_error_and_status_2(
        self, arguments, message, tmp_path, capsys, monkeypatch, text
    ):
        monkeypatch.chdir(tmp_path)
        data = ["--data", text] if "alexnet" not in arguments else []
        check_refused([*arguments, *data], message, capsys)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--image-size", "62"], "--image-size 62 must be at least 63"),
            (["--width-multiplier", "0"], "leaves no channel"),
            (["--pipe", "0"], "--pipe 0 must be at least 1"),
            (["--accumulate", "0"], "--accumulate 0: give auto, or a number, 1 or more"),
            (["--partition", "0,x,22"], "--partition 0,x,22"),
            (["--model", "resnet"], "alexnet"),
        ],
    )
    def test_option_that_cannot_be(self, arguments, message, capsys):
        check_no_option(arguments, message, capsys)
