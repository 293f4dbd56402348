"""Two processes generate the same tokens from their training state as one process."""

import numpy as np
import pytest
from tools.quick import quick_compilation  # noqa: F401

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
