"""How processes find each other: the environment, the meeting before JAX starts, its errors."""

import re
import socket
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest

import zeroxla
from multihost import processes
from zeroxla.cli.launch.ranks import free_port
from zeroxla.mesh.processes import fingerprint as fingerprints
from zeroxla.mesh.processes.address import split_address
from zeroxla.mesh.processes.environment import Cluster, find_cluster
from zeroxla.mesh.processes.greeting import Member
from zeroxla.mesh.processes.meeting import meet

SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
LAUNCH = {
    "ZEROXLA_COORDINATOR": "host0:29400",
    "ZEROXLA_NUM_PROCESSES": "2",
    "ZEROXLA_PROCESS_ID": "0",
}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        (
            LAUNCH,
            Cluster(
                source="zeroxla launch", coordinator="host0:29400", num_processes=2, process_id=0
            ),
        ),
        (SLURM, Cluster(source="Slurm", num_processes=2, process_id=1)),
        ({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        # In a batch script, not in a step.
        ({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, None),
        (OPEN_MPI, Cluster(source="Open MPI", num_processes=4, process_id=3)),
        (
            {"PMI_SIZE": "4", "PMI_RANK": "3"},
            Cluster(source="MPICH or Intel MPI", num_processes=4, process_id=3),
        ),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, None),
        (
            {**SLURM, "PMI_SIZE": "2", "PMI_RANK": "1"},
            Cluster(source="Slurm", num_processes=2, process_id=1),
        ),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "5"},
            Cluster(source="Kubernetes", process_id=5),
        ),
    ],
)
def test_the_environment_is_read(environ, found):
    assert find_cluster(environ) == found


@pytest.mark.parametrize("source", [LAUNCH, SLURM, OPEN_MPI], ids=["launch", "slurm", "mpi"])
def test_a_part_of_an_environment_is_an_error(source):
    for missing in source:
        rest = {name: value for name, value in source.items() if name != missing}
        if missing == "SLURM_STEP_NUM_TASKS":
            continue  # only a sign of a step
        with pytest.raises(ValueError, match=f"lacks {missing}; start the process with"):
            find_cluster(rest)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ZEROXLA_PROCESS_ID": "x"}, r"ZEROXLA_PROCESS_ID='x' of zeroxla launch is not a whole"),
        ({"ZEROXLA_PROCESS_ID": "2"}, r"this is process 2 of 2, and they count from 0"),
    ],
)
def test_wrong_numbers(changed, message):
    with pytest.raises(ValueError, match=message):
        find_cluster({**LAUNCH, **changed})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"coordinator": "a:1"},
            r"was given coordinator, and neither num_processes nor process_id",
        ),
        ({"num_processes": 2, "process_id": 2}, r"process_id=2 of num_processes=2; they count"),
        (
            {"coordinator": "a:1", "num_processes": 2, "process_id": 0},
            r"came after JAX had started",
        ),
    ],
)
def test_wrong_arguments(arguments, message):
    zeroxla.make_mesh()  # JAX has started
    with pytest.raises((ValueError, RuntimeError), match=message):
        zeroxla.initialize(**arguments)


def test_one_process_alone_is_none_of_several():
    zeroxla.initialize()
    zeroxla.initialize(num_processes=1, process_id=0)
    mesh = zeroxla.make_mesh(nodes=2)
    assert zeroxla.process_shard(mesh) == (0, 1)
    message = r"'x' has the shape \(9,\).*do not divide over 8 .*multiple of 8"
    with pytest.raises(ValueError, match=message):
        zeroxla.global_batch({"x": np.arange(9)}, mesh)


# the meeting


def hold_meeting(members, address, timeout=20.0):
    """Let members meet, each in a thread; return what each got or raised."""
    results = [None] * len(members)

    def attend(i):
        try:
            results[i] = meet(members[i], address, timeout=timeout)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=attend, args=(i,)) for i in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def member(i, size=3, **runs):
    return Member(process_id=i, num_processes=size, node=f"n{i % 2}", runs={"jax": "1", **runs})


def address():
    return f"127.0.0.1:{free_port()}"


@pytest.mark.smoke
def test_all_get_the_same_list():
    members = [member(i) for i in range(3)]
    assert hold_meeting(members[::-1], address()) == [members] * 3


