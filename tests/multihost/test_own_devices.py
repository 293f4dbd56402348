"""Which devices of its host a process takes: what the clusters' variables say, what JAX is told."""

import os
import re
import socket
from types import SimpleNamespace

import jax
import pytest

import zeroxla
from multihost import processes
from zeroxla.cli.launch.ranks import free_port
from zeroxla.mesh import make_mesh
from zeroxla.mesh.processes import start
from zeroxla.mesh.processes.environment import find_cluster
from zeroxla.mesh.processes.greeting import Member
from zeroxla.program import compat
from zeroxla.program.hosts import place_on_host, visible_gpus

EIGHT = ",".join(map(str, range(8)))


def slurm(tasks, rank, nodes=4, **more):
    """The variables of task `rank` of a step with `tasks` on each node."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": "node[1-4]",
        "SLURM_STEP_NUM_TASKS": str(nodes * tasks),
        "SLURM_NTASKS": str(nodes * tasks),
        "SLURM_PROCID": str(tasks + rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})",
        **more,
    }


def open_mpi(tasks, rank, nodes=4, **more):
    return {
        "OMPI_COMM_WORLD_SIZE": str(nodes * tasks),
        "OMPI_COMM_WORLD_RANK": str(tasks + rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(tasks),
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
        **more,
    }


@pytest.fixture
def without(monkeypatch):
    """An environment without a cluster's variables or GPUs."""
    for name in os.environ:
        if name.startswith(("SLURM", "OMPI", "CUDA_VISIBLE", "JAX_LOCAL", "JAX_CUDA")):
            monkeypatch.delenv(name)
    return monkeypatch


def told(patch, variables):
    """Return the devices that JAX is told in a process with these variables."""
    for name, value in variables.items():
        patch.setenv(name, value)
    cluster = find_cluster()
    *_, devices = compat.cluster_parameters(
        cluster.source, cluster.coordinator, cluster.num_processes, cluster.process_id, 5
    )
    return devices


@pytest.mark.parametrize("cluster", [slurm, open_mpi])
@pytest.mark.parametrize(
    ("tasks", "rank", "visible", "devices"),
    [
        (1, 0, EIGHT, None),
        (1, 0, None, None),
        (4, 2, "0,1,2,3", [2]),
        (4, 2, EIGHT, [4, 5]),
        (8, 7, EIGHT, [7]),
        (8, 7, None, [7]),
        (8, 7, "7", None),
        (4, 2, "GPU-a", None),
    ],
)
def test_one_process_a_host_takes_all_and_several_share_out(
    without, cluster, tasks, rank, visible, devices
):
    seen = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert told(without, cluster(tasks, rank, **seen)) == devices


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "1"}, (1, 2)),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}, None),  # no task 1 there
        ({"SLURM_STEP_TASKS_PER_NODE": "1,3(x2)", "SLURM_NODEID": "2"}, (1, 3)),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, None),
        ({"SLURM_TASKS_PER_NODE": "4"}, (1, 4)),
        # The step's own number counts, not the job's.
        ({"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "8(x2)"}, (1, 2)),
        ({"SLURM_NTASKS_PER_NODE": "8"}, (1, 8)),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "4"}, (1, 2)),
        ({"SLURM_NTASKS": "7", "SLURM_JOB_NUM_NODES": "4"}, None),
        ({"SLURM_NTASKS": "8"}, None),
    ],
)
def test_tasks_of_a_node_as_slurm_writes_them(variables, place):
    assert place_on_host("Slurm", {"SLURM_LOCALID": "1", **variables}) == place


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        # Each task sees two of four GPUs; with control groups it counts them from 0.
        (slurm(2, 1, CUDA_VISIBLE_DEVICES="0,1", SLURM_GPUS_ON_NODE="4"), None),
        (slurm(2, 1, CUDA_VISIBLE_DEVICES="0,1", SLURM_GPUS_ON_NODE="2"), [1]),
        (slurm(2, 1, CUDA_VISIBLE_DEVICES="0,1,2,3", SLURM_GPUS_ON_NODE="4"), [2, 3]),
        (slurm(8, 5, CUDA_VISIBLE_DEVICES="0", SLURM_GPUS_ON_NODE="8"), None),
        # The user has said which.
        (slurm(4, 1, CUDA_VISIBLE_DEVICES=EIGHT, JAX_LOCAL_DEVICE_IDS="6,7"), None),
        # Without a GPU.
        (slurm(4, 1, CUDA_VISIBLE_DEVICES=""), [1]),
        (slurm(4, 1, CUDA_VISIBLE_DEVICES="NoDevFiles"), [1]),
    ],
)
def test_what_slurm_or_the_user_has_shared_out_is_left(without, variables, devices):
    assert told(without, variables) == devices


def test_more_processes_than_gpus_is_an_error(without):
    message = r"Slurm has started 8 processes on a host, and they see the same 2 GPUs \(0, 1\)"
    with pytest.raises(ValueError, match=message):
        told(without, slurm(8, 5, CUDA_VISIBLE_DEVICES="0,1"))
    with pytest.raises(ValueError, match=r"2 processes on a host, and they see the same 1 GPUs"):
        told(without, slurm(2, 1, CUDA_VISIBLE_DEVICES="0", SLURM_GPUS_ON_NODE="1"))


def test_processes_of_mpirun_in_a_slurm_job_are_those_of_mpirun(without):
    """It starts its daemons by `srun`, so Slurm's variables are those of a daemon."""
    for name, value in {**slurm(1, 0), **open_mpi(4, 3)}.items():
        without.setenv(name, value)
    found = find_cluster()
    assert (found.source, found.num_processes, found.process_id) == ("Open MPI", 16, 7)


