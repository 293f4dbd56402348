"""The settings that `zeroxla train` chooses follow the folder and the kind of training."""

from __future__ import annotations

import json

import pytest
from tools.chat_folder import write_chat_folder, write_conversations
from tools.rows import preference_rows, write_lines
from tools.train import train, train_as_a_user, values

from zeroxla.cli.errors import UsageError
from zeroxla.cli.read_options import read_options
from zeroxla.cli.rlhf.options import RlhfOptions
from zeroxla.cli.train.chosen import settled, settled_rlhf
from zeroxla.cli.train.model import folder_dtype
from zeroxla.cli.train.options import ALEXNET, TrainOptions
from zeroxla.cli.train.setup import deepspeed_of, schedule_for


def options(*arguments, default=None):
    return read_options("train", [*map(str, arguments)], TrainOptions, default)


def rates(found):
    training = found.training
    return (
        training.learning_rate,
        training.warmup,
        training.min_rate,
        training.weight_decay,
        training.clip,
    )


BF16 = {"torch_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("arguments", "about", "expected", "dtype"),
    [
        ([], {}, (2e-3, 0.1, 0.05, 0.1, 1), "float32"),
        (["--init=x"], {"folder": BF16}, (2e-5, 0.1, 0, 0, 1), "bfloat16"),
        (["--init=x", "--lora-rank=8"], {"folder": BF16}, (2e-4, 0.1, 0, 0, 1), "bfloat16"),
        (["--init=x", "--lora-init=y"], {"folder": {}}, (2e-4, 0.1, 0, 0, 1), "float32"),
        (["--lora-rank=8"], {}, (2e-4, 0.1, 0, 0, 1), "float32"),
        (["--init=x"], {"folder": BF16, "preferences": True}, (5e-7, 0.1, 0, 0, 1), "bfloat16"),
        (
            ["--init=x", "--lora-rank=8"],
            {"folder": {"dtype": "float16"}, "preferences": True},
            (5e-6, 0.1, 0, 0, 1),
            "float16",
        ),
        (
            ["--init=x", "--learning-rate=0.5", "--warmup=0", "--weight-decay=0.2", "--min-rate=1"],
            {"folder": BF16},
            (0.5, 0, 1, 0.2, 1),
            "bfloat16",
        ),
        (
            ["--init=x", "--clip=0", "--compute-dtype=fp32"],
            {"folder": BF16},
            (2e-5, 0.1, 0, 0, 0),
            "float32",
        ),
    ],
)
def test_rates_and_dtype(arguments, about, expected, dtype):
    given = options(*arguments)
    found, rows = settled(given, **about)
    assert rates(found) == expected
    assert found.zero.compute_dtype == dtype
    said = {row.name: row for row in rows}
    for name in ("learning_rate", "weight_decay", "clip"):
        flag = f"--{name.replace('_', '-')}"
        row = said["clipping" if name == "clip" else name.replace("_", " ")]
        assert (row.why == f"given: {flag}") == any(x.startswith(flag) for x in arguments)
    assert said["compute dtype"].value == dtype


def test_alexnet_has_its_own_rate():
    found, _ = settled(options("--model=alexnet", default=ALEXNET))
    assert rates(found) == (3e-4, 0.1, 0.05, 0.1, 1)


def test_the_cosine_ends_where_the_table_says():
    found, _ = settled(options("--init=x", "--steps=100"), folder=BF16)
    schedule = schedule_for(found)
    assert float(schedule(10)) == pytest.approx(2e-5)
    assert float(schedule(100)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"text_config": {"torch_dtype": "bfloat16"}}, "bfloat16"),
        ({"torch_dtype": "float8_e4m3fn"}, "float32"),
        ({"torch_dtype": None}, "float32"),
        ({}, "float32"),
    ],
)
def test_the_dtype_of_a_folder(config, dtype):
    assert folder_dtype(config) == dtype


