"""The scripts in examples/ run, small, as a user runs them.

They are slow, and CI runs them beside the notebooks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools.chat_folder import write_chat_folder, write_conversations
from tools.quick import QUICK

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SIMULATE = ("--simulate", "2")


def run(folder, *command):
    """Run a command in a folder; return what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**os.environ, **QUICK},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_script_is_in_the_table():
    names = {file.name for file in EXAMPLES.glob("*.py")}
    assert names == set(
        re.findall(r"^\| \[(\w+\.py)\]", (EXAMPLES / "README.md").read_text(), re.M)
    )


@pytest.mark.slow
def test_pretrain_goes_on_where_it_stopped(tmp_path):
    small = ["--layers", 1, "--width", 32, "--length", 32, "--save-every", 2, "--run", "run"]
    script = EXAMPLES / "pretrain.py"
    first = run(tmp_path, script, *SIMULATE, *small, "--steps", 2)
    assert "step 2: loss" in first
    second = run(tmp_path, script, *SIMULATE, *small, "--steps", 4)
    assert "goes on after step 2" in second
    assert "step 4: loss" in second


@pytest.mark.slow
def test_finetune_lora_learns_to_answer(tmp_path):
    write_chat_folder(tmp_path / "model", layers=1, width=64, length=128)
    write_conversations(tmp_path / "chat.jsonl")
    said = run(
        tmp_path,
        EXAMPLES / "finetune_lora.py",
        *(*SIMULATE, "--model", "model", "--data", "chat.jsonl", "--length", 64, "--steps", 12),
    )
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", said)]
    assert losses[-1] < losses[0]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 16


@pytest.mark.slow
def test_grpo_scores_sums(tmp_path):
    said = run(
        tmp_path,
        EXAMPLES / "grpo.py",
        *(*SIMULATE, "--text-steps", 2, "--iterations", 1, "--rows", 16, "--group", 4),
        *("--width", 16),
    )
    assert re.search(r"right answers: \d+% at first, \d+% at last", said)


@pytest.mark.slow
def test_grpo_learns_to_add(tmp_path):
    said = run(tmp_path, EXAMPLES / "grpo.py", *SIMULATE)
    first, last = map(int, re.findall(r"(\d+)% at", said))
    assert last > first + 20


@pytest.mark.slow
def test_two_islands_share_what_they_learn(tmp_path):
    said = run(
        tmp_path,
        *("-m", "zeroxla", "launch", "--islands", 2, "--devices-per-node", 2, "--"),
        *(sys.executable, EXAMPLES / "two_islands.py"),
        *("--steps", 2, "--every", 1, "--width", 32, "--length", 16, "--batch", 4),
    )
    losses = re.findall(r"island (\d): validation loss (\d+\.\d+) of the shared model", said)
    assert {slot for slot, _ in losses} == {"0", "1"}
    assert len({loss for _, loss in losses}) == 1
    assert (tmp_path / "runs/islands/model.safetensors").exists()