def test_strangers_are_ignored():
    where = address()
    host, port = split_address(where)

    def knock():
        for _ in range(50):
            try:
                with socket.create_connection((host, port), timeout=1) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                return
            except OSError:
                threading.Event().wait(0.05)

    stranger = threading.Thread(target=knock)
    stranger.start()
    members = [member(0, 2), member(1, 2)]
    assert hold_meeting(members, where) == [members] * 2
    stranger.join()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            [member(0), member(1), member(2, jax="2")],
            r"do not run the same; .*\n  jax: 1 in process 0, 2 in process 2",
        ),
        ([member(0), member(1), member(1)], r"two processes say that they are process 1"),
        ([member(0), member(1, size=4)], r"process 1 was told of 4 processes and process 0 of 3"),
        ([member(0, 4), member(2, 4)], r"2 of 4 processes did not come to .* within 1 s: 1, 3"),
    ],
)
def test_all_hear_what_is_wrong(members, message):
    for error in hold_meeting(members, address(), timeout=1.0):
        with pytest.raises((ValueError, TimeoutError), match=message):
            raise error


def test_a_coordinator_that_is_not_there():
    (error,) = hold_meeting([member(1)], address(), timeout=0.5)
    assert isinstance(error, TimeoutError)
    assert "process 0 was not to be reached at 127.0.0.1:" in str(error)


def test_a_port_in_use():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        (error,) = hold_meeting([member(0)], f"127.0.0.1:{port}")
    assert isinstance(error, ValueError)
    assert f"port {port} of the coordinator 127.0.0.1:{port} is in use" in str(error)


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:port", "host:70000"])
def test_what_is_no_address(text):
    with pytest.raises(ValueError, match='is not an address; give "host:port"'):
        split_address(text)


def test_addresses():
    assert split_address("[fe80::1]:80") == ("fe80::1", 80)


@pytest.mark.slow
def test_processes_with_another_number_of_devices_say_so():
    port = free_port()
    program = "import zeroxla; zeroxla.initialize(); zeroxla.make_mesh()"
    started = [
        processes.start(
            ["-c", program],
            ZEROXLA_COORDINATOR=f"127.0.0.1:{port}",
            ZEROXLA_NUM_PROCESSES=2,
            ZEROXLA_PROCESS_ID=i,
            ZEROXLA_NODE=f"node {i}",
            ZEROXLA_SIMULATED_DEVICES=1 + i,
        )
        for i in (0, 1)
    ]
    for process in started:
        status, out = processes.finish(process)
        assert status != 0
        assert "hosts have different numbers of devices ({'node 0': 1, 'node 1': 2})" in out


def test_processes_with_another_script_say_so(tmp_path):
    port = free_port()
    scripts = [tmp_path / "a.py", tmp_path / "b.py"]
    for script in scripts:
        script.write_text("import zeroxla\n\nzeroxla.initialize()\nprint('started')\n")
    started = [
        processes.start(
            [script],
            ZEROXLA_COORDINATOR=f"127.0.0.1:{port}",
            ZEROXLA_NUM_PROCESSES=2,
            ZEROXLA_PROCESS_ID=i,
        )
        for i, script in enumerate(scripts)
    ]
    for process in started:
        status, out = processes.finish(process)
        assert status != 0
        assert "started" not in out
        assert re.search(r"the script: a\.py \w+ in process 0, b\.py \w+ in process 1", out)


def test_a_fingerprint_follows_the_source(tmp_path, monkeypatch):
    """A changed kernel changes it, and a copy of the same script elsewhere does not."""
    module = Path(fingerprints.__file__).relative_to(Path(zeroxla.__file__).parent)
    found = []
    for name, kernel in (("one", "x = 1"), ("two", "x = 1"), ("three", "x = 2")):
        folder = tmp_path / name
        package, kernels = folder / "zeroxla", folder / "pallas_kernels"
        (package / "mesh").mkdir(parents=True)
        (package / "mesh" / "axes.py").write_text("y = 1")
        kernels.mkdir()
        (kernels / "kernels.py").write_text(kernel)
        (package / "pallas_kernels").symlink_to(kernels)  # as in the repository
        (folder / "train.py").write_text("pass")
        main = types.SimpleNamespace(__file__=str(folder / "train.py"))
        monkeypatch.setattr(fingerprints, "__file__", str(package / module))
        monkeypatch.setitem(sys.modules, "__main__", main)
        found.append(fingerprints.fingerprint.__wrapped__())
    assert found[0] == found[1] != found[2]
    differs = {name for name in found[0] if found[0][name] != found[2][name]}
    assert differs == {"zeroxla's source"}
    assert found[0]["the script"].startswith("train.py ")
