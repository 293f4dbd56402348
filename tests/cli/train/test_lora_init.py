"""`zeroxla train --lora-init`: a run that begins from an adapter of PEFT."""

from __future__ import annotations

import json
import shutil

import pytest
from tools.chat_folder import write_chat_folder, write_conversations
from tools.quick import quick_compilation  # noqa: F401
from tools.train import train, values

from zeroxla.cli.main import main

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder with a model, conversations, a run with adapters and its adapter for PEFT."""
    folder = tmp_path_factory.mktemp("hub")
    write_chat_folder(folder / "base", layers=1, width=32, length=64)
    write_conversations(folder / "chat.jsonl", count=80)
    first = ["--run", folder / "first", "--lora-rank", 4, "--lora-dora", "--lora-alpha", 8]
    assert train(*common(folder), *first, "--steps", 6) == 0
    assert (
        main(["export", str(folder / "first"), "--adapter", "--output", str(folder / "lora")]) == 0
    )
    return folder


def common(folder):
    return [
        *("--init", folder / "base", "--data", folder / "chat.jsonl", "--length", 48),
        *("--batch", 8, "--eval-batches", 1, "--sample-bytes", 0, "--learning-rate", 0.05),
        *("--nodes", 1, "--devices-per-node", 2),
    ]


@pytest.fixture(scope="module")
def begun(hub, tmp_path_factory):
    """A run of one step that began from the adapter, whose folder is gone."""
    folder = tmp_path_factory.mktemp("begun")
    shutil.copytree(hub / "lora", folder / "lora")
    begin = ["--lora-init", folder / "lora", "--learning-rate", 0, "--run", folder / "run"]
    assert train(*common(hub), *begin, "--steps", 1) == 0
    shutil.rmtree(folder / "lora")
    return folder / "run"


def test_it_begins_from_the_adapter(hub, begun):
    """Without learning, the loss of the held-out rows is that at the end of the first run."""
    (learned,) = values(hub / "first", "valid_loss").values()
    assert values(begun, "valid_loss")[1] == pytest.approx(learned, rel=1e-5)
    assert learned < values(hub / "first", "loss")[1] - 0.1  # it has learned something


@pytest.mark.slow
def test_it_goes_on_without_the_adapters_folder(begun, tmp_path):
    """The run keeps what it needs."""
    run = shutil.copytree(begun, tmp_path / "run")
    assert train("--resume", "--run", run, "--steps", 2) == 0
    assert main(["export", str(run), "--adapter", "--output", str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (4, 8, True)
    assert main(["explain", str(run), "--no-compile"]) in (0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora-rank", "8"], "--lora-rank: --lora-init"),
        (["--lora-dora"], "--lora-dora: --lora-init"),
    ],
)
def test_what_the_adapter_says_is_not_said_again(hub, capsys, arguments, message):
    assert train(*common(hub), "--lora-init", hub / "lora", *arguments) == 2
    assert message in capsys.readouterr().err


def test_an_adapter_needs_its_base(hub, capsys):
    assert train("--data", hub / "chat.jsonl", "--lora-init", hub / "lora") == 2
    assert "give the base's folder with --init" in capsys.readouterr().err


def test_a_folder_without_an_adapter(hub, tmp_path, capsys):
    assert train(*common(hub), "--lora-init", tmp_path) == 2
    assert "adapter_config.json" in capsys.readouterr().err
