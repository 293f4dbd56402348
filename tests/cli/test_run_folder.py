"""The run folder and its checkpoints: what is written, and that failing writes lose nothing."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from tools.disk import files_limited_to

from zeroxla.cli.run_folder import RunFolder, RunFolderError, has_checkpoint, read_config
from zeroxla.cli.train.plot import plot_run

REPOSITORY = Path(__file__).resolve().parents[2]


class TestMetrics:
    @pytest.mark.smoke
    def test_lines_hold_the_values(self, tmp_path):
        folder = RunFolder.create(tmp_path / "run", {"seed": 3})
        folder.log(1, {"loss": 2.5, "skipped": 0})
        folder.log(2, {"loss": 2.25})
        folder.close()
        assert folder.metrics() == [
            {"step": 1, "loss": 2.5, "skipped": 0},
            {"step": 2, "loss": 2.25},
        ]
        assert read_config(folder.path) == {"seed": 3}

    def test_non_finite_values_stay_valid_json(self, tmp_path):
        folder = RunFolder.create(tmp_path, {})
        folder.log(1, {"loss": float("nan"), "grad_norm": float("inf")})
        (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert json.loads(line) == {"step": 1, "loss": None, "grad_norm": None}
        folder.close()

    def test_reopening_drops_the_steps_after_the_checkpoint(self, tmp_path):
        folder = RunFolder.create(tmp_path, {})
        for step in range(1, 6):
            folder.log(step, {"loss": float(step)})
        folder.close()
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write('{"step": 6, "lo')  # a crash in the middle of a line

        folder = RunFolder.reopen(tmp_path, step=3)
        folder.log(4, {"loss": 40.0})
        folder.close()
        assert [line["loss"] for line in folder.metrics()] == [1, 2, 3, 40]

    def test_a_full_disk_is_reported_once_and_loses_no_line(self, tmp_path):
        reports = []
        folder = RunFolder.create(tmp_path, {}, reports.append)
        folder.log(1, {"loss": 1.0})
        size = (tmp_path / "metrics.jsonl").stat().st_size
        with files_limited_to(size + 5):
            folder.log(2, {"loss": 2.0})
            folder.log(3, {"loss": 3.0})
            assert [line["step"] for line in folder.metrics()] == [1]
            assert len(reports) == 1
            assert "cannot write metrics" in reports[0]
            with pytest.raises(RunFolderError, match="2 lines could not be written"):
                folder.close()
        folder.log(4, {"loss": 4.0})
        folder.close()
        assert [line["step"] for line in folder.metrics()] == [1, 2, 3, 4]
        assert len(reports) == 2
        assert "again" in reports[1]

    def test_device_without_space(self, tmp_path):
        if not os.path.exists("/dev/full"):
            pytest.skip("needs /dev/full, a Linux device whose writes fail with ENOSPC")
        reports = []
        folder = RunFolder.create(tmp_path, {}, reports.append)
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        folder.log(1, {"loss": 1.0})
        first, second = reports[0].splitlines()
        assert re.search(r"cannot write metrics to .*: No space left on device \(.* free\)$", first)
        assert second.startswith("training goes on, and lines wait in memory")


class TestFiles:
    def test_plot_is_a_picture(self, tmp_path):
        folder = RunFolder.create(tmp_path, {})
        guess = {"guess": 3.2, "guess_name": "byte-unigram entropy", "unit": "byte"}
        folder.write_figure("loss.png", plot_run(folder.metrics(), **guess))  # no metrics yet
        folder.log(1, {"loss": 3.0})
        folder.log(2, {"loss": float("nan"), "valid_loss": 2.5, "accuracy": 0.5})
        figure = plot_run(folder.metrics(), **guess, metrics=("accuracy",))
        assert [axes.get_title(loc="left") for axes in figure.axes] == [
            "Loss, nats per byte",
            "Accuracy",
        ]
        folder.write_figure("loss.png", figure)
        picture = (tmp_path / "loss.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 10_000
        folder.close()

    def test_a_failed_write_keeps_the_old_file(self, tmp_path):
        folder = RunFolder.create(tmp_path, {})
        folder.write_text("sample.txt", "old")
        with files_limited_to(100), pytest.raises(RunFolderError, match=r"cannot write .*sample"):
            folder.write_text("sample.txt", "new" * 100)
        assert (tmp_path / "sample.txt").read_text() == "old"
        assert not list(tmp_path.glob(".*.tmp"))

    def test_folder_below_a_file_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match=r"cannot write the run folder .*Not a directory"):
            RunFolder.create(tmp_path / "file" / "run", {})

    def test_folder_without_write_permission(self, tmp_path):
        tmp_path.chmod(0o500)
        if os.access(tmp_path, os.W_OK):
            pytest.skip("permission bits do not bind this user (root)")
        with pytest.raises(ValueError, match=r"cannot write the run folder .*Permission denied"):
            RunFolder.create(tmp_path, {})

    def test_a_run_with_checkpoints_is_not_overwritten(self, tmp_path):
        RunFolder.create(tmp_path, {"first": True}).close()
        RunFolder.create(tmp_path, {"second": True}).close()  # nothing was saved: may be replaced
        (tmp_path / "checkpoints" / "10").mkdir(parents=True)
        with pytest.raises(ValueError, match=r"already holds a run; continue it with --resume"):
            RunFolder.create(tmp_path, {"third": True})
        assert read_config(tmp_path) == {"second": True}

    def test_a_folder_of_other_things_is_not_touched(self, tmp_path):
        (tmp_path / "metrics.jsonl").write_text("somebody else's")
        with pytest.raises(ValueError, match="is not empty and holds no run"):
            RunFolder.create(tmp_path, {})
        assert (tmp_path / "metrics.jsonl").read_text() == "somebody else's"

    def test_no_run_to_read(self, tmp_path):
        with pytest.raises(ValueError, match="holds no run to resume"):
            read_config(tmp_path)
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ValueError, match=r"config\.json is damaged"):
            read_config(tmp_path)


def test_only_complete_checkpoints_count(tmp_path):
    assert not has_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / "5.orbax-checkpoint-tmp").mkdir(parents=True)
    assert not has_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / "5").mkdir()
    assert has_checkpoint(tmp_path)
