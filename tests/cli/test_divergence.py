"""Runs that learn no more: they say so, stop, and keep the last good checkpoint."""

from __future__ import annotations

import math
import re
import shutil

import pytest
from tools.quick import quick_compilation  # noqa: F401
from tools.train import check_no_option, train, values

import zeroxla
from zeroxla.cli.divergence import Divergence
from zeroxla.cli.errors import DivergedError
from zeroxla.cli.main import main

TINY = [
    *("--layers", "1", "--width", "16", "--heads", "2", "--batch", "8", "--length", "16"),
    *("--eval-batches", "1", "--sample-bytes", "0", "--nodes", "1", "--devices-per-node", "2"),
]
NAN = math.nan

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def watch(warnings):
    return Divergence(limit=6, warn=warnings.append)


class TestSkippedSteps:
    def test_a_run_ends_after_so_many_in_a_row(self, watch, warnings):
        for number in range(1, 6):
            watch.took(number, finite=False, loss=NAN)
        with pytest.raises(DivergedError, match=r"step 6: the loss is not finite, and 6 steps in"):
            watch.took(6, finite=False, loss=NAN)
        assert warnings == [
            "step 1 was skipped: its loss is not finite; 6 such steps in a row end the run",
            "3 steps in a row were skipped up to step 3: the loss is not finite; 6 end the run",
        ]

    def test_a_finite_step_begins_anew(self, watch):
        for number in range(1, 100):
            watch.took(number, finite=number % 6 == 0, loss=NAN)
        assert watch.skipped == 3

    def test_0_never_ends_a_run(self, warnings):
        watch = Divergence(limit=0, warn=warnings.append)
        for number in range(1, 100):
            watch.took(number, finite=False, loss=NAN)
        assert warnings == ["step 1 was skipped: its loss is not finite; it goes on"]

    def test_the_search_for_a_loss_scale_is_no_divergence(self, watch, warnings):
        watch.took(1, finite=False, loss=2.0, scaled=True)
        assert warnings == []
        assert watch.may_save(1)
        watch.check_end(1)
        watch.took(2, finite=False, loss=NAN, scaled=True)
        assert "step 2 was skipped" in warnings[0]

    def test_a_state_whose_loss_is_not_finite_is_not_saved(self, watch, warnings):
        watch.took(1, finite=False, loss=NAN)
        assert not watch.may_save(1)
        assert "no checkpoint of step 1: its loss is not finite; the one before" in warnings[-1]
        with pytest.raises(DivergedError, match="step 1: the run ends with a loss that is not"):
            watch.check_end(1)
        watch.took(2, finite=True, loss=1.0)
        assert watch.may_save(2)
        watch.evaluated(2, NAN)
        assert not watch.may_save(2)

    def test_many_steps_may_be_noted_at_once(self, watch):
        watch.took(1, finite=False, loss=NAN, steps=4)
        with pytest.raises(DivergedError, match="8 steps in a row"):
            watch.took(2, finite=False, loss=NAN, steps=4)


