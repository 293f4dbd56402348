"""Training over a real network between real processes: its bytes, its rate, its faults.

The hosts are made by benchmarks/network.py, which needs root and network namespaces.
benchmarks/two_hosts.py measures the same with a larger model, and benchmarks/faults.py more faults.
"""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from multihost import network_worker, processes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import network
import two_hosts_rows
from fleet import WorkerError, fleet

import zeroxla

WHY_NOT = network.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"two hosts cannot be made here: {WHY_NOT}"),
]
ROWS = ("zero3", "zero3, 16 bit", "zeropp_min")


@pytest.fixture(scope="module")
def hosts():
    with network.two_hosts() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def running(hosts):
    argv = [sys.executable, network_worker.__file__, "--port", "29400"]
    env = processes.environment()
    with fleet(hosts, argv, env=env) as running:
        yield running


@pytest.fixture(scope="module")
def taken(running):
    return {row: running.take(row, 3) for row in ROWS}


@pytest.fixture(scope="module")
def program_bytes():
    """What the programs of rows send between two hosts of two devices, by their collectives."""
    import jax

    mesh = jax.sharding.Mesh(zeroxla.make_mesh(nodes=2).devices[:, :2], ("node", "device"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_hosts_rows, "MODEL", network_worker.MODEL)
        return {row: two_hosts_rows.program_bytes(row, mesh) for row in ROWS}


@pytest.mark.parametrize("row", ROWS)
def test_the_link_carries_what_the_program_sends(taken, program_bytes, row):
    """All of it, packed as it should be, and framing; 16 bit really travel as 16 bit."""
    assert program_bytes[row] < taken[row].sent_bytes < 1.1 * program_bytes[row] + 50e3


def test_small_wires_are_small_on_the_link(taken):
    sent = {row: taken[row].sent_bytes for row in ROWS}
    assert sent["zero3, 16 bit"] < 0.53 * sent["zero3"]
    assert sent["zeropp_min"] < 0.185 * sent["zero3"]


def test_rows_train_alike(taken):
    for row in ROWS:
        assert taken[row].losses == pytest.approx(taken["zero3"].losses, rel=0.01)


def test_a_slow_link_makes_the_step_as_slow(hosts, running, taken):
    for host in hosts:
        host.set_rate("50mbit")
    slow = running.take("zero3", 2)
    for host in hosts:
        host.set_rate(None)
    wire_seconds = 8 * slow.sent_bytes / 50e6
    assert min(slow.seconds) > 0.8 * wire_seconds  # the first 256 kB pass at once
    assert slow.sent_bytes == pytest.approx(taken["zero3"].sent_bytes, rel=0.08)


def test_a_link_that_is_down_for_a_while_only_delays(hosts, running, taken):
    hosts[1].set_link(up=False)
    back = threading.Timer(2, hosts[1].set_link, [True])
    back.start()
    begin = time.monotonic()
    late = running.take("zero3", 1, timeout=60)
    assert time.monotonic() - begin > 1.5
    back.join()
    assert late.losses == pytest.approx(taken["zero3"].losses[-1:], rel=0.05)


def test_a_worker_that_dies_is_named(hosts):
    argv = [sys.executable, "-c", "print('@{}'); input(); print('oops'); raise SystemExit(3)"]
    with fleet(hosts, argv) as running, pytest.raises(WorkerError, match=r"ended with 3;.*\noops"):
        running.take("any", 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind(number):
    program = (
        "import network, signal, time\n"
        # Where the tests run in the background, it is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with network.two_hosts('10mbit') as hosts:\n"
        "    held = hosts[1].popen(['sleep', '600'])\n"
        "    print(*(host.pid for host in hosts), held.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    before = links()
    maker = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=Path(network.__file__).parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with maker:
        assert maker.stdout is not None
        pids = maker.stdout.readline().split()
        assert len(pids) == 3
        maker.send_signal(number)
        assert maker.wait(timeout=30) != 0
    until = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)
    assert links() == before


def links():
    """The network devices of this machine itself."""
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
