"""What is missing is told before JAX is imported, and without devices in one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A command in a process in which JAX cannot be imported.
WITHOUT_JAX = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "flax", "optax"):
            raise ImportError("this imports " + name)
sys.meta_path.insert(0, Blocked())
from zeroxla.cli.main import main
for line in sys.stdin.read().splitlines():
    try:
        print("status", main(line.split()), file=sys.stderr)
    except SystemExit as ended:
        print("status", ended.code, file=sys.stderr)
"""
REFUSED = {
    "train --data nowhere": "cannot read nowhere: No such file or directory; correct the path of",
    "train --init nowhere": "--init nowhere: there is no such folder, so its config.json cannot be",
    "train --deepspeed nowhere": "--deepspeed nowhere: No such file",
    "train --chat-template nowhere": "cannot read the chat template nowhere: No such file",
    "train --lora-init nowhere --init .": "--lora-init nowhere: its adapter_config.json cannot be",
    "train --track nosuch": "--track 'nosuch' is no tracker",
    "train --track no_module:Mine": "--track: there is no module 'no_module'",
    "train --metric no_module:mine": "--metric: there is no module 'no_module'",
    "train --metric gone.py:mine": "--metric: there is no file gone.py",
    "train --run file/run": "cannot write the run folder file/run: Not a directory: file",
    "train --run there": "there already holds a run; continue it with --resume --run there",
    "rlhf --run there": "there already holds a run; continue it with --resume --run there",
    "train --resume --run nowhere": "nowhere holds no run to resume",
    "train --batch 0": "--batch 0 must be at least 1",
    "train --holdout 1": "--holdout 1.0 is a share",
    "train --compute-dtype bfloat": (
        "--compute-dtype bfloat: give one of bfloat16, float16, float32; did you mean bfloat16?"
    ),
    "train --compute-dtype=fp16 --data nowhere": "cannot read nowhere",
    "rlhf --data nowhere": "cannot read nowhere: No such file",
    "rlhf --init-run nowhere": "--init-run nowhere: nowhere holds no run, there is no such folder",
    "rlhf --rows 0": "--rows 0 must be at least 1",
    "generate nowhere --prompt x": "nowhere is no folder",
    "generate . --file nowhere.jsonl --output x": "--file nowhere.jsonl: No such file",
    "generate . --prompt x --adapter nowhere": "--adapter nowhere: its adapter_config.json",
    "export nowhere": "nowhere holds no run to export (it has no config.json)",
    "explain nowhere": "nowhere holds no run to explain (it has no config.json)",
    "plan --deepspeed nowhere": "--deepspeed nowhere: No such file",
    "plan --machines nowhere": "--machines nowhere: No such file",
    "check nowhere:Model": "check: there is no module 'nowhere'",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each command said, in one process without JAX."""
    folder = tmp_path_factory.mktemp("empty")
    (folder / "file").touch()
    (folder / "there" / "checkpoints" / "5").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX],
        input="\n".join(REFUSED),
        capture_output=True,
        text=True,
        cwd=folder,
    )
    lines = done.stderr.splitlines()
    assert lines[1::2] == ["status 2"] * len(REFUSED), done.stderr
    return dict(zip(REFUSED, lines[0::2]))


@pytest.mark.smoke
@pytest.mark.parametrize("command", REFUSED)
def test_is_told_in_one_line_without_jax(told, command):
    assert told[command].startswith("error: ")
    assert REFUSED[command] in told[command]


def test_a_platform_that_is_not_here_is_one_line_with_the_remedy(text, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "zeroxla", "train", "--data", str(text), "--steps", "1"],
        env={**os.environ, "JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: JAX_PLATFORMS=cuda: JAX finds no such")
    assert "unset it" in done.stderr
    assert "Traceback" not in done.stderr
