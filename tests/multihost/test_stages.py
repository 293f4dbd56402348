"""A pipeline over two processes trains as in one process, and as without stages."""

import jax
import numpy as np
import pytest
from tools.hugging_face import read_export
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from multihost import processes, stages

pytestmark = pytest.mark.usefixtures("quick_compilation")

WHERE = {
    "a stage a process": (1, "[0, 1], part (0, 1)"),
    "two devices a stage": (2, "[0, 0, 1, 1], part (0, 1)"),
    "stages inside processes": (2, "[0, 1, 0, 1], part ({}, 2)"),
    "quantized": (4, "[0, 0, 1, 1, 0, 0, 1, 1], part ({}, 2)"),
}
"""Devices of a process; the processes of the mesh's devices, and what each reads of a batch."""


def check(name, folder):
    mesh = zeroxla.make_mesh(nodes=1, devices_per_node=2)
    step = stages.make_step(stages.pipeline_of(stages.CASES[name]), mesh)
    without_stages = stages.train(step)
    with np.load(folder / f"{name}.npz") as file:
        found = dict(file)
    in_one_process = stages.train(stages.step_of(stages.CASES[name]))
    assert set(found) == set(in_one_process) == set(without_stages)
    np.testing.assert_allclose(found["losses"], in_one_process["losses"], rtol=1e-6)
    rtol = 1e-2 if name == "quantized" else 2e-6
    np.testing.assert_allclose(found["losses"], without_stages["losses"], rtol=rtol)

    # What two processes saved opens in one, without stages, and is what they had.
    with zeroxla.Checkpointer(folder / name) as checkpointer:
        restored = checkpointer.restore(step)
    exported = read_export(folder / name / "export")
    for path, x in jax.tree_util.tree_leaves_with_path(zeroxla.full_params(restored.state)):
        np.testing.assert_array_equal(x, found[jax.tree_util.keystr(path)])
        in_file = exported[jax.tree_util.keystr(path, simple=True, separator=".")]
        np.testing.assert_array_equal(x, in_file)
    batch = {"tokens": stages.tokens(restored.number)}
    _, metrics = step(restored.state, batch)
    np.testing.assert_allclose(metrics["loss"], found["losses"][restored.number], rtol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize("name", stages.CASES)
def test_stages_of_two_processes(name, tmp_path):
    devices, where = WHERE[name]
    status, said, out = processes.launch("stages.py", tmp_path, name, devices_per_node=devices)
    assert status == 0, out
    assert [lines[name] for lines in said] == [where.format(process) for process in (0, 1)]
    check(name, tmp_path)