class TestDeepspeed:
    """What a file says wins over what is chosen, and "auto" is what is chosen."""

    def settled(self, tmp_path, values, *arguments):
        file = tmp_path / "ds.json"
        file.write_text(json.dumps(values))
        return settled(options("--init=x", f"--deepspeed={file}", *arguments), folder=BF16)

    def test_its_dtype_wins_also_where_it_switches_bf16_off(self, tmp_path):
        for content in ({"fp16": {"enabled": True}}, {"bf16": {"enabled": False}}):
            found, rows = self.settled(tmp_path, content)
            assert found.zero.compute_dtype is None  # it is left to the file
            assert rows[-1].why.startswith("--deepspeed ")
        for content in ({"bf16": {"enabled": "auto"}}, {"zero_optimization": {"stage": 3}}):
            assert self.settled(tmp_path, content)[0].zero.compute_dtype == "bfloat16"

    def test_it_is_read_as_it_is_written(self, tmp_path):
        """With comments, and strings for values."""
        file = tmp_path / "ds.json"
        file.write_text('{"bf16": {"enabled": "False"}, "gradient_clipping": "0.5",} // mine')
        found, rows = settled(options("--init=x", f"--deepspeed={file}"), folder=BF16)
        assert found.zero.compute_dtype is None
        assert rows[-1].value == "float32"
        assert found.training.clip == 0.5

    def test_its_clipping_wins(self, tmp_path):
        found, rows = self.settled(tmp_path, {"gradient_clipping": 0.25})
        assert found.training.clip == 0.25
        assert {row.name: row.value for row in rows}["learning rate"] == "2e-05"
        assert self.settled(tmp_path, {"gradient_clipping": 0.25}, "--clip=2")[0].training.clip == 2

    def test_its_rate_wins_and_options_beside_it_are_refused(self, tmp_path):
        values = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
        _, rows = self.settled(tmp_path, values)
        assert rows[0].value == "the file's"
        with pytest.raises(ValueError, match="--learning-rate: without effect, --deepspeed says"):
            self.settled(tmp_path, values, "--learning-rate=1")

    def test_auto_is_filled_in(self, tmp_path):
        auto = {"lr": "auto", "weight_decay": "auto", "betas": "auto", "eps": "auto"}
        values = {
            "optimizer": {"type": "AdamW", "params": auto},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_min_lr": "auto",
                    "warmup_max_lr": "auto",
                    "warmup_num_steps": "auto",
                    "total_num_steps": "auto",
                },
            },
            "bf16": {"enabled": "auto"},
            "gradient_clipping": "auto",
            "train_batch_size": "auto",
        }
        found, _ = self.settled(tmp_path, values, "--steps=50", "--beta2=0.9")
        made = deepspeed_of(found, None)
        params = {"lr": 2e-5, "weight_decay": 0.0, "betas": [0.9, 0.9], "eps": 1e-8}
        assert made["optimizer"]["params"] == params
        rise = {"warmup_min_lr": 0, "warmup_max_lr": 2e-5, "warmup_num_steps": 5}
        assert made["scheduler"]["params"] == {**rise, "total_num_steps": 50}
        assert (made["bf16"], made["gradient_clipping"]) == ({"enabled": True}, 1)
        assert "train_batch_size" not in made


class TestRlhf:
    def rates(self, before, *arguments):
        given = read_options("rlhf", arguments, RlhfOptions)
        found, rows = settled_rlhf(given, before, before.model.init and BF16)
        rates = found.learning.learning_rate, found.learning.critic_learning_rate
        return (*rates, found.zero.compute_dtype), {row.name: row.why for row in rows}

    def test_rates_follow_the_model_at_the_start(self):
        assert self.rates(TrainOptions())[0] == (1e-3, 3e-3, "float32")
        hub = options("--init=x")
        assert self.rates(hub)[0] == (1e-6, 1e-5, "bfloat16")
        assert self.rates(hub, "--lora-rank=2")[0] == (1e-5, 1e-5, "bfloat16")
        found, why = self.rates(hub, "--learning-rate=0.5")
        assert found[0] == 0.5
        assert why["learning rate"] == "given: --learning-rate"


