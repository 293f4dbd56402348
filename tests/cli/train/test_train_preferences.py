"""`zeroxla train` on preferences: it takes the steps of `rlhf.dpo`, resumes, and learns.

Quick: a run of four steps on two devices against `rlhf.dpo`, and what is refused.
"""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from tools.chat_folder import write_chat_folder
from tools.families import forward_of, leaves_in
from tools.quick import quick_compilation  # noqa: F401
from tools.rows import mixed_rows, preference_rows, write_lines
from tools.train import check_refused, copy_at, train, train_as_a_user, values

import zeroxla
from zeroxla import rlhf
from zeroxla.cli.main import main
from zeroxla.cli.read_options import read_options
from zeroxla.cli.run_sections import stored_options
from zeroxla.cli.train.make_task import make_task
from zeroxla.cli.train.options import TrainOptions
from zeroxla.cli.train.preferences import PreferencesTask, settings_of
from zeroxla.cli.train.setup import config_for, mesh_for, optimizer_for, schedule_for
from zeroxla.cli.train.targets import weight_of
from zeroxla.models import from_hugging_face

pytestmark = pytest.mark.usefixtures("quick_compilation")

METRICS = ("loss", "margin", "accuracy", "chosen_reward", "rejected_reward", "grad_norm")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder with a model of a context of 32 tokens, and files of preferences."""
    folder = tmp_path_factory.mktemp("hub")
    write_chat_folder(folder / "base", layers=1, width=16, heads=2, length=32)
    write_lines(folder / "text.jsonl", preference_rows(60))
    write_lines(folder / "chat.jsonl", preference_rows(60, chat=True))
    write_lines(folder / "rows.jsonl", mixed_rows(60))
    return folder


def common(hub, *more):
    """The arguments of a run of four steps. Sequences are as long as the model's context."""
    return [
        *("--init", hub / "base", "--data", hub / "text.jsonl", "--lora-rank", 4, "--length", 32),
        *("--batch", 4, "--nodes", 1, "--devices-per-node", 2, "--learning-rate", 0.05),
        *("--steps", 4, "--save-every", 2, "--eval-every", 2, "--eval-batches", 2),
        *("--sample-bytes", 0, "--dpo-beta", 0.5, "--dpo-label-smoothing", 0.1, *more),
    ]


@pytest.fixture(scope="module")
def finished(hub, tmp_path_factory):
    run = tmp_path_factory.mktemp("finished") / "run"
    assert train("--run", run, *common(hub)) == 0
    return run


def options_of(hub, *more):
    arguments = [*map(str, common(hub, *more))]
    return read_options("train", arguments, TrainOptions)


def test_its_steps_are_those_of_dpo_in_python(finished, hub):
    options = options_of(hub)
    mesh = mesh_for(options)
    trainer = rlhf.dpo(
        from_hugging_face(hub / "base"),
        mesh,
        settings_of(options),
        optimizer=optimizer_for(options, schedule_for(options)),
        storage=rlhf.Storage(rank=4, alpha=16.0),
        config=config_for(options, mesh),
    )
    actor = zeroxla.from_pretrained(trainer.actor.adapters, hub / "base", trainer.actor.step)
    states, batches = rlhf.States(actor=actor), iter(make_task(options, None, print).training(0, 1))
    assert values(finished, "loss")[1] == pytest.approx(np.log(2), abs=1e-4)
    for number in range(1, 5):
        drawn = next(batches)
        pairs = rlhf.Pairs(
            chosen_BL=drawn["chosen"],
            rejected_BL=drawn["rejected"],
            chosen_mask_BT=drawn["chosen_mask"],
            rejected_mask_BT=drawn["rejected_mask"],
        )
        states, metrics = trainer.iterate(states, pairs)
        for name in METRICS:
            assert values(finished, name)[number] == pytest.approx(metrics[name], abs=1e-5), name
        counted = sum(drawn[f"{side}_mask"].sum() for side in ("chosen", "rejected"))
        assert values(finished, "targets")[number] == counted
    batches.close()

    # The trained state still scores with the base, as the base does on one device.
    columns = trainer.score(states, pairs)
    model = from_hugging_face(hub / "base")
    forward, leaves = forward_of(model), leaves_in(hub / "base", model)
    for name in ("chosen", "rejected"):
        logits = forward(leaves, drawn[name][:, :-1])
        found = rlhf.target_logprobs(logits, drawn[name][:, 1:]) * drawn[f"{name}_mask"]
        np.testing.assert_allclose(columns[f"ref_{name}"], found.sum(axis=1), rtol=1e-4)


def test_what_is_recorded(finished):
    for name in ("valid_loss", "valid_margin", "valid_accuracy"):
        assert list(values(finished, name)) == [2, 4]
    assert values(finished, "loss")[4] < np.log(2) - 0.01
    assert list(values(finished, "score_s")) == [1, 2, 3, 4]
    config = json.loads((finished / "config.json").read_text())
    assert config["preferences"]["train_rows"] + config["preferences"]["valid_rows"] == 60
    assert (finished / "loss.png").stat().st_size > 10_000


