"""Two processes generate the same tokens from their training state as one process."""

import json

import numpy as np
import pytest
from tools.quick import quick_compilation  # noqa: F401
from tools.text_models import greedy, numbers, text_folder

from multihost import generation, processes

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow
def test_two_processes_generate_what_one_does(tmp_path):
    status, said, out = processes.launch(
        "generation.py", tmp_path / "found.npz", devices_per_node=2
    )
    assert status == 0, out
    for lines in said:
        assert "pass the same prompts or tokens, key and options" in lines["refused"]
    want, *_ = generation.generate()
    for tensor in (1, 2):
        np.testing.assert_array_equal(want[f"streamed {tensor}"], want[f"tokens {tensor}"])
        np.testing.assert_array_equal(want[f"left {tensor}"], want[f"tokens {tensor}"][:, :2])
    for process in (0, 1):
        with np.load(tmp_path / f"found_{process}.npz") as file:
            assert set(file) == set(want)
            for name, x in want.items():
                np.testing.assert_allclose(file[name], x, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_two_processes_answer_a_file_that_one_writes(tmp_path):
    folder = text_folder(tmp_path / "llama", "llama")
    prompt, want = greedy("llama")
    rows, answers = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": x}) for x in (prompt, "t1 t2", "t3")))
    told = ["--nodes", "2", "--devices-per-node", "2", "--tensor", "2", "--temperature", "0"]
    told += ["--max-new-tokens", "12"]
    asks = ["--file", rows, "--output", answers, "--batch", "2"]
    status, out = processes.zeroxla("generate", folder, *asks, *told)
    assert status == 0, out
    assert "Mesh: node=2 x device=2" in out
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [x["prompt"] for x in found] == [prompt, "t1 t2", "t3"]
    assert numbers(found[0]["response"]) == want[: found[0]["tokens"]]
    status, out = processes.zeroxla("generate", folder, *asks, *told)
    assert status == 2, out
    assert "is there already" in out
    status, out = processes.zeroxla("generate", folder, "--prompt", prompt, *told)
    assert status == 0, out
    assert prompt in out