def test_a_choice_has_short_names_and_a_hint():
    assert options("--compute-dtype", "bf16").zero.compute_dtype == "bfloat16"
    with pytest.raises(UsageError, match=r"--schedule zbh1: .*; did you mean zb-h1"):
        options("--schedule", "zbh1")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder of bfloat16 weights, conversations, and a metric."""
    folder = tmp_path_factory.mktemp("hub")
    write_chat_folder(folder / "base", layers=1, width=16, heads=2, length=64)
    config = json.loads((folder / "base" / "config.json").read_text())
    config["torch_dtype"] = "bfloat16"
    (folder / "base" / "config.json").write_text(json.dumps(config))
    write_conversations(folder / "chat.jsonl", count=60)
    (folder / "mine.py").write_text(
        "import jax\n"
        "def nats(logits, batch):\n"
        "    told = jax.nn.log_softmax(logits.astype('float32'))\n"
        "    targets = batch['tokens'][:, 1:, None]\n"
        "    return -jax.numpy.take_along_axis(told, targets, axis=-1)[..., 0]\n"
    )
    return folder


def common(hub):
    return [
        *("--init", hub / "base", "--data", hub / "chat.jsonl", "--length", 48, "--batch", 4),
        *("--nodes", 1, "--devices-per-node", 2, "--eval-batches", 2, "--sample-bytes", 8),
        *("--steps", 4, "--log-every", 2, "--eval-every", 3, "--save-every", 3),
        *("--metric", f"{hub / 'mine.py'}:nats", "--temperature", 0),
    ]


@pytest.fixture(scope="module")
def finished(hub, tmp_path_factory):
    """A run of four steps, and what it printed into a pipe."""
    run = tmp_path_factory.mktemp("finished") / "run"
    return run, train_as_a_user("--run", run, *common(hub))


def test_a_run_prints_and_keeps_what_it_chose(finished):
    run, printed = finished
    kept = json.loads((run / "config.json").read_text())["options"]
    assert (kept["training"]["learning_rate"], kept["training"]["min_rate"]) == (2e-5, 0)
    assert kept["zero"]["compute_dtype"] == "bfloat16"
    assert values(run, "learning_rate")[1] == pytest.approx(2e-5)
    table = printed[printed.index("Settings") : printed.index("Compiling")]
    for words in ("2e-05", "usual for all weights", "bfloat16", "config.json"):
        assert words in table


def test_a_log_has_a_line_for_steps_evaluations_and_checkpoints(finished):
    """The pipe is no terminal."""
    _, printed = finished
    lines = [x for x in printed.splitlines() if x.startswith(("Compil", "step "))]
    said = [line.split(":")[0] for line in lines]
    assert said == [
        "Compiling the training step ...",
        next(x for x in said if x.startswith("Compiled the")),
        *("step 1/4", "step 2/4", "step 3", "step 3", "step 4/4", "step 4", "step 4"),
    ]
    assert "tokens/s, learning rate " in lines[3]
    assert lines[3].endswith(" left")
    assert "validation loss" in lines[4]
    assert lines[5] == "step 3: checkpoint is being written"
    assert lines[8] == "step 4: checkpoint saved"


def test_evaluations_have_a_perplexity_and_a_metric_of_ones_own(finished):
    run, printed = finished
    losses = values(run, "valid_loss")
    assert list(losses) == [3, 4]
    for step, loss in losses.items():
        assert values(run, "valid_perplexity")[step] == pytest.approx(2.718281828**loss, rel=1e-6)
        # The metric is the loss, written anew: of tokens that count, over all batches and devices.
        assert values(run, "valid_nats")[step] == pytest.approx(loss, rel=1e-2)
    assert f"(perplexity {values(run, 'valid_perplexity')[4]:.4g} per token), nats " in printed


def test_the_sample_is_a_held_out_question_with_its_answer(finished, hub):
    run, printed = finished
    rows = [json.loads(line)["messages"] for line in (hub / "chat.jsonl").read_text().splitlines()]
    text = (run / "sample.txt").read_text()
    question = text[text.index("[question]\n") : text.index("[reference]")]
    reference = text[text.index("[reference]\n") + 12 : text.index("\n\n[answer]")]
    (row,) = [x for x in rows if x[-1]["content"] == reference and x[-2]["content"] in question][:1]
    assert row[-1]["role"] == "assistant"
    assert "<|im_start|>user" in question  # in the template
    assert f"The reference answer:\n{reference}" in printed
    assert "The model's answer:" in printed


@pytest.mark.slow
def test_a_resumed_run_keeps_its_settings(finished, hub, tmp_path, capsys):
    run, _ = finished
    assert train("--resume", "--run", run, "--steps", 5) == 0
    assert "as the run began" in capsys.readouterr().out
    assert json.loads((run / "config.json").read_text())["options"]["training"]["clip"] == 1


@pytest.mark.slow
def test_a_metric_over_two_processes_is_that_of_one(finished, hub, tmp_path):
    run = tmp_path / "run"
    arguments = common(hub)
    arguments[arguments.index("--nodes") + 1] = 2
    arguments[arguments.index("--devices-per-node") + 1] = 1
    printed = train_as_a_user("--run", run, *arguments)
    assert values(run, "valid_nats")[4] == pytest.approx(
        values(finished[0], "valid_nats")[4], rel=1e-2
    )
    assert printed.count("step 2/4:") == 1  # the first process alone tells


@pytest.mark.slow
def test_a_metric_on_images_is_the_models_accuracy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_images.py").write_text(
        'def hits(logits, batch):\n    return logits.argmax(-1) == batch["label"]\n'
    )
    small = ["--image-size", 63, "--width-multiplier", 0.1, "--batch", 4, "--eval-batches", 1]
    one = ["--nodes", 1, "--devices-per-node", 1, "--steps", 2, "--metric", "of_images:hits"]
    train_as_a_user("--model", "alexnet", *small, *one, "--run", tmp_path / "run")
    found = values(tmp_path / "run", "valid_hits")
    assert found == values(tmp_path / "run", "valid_accuracy")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "PAIRS", "--lora-rank", 2], "--metric: the loss of preferences"),
        (["--pipe", 2, "--devices-per-node", 1], "--metric with --pipe 2"),
        (["--metric", "METRIC", "METRIC"], "there is a metric nats already"),
        (["--metric", "NONE"], "has no 'none'"),
    ],
)
def test_a_metric_that_cannot_work_is_refused(arguments, message, hub, tmp_path, capsys):
    write_lines(tmp_path / "pairs.jsonl", preference_rows(20, chat=True))
    places = {
        "PAIRS": tmp_path / "pairs.jsonl",
        "METRIC": f"{hub / 'mine.py'}:nats",
        "NONE": f"{hub / 'mine.py'}:none",
    }
    given = [places.get(x, x) for x in arguments]
    assert train("--run", tmp_path / "run", *common(hub), *given) == 2
    assert message in capsys.readouterr().err