@pytest.mark.slow
def test_it_resumes_with_the_same_batches_and_losses(finished, tmp_path):
    run = copy_at(finished, tmp_path, 2)
    assert train("--resume", "--run", run) == 0
    for name in ("loss", "targets", "margin", "valid_loss", "valid_margin"):
        assert values(run, name) == values(finished, name)


def test_its_step_is_explained(finished, monkeypatch):
    """The step that is explained is the one of pairs, and `--batch` counts pairs."""

    class Seen(Exception):
        pass

    def seen(step, batch, **options):
        step.abstract_state(batch)
        raise Seen({name: x.shape for name, x in batch.items()})

    monkeypatch.setattr("zeroxla.cli.explain.run.explain", seen)
    with pytest.raises(Seen) as found:
        main(["explain", str(finished), "--no-compile", "--batch", "16"])
    (shapes,) = found.value.args
    assert shapes["chosen"] == shapes["rejected"] == (16, 33)
    assert shapes["ref_chosen"] == (16,)


@pytest.mark.slow
def test_what_its_step_waits_for_is_printed(finished, capsys):
    assert main(["explain", str(finished), "--no-compile", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_its_adapter_is_exported(finished, tmp_path):
    out = tmp_path / "out"
    assert main(["export", str(finished), "--adapter", "--output", str(out)]) == 0
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 4


def test_options_of_runs_before_there_were_preferences(finished, tmp_path):
    config = json.loads((finished / "config.json").read_text())
    del config["options"]["dpo"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stored_options(TrainOptions, tmp_path).dpo == TrainOptions().dpo


class TestTask:
    def test_what_it_says_and_counts(self, hub):
        task = make_task(options_of(hub), None, print)
        assert isinstance(task, PreferencesTask)
        assert "text.jsonl; 60 preferences, 0 bad rows" in task.source
        assert (task.unit, task.num_counted, task.guess) == ("pair", 2 * 4 * 32, np.log(2))
        with pytest.raises(
            ValueError, match=r'"chosen": the first 9 of its \d+ tokens hold nothing'
        ):
            make_task(options_of(hub, "--data", hub / "chat.jsonl", "--length", 8), None, print)

    def test_a_batch_weighs_as_many_pairs_as_it_has(self):
        masks = {"chosen_mask": np.eye(3, 5), "rejected_mask": np.eye(3, 5)[[0, 1, 1]]}
        assert weight_of(masks) == 3
        masks["rejected_mask"][1] = 0
        assert weight_of(masks) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--packing"], "--packing: the loss of a preference is of two whole responses"),
        (["--pipe", 2], "--pipe 2: chosen and rejected rows go through the model together"),
        (["--dpo-beta", 0], "--dpo-beta 0.0 must be above 0"),
        (["--dpo-beta", -1], "--dpo-beta -1.0 must be at least 0"),
        (["--dpo-label-smoothing", 0.5], "--dpo-label-smoothing 0.5 must be below 0.5"),
        (["--dpo-tensor", 0], "--dpo-tensor 0 must be at least 1"),
        (["--data", "rows.jsonl"], "--dpo-beta, --dpo-label-smoothing: without effect on rows"),
        (["--data", "base/config.json", "--max-bad-rows", 1], "0 good rows"),
        (
            ["--data", "text.jsonl=0.5", "rows.jsonl=0.5"],
            "text.jsonl:1 is a preference and rows.jsonl:1 is none, and a run learns from",
        ),
    ],
)
def test_what_is_refused(hub, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(hub)
    check_refused(common(hub, *arguments), message, capsys)


@pytest.fixture(scope="module")
def common_whole(hub):
    told = common(hub)
    at = told.index("--lora-rank")
    return [*told[:at], *told[at + 2 :], "--learning-rate", 0.01]


@pytest.fixture(scope="module")
def finished_whole(common_whole, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    assert train("--run", run, *common_whole, "--dpo-reference", "float32") == 0
    return run


class TestWithoutAdapters:
    """The reference is a copy of the first weights, which the run keeps."""

    def test_its_steps_are_those_of_dpo_in_python(self, finished_whole, common_whole, hub):
        options = read_options("train", [*map(str, common_whole)], TrainOptions)
        mesh, model = mesh_for(options), from_hugging_face(hub / "base")
        trainer = rlhf.dpo(
            model,
            mesh,
            settings_of(options),
            optimizer=optimizer_for(options, schedule_for(options)),
            storage=rlhf.Storage(frozen=None),
            config=config_for(options, mesh),
        )
        step = trainer.actor.step
        first = zeroxla.from_pretrained(model, hub / "base", step)
        states = trainer.begin(zeroxla.full_params(first), jax.random.key(0))
        batches = iter(make_task(options, None, print).training(0, 1))
        for number in range(1, 5):
            drawn = next(batches)
            pairs = rlhf.Pairs(
                chosen_BL=drawn["chosen"],
                rejected_BL=drawn["rejected"],
                chosen_mask_BT=drawn["chosen_mask"],
                rejected_mask_BT=drawn["rejected_mask"],
            )
            states, metrics = trainer.iterate(states, pairs)
            for name in METRICS:
                found = values(finished_whole, name)[number]
                assert found == pytest.approx(metrics[name], abs=1e-5), name
        batches.close()
        assert values(finished_whole, "margin")[1] == pytest.approx(0, abs=1e-5)
        assert abs(values(finished_whole, "margin")[4]) > 1e-3

    @pytest.mark.slow
    def test_a_run_that_goes_on_has_the_same_reference(self, finished_whole, hub, tmp_path):
        """Also without the folder that it began from."""
        run = copy_at(finished_whole, tmp_path, 2)
        hidden = (hub / "base").rename(hub / "hidden")
        try:
            assert train("--resume", "--run", run) == 0
        finally:
            hidden.rename(hub / "base")
        for name in ("loss", "margin", "valid_loss", "valid_margin"):
            assert values(run, name) == values(finished_whole, name), name

    @pytest.mark.slow
    def test_in_few_bits_the_reference_is_rounded(self, tmp_path, hub, capsys):
        base = write_chat_folder(tmp_path / "base", layers=1, width=64, heads=2, length=32)
        told = common(hub)[2:]
        told = ["--init", base, *told[:2], *told[4:], "--dpo-reference", "int4"]
        run = tmp_path / "run"
        assert train("--run", run, *told, "--learning-rate", 1e-30) == 0
        assert "Reference: a copy of the first weights in int4, " in capsys.readouterr().out
        assert all(0 < abs(margin) < 1 for margin in values(run, "margin").values())
        assert train("--resume", "--run", run, "--steps", 5) == 0

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (["--device-memory", "20KB"], "no room for the reference, a copy of the first weights"),
            (["--lora-rank", 4, "--dpo-reference", "int8"], "--dpo-reference int8: without effect"),
        ],
    )
    def test_what_is_refused(self, common_whole, hub, monkeypatch, capsys, more, message):
        monkeypatch.chdir(hub)
        check_refused([*common_whole, *more], message, capsys)


def test_dropout_would_change_nothing(hub, monkeypatch, capsys):
    monkeypatch.chdir(hub)
    given = ["--data", "text.jsonl", "--length", 32, "--lora-rank", 4, "--dropout", 0.1]
    check_refused(given, "--dropout 0.1: without effect, because the loss of preferences", capsys)


def test_text_has_no_preferences(hub, monkeypatch, capsys):
    monkeypatch.chdir(hub)
    (hub / "a.txt").write_text("text " * 1000)
    given = ["--init", "base", "--data", "a.txt", "--length", 32, "--dpo-length-normalized"]
    check_refused(given, "--dpo-length-normalized: without effect on text", capsys)


@pytest.mark.slow
def test_it_learns_what_is_preferred(hub, tmp_path):
    """Held-out answers of which none was seen are told apart, between conversations."""
    base = write_chat_folder(tmp_path / "base", layers=1, width=64, heads=2, length=64)
    file = write_lines(tmp_path / "chat.jsonl", preference_rows(200, chat=True))
    run = tmp_path / "run"
    printed = train_as_a_user(
        *("--run", run, "--init", base, "--data", file, "--lora-rank", 4, "--lora-base", "int8"),
        *("--length", 64, "--batch", 16, "--steps", 30, "--learning-rate", 0.01),
        *("--eval-every", 10, "--sample-bytes", 8, "--dpo-length-normalized", "--dpo-beta", 2),
    )
    assert "200 preferences between conversations" in printed
    assert "as stored" in printed  # kernels of the base
    assert "nats per pair; loss without a preference (log 2) 0.6931: the model is" in printed
    assert "Validation accuracy 100.0%" in printed
    accuracies = values(run, "accuracy")
    assert np.mean([accuracies[step] for step in range(20, 31)]) > 0.95
    margins = values(run, "valid_margin")
    assert 0 < margins[10] < margins[20] < margins[30]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--tensor", 2],
        ["--context", 2],
        ["--accumulate", 2],
        ["--offload-optimizer", "host"],
        ["--offload-params", "host"],
        ["--dpo-tensor", 2],
    ],
    ids=lambda x: x[0][2:],
)
def test_beside_other_options_its_steps_are_the_same(finished, hub, tmp_path, arguments):
    run = tmp_path / "run"
    assert train("--run", run, *common(hub, *arguments)) == 0
    for name in ("loss", "margin", "valid_loss"):
        assert values(run, name) == pytest.approx(values(finished, name), abs=1e-5)
