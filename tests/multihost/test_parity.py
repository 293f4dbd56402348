"""Training in two processes gives the losses and parameters of one process, plain and quantized."""

import numpy as np
import pytest
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from multihost import processes, steps
from zeroxla.cli.launch.ranks import free_port

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]

NAMES = sorted(steps.CONFIGS)


@pytest.fixture(scope="module")
def expected(quick_compilation):  # noqa: F811
    mesh = zeroxla.make_mesh(nodes=2)
    return {name: steps.train(mesh, name) for name in NAMES}


def check(folder, expected, *names):
    for name in names:
        with np.load(folder / f"{name}.npz") as found:
            assert set(found) == set(expected[name])
            np.testing.assert_allclose(found["losses"], expected[name]["losses"], rtol=2e-6)
            for path in set(found) - {"losses"}:
                scale = np.abs(expected[name][path]).max()
                np.testing.assert_allclose(
                    found[path], expected[name][path], rtol=0, atol=1e-5 * scale, err_msg=path
                )


def test_two_processes_of_four_devices(tmp_path, expected):
    status, _, out = processes.launch("steps.py", tmp_path, *NAMES, devices_per_node=4)
    assert status == 0, out
    assert "[0] nodes [[0, 0, 0, 0], [1, 1, 1, 1]]" in out
    check(tmp_path, expected, *NAMES)


def test_four_processes_on_two_hosts_in_another_order(tmp_path, expected):
    """Processes 0 and 2 are on one host, 1 and 3 on the other, as a scheduler may deal them out."""
    port = free_port()
    started = [
        processes.start(
            [processes.FOLDER / "steps.py", tmp_path, "zeropp_min"],
            ZEROXLA_COORDINATOR=f"127.0.0.1:{port}",
            ZEROXLA_NUM_PROCESSES=4,
            ZEROXLA_PROCESS_ID=i,
            ZEROXLA_NODE=f"host {i % 2}",
            ZEROXLA_SIMULATED_DEVICES=2,
        )
        for i in range(4)
    ]
    for process in started:
        status, out = processes.finish(process)
        assert status == 0, out
        assert "nodes [[0, 0, 2, 2], [1, 1, 3, 3]]" in out
    check(tmp_path, expected, "zeropp_min")
