"""However a process ends, all end within seconds, and the one that failed first is named."""

import re
import time

import pytest

from multihost import endings, processes
from zeroxla.cli.launch.ranks import free_port

JAX_SAYS = ("barrier", "client.h", "SIGABRT", "Source Location Trace", "0x")


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("how", "rank", "status", "said"),
    [
        slow("raises", 0, 1, "ValueError: my mistake"),
        slow("raises beside a thread", 1, 1, "ValueError: my mistake"),
        slow("sys.exit(0)", 1, 1, "sys.exit(0), and others went on for more than 3 s; let all"),
        slow("sys.exit(5)", 0, 5, "sys.exit(5), and others went on for more than 3 s; let all"),
        ("os._exit(7)", 0, 7, None),
    ],
)
def test_one_that_ends_ends_the_launch_and_is_named(how, rank, status, said):
    found, printed, out = processes.launch(
        "endings.py", how, rank, devices_per_node=1, heartbeat=10, farewell=3
    )
    took = time.time() - float(printed[rank]["at"])
    assert found == status, out
    assert took < 10
    last = out[out.index("launch: ") :]
    assert last.startswith(f"launch: Rank {rank} (this host, ")
    assert f" ended with exit code {status} " in last
    if said is not None:
        assert f"  zeroxla: process {rank} failed: {said}" in last
        assert f"[{1 - rank}] zeroxla: process {1 - rank} ends because process {rank} f" in out
    for word in JAX_SAYS:
        assert word not in out


@pytest.mark.slow
def test_processes_that_end_in_turn_end_well():
    status, printed, out = processes.launch("endings.py", "in turn", 0, devices_per_node=1)
    assert status == 0, out
    assert [said["the end"] for said in printed] == ["in order"] * 2
    assert "launch:" not in out


@pytest.mark.parametrize(("how", "rank"), [slow("raises", 0), slow("raises", 1)])
def test_without_a_launcher_too(how, rank):
    port = free_port()
    started = [
        processes.start(
            [endings.__file__, how, rank],
            ZEROXLA_COORDINATOR=f"127.0.0.1:{port}",
            ZEROXLA_NUM_PROCESSES=2,
            ZEROXLA_PROCESS_ID=i,
            ZEROXLA_SIMULATED_DEVICES=1,
        )
        for i in (0, 1)
    ]
    outs = []
    for process in started:
        status, out = processes.finish(process, timeout=60)
        ended = time.time()
        assert status == 1
        outs.append(out)
    (at,) = re.findall(r"^at: (.*)$", outs[rank], re.MULTILINE)
    assert ended - float(at) < 10
    assert "ValueError: my mistake" in outs[rank]
    assert f"ends because process {rank} failed: ValueError: my mistake" in outs[1 - rank]
    for word in JAX_SAYS:
        assert word not in "".join(outs)
