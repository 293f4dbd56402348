"""State on the disks of two processes trains as in one process, and fails in both or in none."""

import ast
import re

import jax
import numpy as np
import pytest
from tools.offload import batch, make_step, taken
from tools.quick import quick_compilation  # noqa: F401

from multihost import processes
from zeroxla import Checkpointer, Offload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]


@pytest.mark.parametrize(
    ("params", "first", "where"),
    [("none", "opt_state/", "state"), ("disk", "params/", "state-of-{}")],
)
def test_two_processes_with_a_file_each(mesh24, tmp_path, params, first, where):
    status, said, out = processes.launch("disks.py", tmp_path, params, where, devices_per_node=4)
    assert status == 0, out
    step = make_step(mesh24, Offload())
    state, losses = taken(step, step.init(jax.random.key(0), batch()), 4)
    assert said[0]["file"] != said[1]["file"]
    for lines in said:
        found = ast.literal_eval(lines["losses"])
        np.testing.assert_allclose(found[:4], losses, rtol=1e-5)
        assert found[4:] == found[2:4]  # as the checkpoint was
        assert re.fullmatch(r"zeroxla-.*-\d+-\d+\.state", lines["file"])
    # The one whose disk is at fault names the leaf, the other one that process.
    assert f"ValueError: process 1 failed at its state on disk: {first}" in said[0]["error"]
    assert f"DamagedStateError: {first}" in said[1]["error"]
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        restored = checkpointer.restore(step)
    assert restored.number == 4
    _, after = taken(step, restored.state, 1)
    np.testing.assert_allclose(after, taken(step, state, 1)[1], rtol=1e-4)