@pytest.fixture
def explodes_at_step_4(monkeypatch):
    """The learning rate of `zeroxla train` becomes 1e30 in step 4."""
    monkeypatch.setattr(
        "zeroxla.cli.train.job.schedule_for",
        lambda options: lambda count: 1e-3 + 1e30 * (count >= 3),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("explodes_at_step_4")
def test_a_run_of_train_stops_and_keeps_its_last_good_checkpoint(text, tmp_path, capsys):
    run = tmp_path / "run"
    arguments = ["--run", run, "--data", text, *TINY, "--steps", 40, "--save-every", 3]
    assert train(*arguments, "--keep", 1, "--max-skipped", 4) == 1
    printed = capsys.readouterr()
    message = "step 8: the loss is not finite, and 4 steps in a row were skipped (--max-skipped 4)"
    assert message in printed.err
    assert "step 5 was skipped" in printed.out
    assert "2 steps in a row were skipped up to step 6" in printed.out
    assert "no checkpoint of step 6" in printed.out
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["3"]
    assert values(run, "loss")[3] is not None


@pytest.mark.slow
@pytest.mark.usefixtures("explodes_at_step_4")
def test_a_run_that_ends_before_that_is_no_success(text, tmp_path, capsys):
    run = tmp_path / "run"
    arguments = ["--run", run, "--data", text, *TINY, "--save-every", 3, "--keep", 1, "--steps"]
    assert train(*arguments, 6) == 1
    assert "step 6: the run ends with a loss that is not finite" in capsys.readouterr().err
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["3"]
    shutil.rmtree(run)
    assert train(*arguments, 4) == 1  # only the validation shows it
    assert "step 4: the validation loss is not finite" in capsys.readouterr().out
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["3"]


@pytest.mark.usefixtures("explodes_at_step_4")
@pytest.mark.slow
def test_a_step_that_spoils_the_parameters_is_not_saved(text, tmp_path, capsys):
    """The loss that it reports is finite, because it is computed before the update."""
    run = tmp_path / "run"
    arguments = ["--run", run, "--data", text, *TINY, "--save-every", 2, "--keep", 1]
    assert train(*arguments, "--steps", 5) == 1
    assert "no checkpoint of step 4: its loss is not finite" in capsys.readouterr().out
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (2, "the loss is not finite, and 2 steps in a row were skipped"),
        (20, r"iteration \d+ cannot generate: the logits of the rows"),
    ],
)
def test_a_run_of_rlhf_stops(limit, message, text, tmp_path, capsys):
    run = tmp_path / "run"
    model = ["--layers", 1, "--width", 16, "--heads", 2, "--length", 16, "--pretrain-steps", 1]
    rows = ["--rows", 8, "--group-size", 4, "--minibatch", 8, "--epochs", 3]
    rest = ["--prompt-length", 4, "--new-tokens", 4, "--nodes", 1, "--devices-per-node", 2]
    options = ["--learning-rate", 1e30, "--max-skipped", limit, "--samples", 0, "--save-every", 1]
    arguments = ["--run", run, "--data", text, *model, *rows, *rest, *options]
    assert main(["rlhf", *map(str, arguments)]) == 1
    assert re.search(message, capsys.readouterr().err)
    # Until responses have different rewards nothing changes; the first step that changes something
    # spoils the parameters.
    *before, last = values(run, "skipped").items()
    assert last[1] == 2
    assert all(skipped == 0 for _, skipped in before)
    saved = [int(p.name) for p in (run / "checkpoints").iterdir()]
    assert saved == [] if not before else max(saved) == before[-1][0]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--learning-rate", "-1", "must be at least 0"),
        ("--learning-rate", "nan", "must be at least 0"),
        ("--learning-rate", "inf", "must be finite"),
        ("--learning-rate", "1e39", "must be finite in float32"),
        ("--weight-decay", "nan", "must be at least 0"),
        ("--max-skipped", "-1", "must be at least 0"),
        ("--seed", "-1", "must be between 0 and 4294967295"),
        ("--seed", "99999999999999999999", "must be between 0 and 4294967295"),
    ],
)
def test_train_refuses_numbers_that_are_none(option, value, message, capsys):
    check_no_option([f"{option}={value}"], f"{option} ", capsys)
    assert main(["train", f"{option}={value}"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--learning-rate", value) for value in ("-1", "nan", "inf", "1e39")),
        *(("--critic-learning-rate", value) for value in ("-1", "nan", "inf")),
        *(("--seed", value) for value in ("-1", "4294967296")),
        ("--max-skipped", "-1"),
    ],
)
def test_rlhf_refuses_numbers_that_are_none(option, value, capsys):
    assert main(["rlhf", f"{option}={value}"]) == 2
    assert f"{option} " in capsys.readouterr().err


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("kind", ["Adam", "Muon"])
def test_deepspeed_configs_refuse_them(rate, kind):
    config = {"zero_optimization": {"stage": 3}}
    for name in ("lr", "muon_lr") if kind == "Muon" else ("lr",):
        optimizer = {"type": kind, "params": {name: rate}}
        with pytest.raises(ValueError, match=rf"optimizer\.params\.{name}={rate} must be a number"):
            zeroxla.ZeroConfig.from_deepspeed({**config, "optimizer": optimizer})
