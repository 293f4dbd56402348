"""`zeroxla train` on preferences over two processes, whose reference scores all rows of a batch."""

import pytest
from tools.chat_folder import write_chat_folder
from tools.rows import preference_rows, write_lines
from tools.train import copy_at, train, values

from multihost import processes

NAMES = ("loss", "margin", "chosen_reward", "targets", "valid_loss", "valid_accuracy")


@pytest.mark.slow
@pytest.mark.parametrize("reference", [["--lora-rank", 4], ["--dpo-reference", "float32"]])
def test_two_processes_learn_what_one_does_and_resume(reference, tmp_path):
    base = write_chat_folder(tmp_path / "base", layers=1, width=16, heads=2, length=32)
    file = write_lines(tmp_path / "preferences.jsonl", preference_rows(60))
    start = [
        *("--init", base, "--data", file, *reference, "--length", 32, "--batch", 8),
        *("--learning-rate", 0.05, "--steps", 4, "--save-every", 2, "--eval-every", 2),
        *("--sample-bytes", 0),
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    assert train("--run", one, *start) == 0
    nodes = ["--nodes", "2", "--devices-per-node", "2"]
    status, out = processes.zeroxla("train", "--run", str(two), *map(str, start), *nodes)
    assert status == 0, out
    run = copy_at(two, tmp_path / "copy", 2)
    status, out = processes.zeroxla("train", "--resume", "--run", str(run))
    assert status == 0, out
    assert f"Resuming {run} after step 2" in out
    for name in NAMES:
        assert values(two, name) == pytest.approx(values(one, name), abs=1e-5), name
        assert values(run, name) == values(two, name), name
