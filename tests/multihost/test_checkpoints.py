"""Checkpoints of two processes open in one, and the other way round; a failure reaches both."""

import pytest
from tools.checkpoints import assert_same, logical, run, saved, steps  # noqa: F401

from multihost import processes
from zeroxla import Checkpointer


@pytest.fixture(scope="module")
def printed(saved, tmp_path_factory):
    """By process, the lines; and the folder into which they saved step 5."""
    folder, *_ = saved[2, 4]
    full = tmp_path_factory.mktemp("full")
    status, said, out = processes.launch("checkpoints.py", folder, full, devices_per_node=4)
    assert status == 0, out
    return said, folder


@pytest.mark.slow
def test_a_checkpoint_of_one_process_opens_in_two_and_back(
    saved,
    steps,
    printed,
):
    _, kept, losses = saved[2, 4]
    said, folder = printed
    for lines in said:
        found = [float(lines[f"loss {i}"]) for i in (3, 4)]
        assert found == pytest.approx(losses[:2], rel=1e-6)
    with Checkpointer(folder) as checkpointer:
        assert_same(logical(checkpointer.restore(steps[4, 2], 4).state), kept)
        restored = checkpointer.restore(steps[3, 2])
        assert (restored.number, restored.position) == (5, {"next": 5})
    _, found = run(steps[3, 2], restored.state, 5, 3)
    assert found == pytest.approx(losses[2:], rel=1e-5)


@pytest.mark.slow
def test_a_write_that_fails_in_one_process_fails_in_all(printed):
    said, _ = printed
    for number in (0, 1):
        for process, lines in enumerate(said):
            text = lines[f"failure of {number}"]
            assert f"the checkpoint of step {number + 1} could not be written" in text
            assert "File too large" in text
            assert (f"process {number} failed" in text) == (process != number)
            assert lines["numbers"] == "[3]"