def test_processes_of_mpich_do_not_train_alone_without_a_word(without):
    """Its variables name no coordinator, so that one is asked for."""
    without.setenv("PMI_SIZE", "4")
    without.setenv("PMI_RANK", "1")
    cluster = start._cluster(None, None, None)
    message = (
        "JAX does not find the coordinator from what MPICH or Intel MPI says; pass coordinator"
    )
    with pytest.raises(ValueError, match=message):
        compat.cluster_parameters(cluster.source, None, cluster.num_processes, 1, 5)
    cluster = start._cluster("host:1", None, None)
    assert (cluster.coordinator, cluster.num_processes, cluster.process_id) == ("host:1", 4, 1)


def test_gpus_are_counted_as_cuda_counts_them():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, MIG-a,-1,5"}) == ["3", "MIG-a"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []


# what the processes learn when they meet


def by_meeting(patch, gpus, source="arguments"):
    """Return what JAX is told in each process of hosts a and b, which see these GPUs."""
    hosts = [(node, seen) for node, each in gpus.items() for seen in each]
    members = [
        Member(process_id=i, num_processes=len(hosts), node=node, runs={}, gpus=seen.split(","))
        for i, (node, seen) in enumerate(hosts)
    ]
    found = []
    for me in members:
        patch.setattr(start, "meet", lambda *_, **__: members)
        patch.setattr(start, "_node_here", lambda me=me: me.node)
        patch.setattr(start, "visible_gpus", lambda me=me: me.gpus)
        patch.setattr(start, "fingerprint", dict)
        patch.setattr(start.compat, "backends_started", lambda: False)
        patch.setattr(start, "Ending", lambda *_: start)  # something with a `begin`
        patch.setattr(start, "begin", lambda: None, raising=False)
        said = {}
        patch.setattr(jax.distributed, "initialize", lambda *_, _to=said, **more: _to.update(more))
        patch.setattr(start, "_hosts", None)
        zeroxla.initialize(
            "127.0.0.1:1234", num_processes=len(members), process_id=me.process_id, timeout=1
        )
        found.append(said["local_device_ids"])
    return found


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [
        ({"a": [EIGHT], "b": [EIGHT]}, [None, None]),
        ({"a": ["0,1", "0,1"], "b": ["0,1", "0,1"]}, [[0], [1], [0], [1]]),
        ({"a": [EIGHT] * 4}, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ({"a": [EIGHT] * 8}, [[i] for i in range(8)]),
        # Shared out by a wrapper, or by containers that have the host's name.
        ({"a": ["0,1", "2,3"]}, [None, None]),
        ({"a": [str(i) for i in range(8)]}, [None] * 8),
        # Hosts that differ: one process with two, two that share two.
        ({"a": ["0,1"], "b": ["0,1", "0,1"]}, [None, [0], [1]]),
    ],
)
def test_without_a_clusters_variables_the_meeting_tells_who_shares_a_host(without, gpus, devices):
    assert by_meeting(without, gpus) == devices


@pytest.mark.parametrize(
    ("taken", "seen", "allocated", "said"),
    [
        ([1] * 4, 8, 0, "leave 28 GPUs idle: 4 hosts x 1 GPU, 8 present; call zeroxla.initialize"),
        ([6], 8, 0, "leave 2 GPUs idle: 1 host x 6 GPUs, 8 present"),
        # Slurm has hidden the others: --gpu-bind=single:1.
        ([2, 2], 2, 4, "leave 4 GPUs idle: 2 hosts x 2 GPUs, 4 present"),
    ],
)
def test_a_mesh_says_that_hosts_have_more_gpus(monkeypatch, taken, seen, allocated, said):
    """As after `jax.distributed.initialize()` under Slurm, which takes one GPU a process."""
    devices = [
        SimpleNamespace(process_index=p, id=p) for p, n in enumerate(taken) for _ in range(n)
    ]
    hosts = [(f"host {p}", [*map(str, range(seen))], allocated) for p in range(len(taken))]
    monkeypatch.setattr(start, "_hosts", hosts)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr("zeroxla.mesh.make_mesh.Mesh", lambda grid, *_, **__: grid)
    with pytest.warns(UserWarning, match=re.escape(said)):
        make_mesh.make_mesh()
    monkeypatch.setattr(start, "_hosts", [(name, gpus[:1], 0) for name, gpus, _ in hosts])
    make_mesh.make_mesh()  # All that are there; a warning would be an error.


def test_names_of_nodes_are_slurms_before_the_machines(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    for variables, name in (
        ({}, socket.gethostname()),
        ({"SLURMD_NODENAME": "n7"}, "n7"),
        ({"SLURMD_NODENAME": "n7", "ZEROXLA_NODE": "node 0"}, "node 0"),
    ):
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setattr(start, "_hosts", None)
        assert start.nodes_of_processes() == [name]
    monkeypatch.setattr(start, "_hosts", None)


def test_two_processes_that_share_a_machine_tell_jax_so(tmp_path):
    """Real ones, with nothing but arguments: JAX sees half of the four GPUs in each."""
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys, zeroxla, jax\n"
        "from jax._src import xla_bridge\n"
        "zeroxla.initialize(sys.argv[1], num_processes=2, process_id=int(os.environ['ME']))\n"
        "print('visible', xla_bridge.CUDA_VISIBLE_DEVICES.value)\n"
    )
    where = f"127.0.0.1:{free_port()}"
    started = [
        processes.start([script, where], ME=i, CUDA_VISIBLE_DEVICES="0,1,2,3", JAX_PLATFORMS="cpu")
        for i in (0, 1)
    ]
    for process, said in zip(started, ("visible 0,1\n", "visible 2,3\n"), strict=True):
        status, out = processes.finish(process)
        assert status == 0, out
        assert said in out
