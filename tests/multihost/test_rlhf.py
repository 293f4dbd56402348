"""`zeroxla rlhf` over two processes."""

import json
import sys

import pytest

from multihost import processes

RLHF = [
    *("--layers", "1", "--width", "16", "--heads", "2", "--length", "16", "--pretrain-steps", "4"),
    *("--nodes", "2", "--devices-per-node", "2", "--persistence-threshold", "0", "--tensor", "2"),
    *("--rows", "16", "--minibatch", "8", "--prompt-length", "4", "--new-tokens", "6"),
    *("--reward", "vowels", "--save-every", "2"),
]


def records(run):
    """What a run has recorded of each iteration, the times aside."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if not k.endswith("_s")} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--algorithm", "ppo"], id="ppo"),
        pytest.param(["--lora-rank", "4"], marks=pytest.mark.nightly, id="adapters"),
    ],
)
def test_two_processes_learn_what_one_does_and_resume(text, tmp_path, options):
    two, one = tmp_path / "two", tmp_path / "one"
    command = [sys.executable, "-m", "zeroxla", "rlhf"]
    launch = ["launch", "--nodes", "2", "--devices-per-node", "2", "--", *command]
    start = [*RLHF, "--data", text, *options]
    status, out = processes.zeroxla(*launch, *start, "--steps", "2", "--run", two)
    assert status == 0, out
    status, out = processes.zeroxla(*launch, "--resume", "--run", two, "--steps", "4")
    assert status == 0, out
    assert f"Resuming {two} after iteration 2" in out

    status, out = processes.zeroxla("rlhf", *start, "--steps", "4", "--run", one)
    assert status == 0, out
    assert len(records(two)) == 4
    for mine, want in zip(records(two), records(one), strict=True):
        assert mine == pytest.approx(want, rel=1e-5, abs=1e-6)
