"""The length that follows from the data is one over several processes."""

import json

import pytest
from tools.rows import mixed_rows, write_lines
from tools.train import train, values

from multihost import processes


@pytest.mark.slow
def test_two_processes_take_the_length_that_one_does(tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", [*mixed_rows(90), {"text": "long " * 40}])
    start = ["--data", file, "--layers", 1, "--width", 16, "--heads", 2, "--batch", 8]
    start += ["--steps", 2, "--eval-batches", 1, "--sample-bytes", 0]
    one, two = tmp_path / "one", tmp_path / "two"
    assert train("--run", one, *start) == 0
    nodes = ["--nodes", "2", "--devices-per-node", "2"]
    status, out = processes.zeroxla("train", "--run", str(two), *map(str, start), *nodes)
    assert status == 0, out
    assert out.count("Length: 256 (the 99th percentile of the rows). 91 rows have ") == 1
    for run in (one, two):
        config = json.loads((run / "config.json").read_text())
        assert config["options"]["text"]["length"] == 256
    assert values(two, "loss") == pytest.approx(values(one, "loss"), abs=1e-5)
