"""Real programs start the processes: Slurm of two nodes, Open MPI, MPICH, an sshd. The scripts are
those of docs/gpus.md.

Debian has them in the packages slurmctld, slurmd, slurm-client, munge, openmpi-bin, mpich and
openssh-server. GPUs are stood in for by device files, which Slurm puts into CUDA_VISIBLE_DEVICES,
and by what JAX is told.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tools.train import values

from multihost import processes
from zeroxla.cli.launch.ranks import free_port

PAGE = Path(__file__).parents[2] / "docs" / "gpus.md"
TINY = (
    "--layers 1 --width 16 --heads 2 --batch 8 --length 16 --eval-batches 1 --sample-bytes 0 "
    "--persistence-threshold 0 --save-every 100000 --eval-every 100000"
)
# What a process takes, and of which node it is.
SAYS = """
import jax
import zeroxla
from jax._src import xla_bridge
from zeroxla.mesh.processes.start import nodes_of_processes

zeroxla.initialize()
me, gpus = jax.process_index(), xla_bridge.CUDA_VISIBLE_DEVICES.value
print(f"process {me}: node {nodes_of_processes()[me]}, GPUs {gpus}", flush=True)
"""

pytestmark = pytest.mark.slow


def needs(*programs):
    """Skip the test if a program is not installed."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [name for name in programs if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("starting daemons needs root")
    os.environ["PATH"] = path


def said(out):
    """Return {process: (node, GPUs)} from the output of processes that run SAYS."""
    found = re.findall(r"process (\d+): node (.+?), GPUs (\S+)", out)
    return {int(number): (node, gpus) for number, node, gpus in found}


def block(language, heading):
    """Return the first block of code under a heading of the page."""
    part = PAGE.read_text().partition(f"### {heading}\n")[2]
    return re.search(rf"```{language}\n(.*?)```", part, re.DOTALL)[1]


def until(condition, seconds, state):
    """Wait until something is so, and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.5)
    raise AssertionError(state())


@contextlib.contextmanager
def daemons():
    """Yield a list of files with the numbers of daemons, which are ended afterwards."""
    files: list[Path] = []
    try:
        yield files
    finally:
        for file in reversed(files):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(file.read_text()), signal.SIGTERM)


@pytest.fixture
def program(tmp_path):
    """A command `zeroxla` that trains the tiny model whatever else it is told, for as many steps
    as the file `steps` says, and a script that says what a process takes."""
    command = tmp_path / "bin" / "zeroxla"
    command.parent.mkdir()
    command.write_text(
        f'#!/bin/sh\nexec {sys.executable} -m zeroxla "$@" {TINY} --steps $(cat {tmp_path}/steps)\n'
    )
    command.chmod(0o755)
    (tmp_path / "steps").write_text("1000000")
    (tmp_path / "says.py").write_text(SAYS)
    return tmp_path


SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/ctld.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n1 NodeAddr=127.0.0.2 Port={ports[1]} CPUs=64 Gres=gpu:8
NodeName=n2 NodeAddr=127.0.0.3 Port={ports[2]} CPUs=64 Gres=gpu:8
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(program, monkeypatch):
    """A Slurm cluster of the nodes n1 and n2 on this machine, each with a host name of its own and
    eight files for GPUs; yields a function that runs one of its commands."""
    needs("slurmctld", "slurmd", "srun", "sbatch", "munged", "unshare")
    folder = program / "slurm"
    (folder / "munge").mkdir(parents=True, mode=0o700)
    (folder / "state").mkdir()
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    ports = [free_port() for _ in range(3)]
    text = SLURM_CONF.format(folder=folder, host=socket.gethostname(), ports=ports)
    (folder / "slurm.conf").write_text(text)
    for i in range(8):
        os.mknod(folder / f"gpu{i}", 0o600 | 0o020000, os.makedev(1, 3))
    (folder / "gres.conf").write_text(
        "".join(f"NodeName={n} Name=gpu File={folder}/gpu[0-7]\n" for n in ("n1", "n2"))
    )
    hosts = Path("/etc/hosts").read_text() + "\n127.0.0.2 n1\n127.0.0.3 n2\n"
    (folder / "hosts").write_text(hosts)
    for name in [name for name in os.environ if name.startswith(("SLURM", "ZEROXLA"))]:
        monkeypatch.delenv(name)
    environment = processes.environment(
        SLURM_CONF=folder / "slurm.conf",
        HOME=program,
        JAX_PLATFORMS="cpu",
        PATH=f"{program / 'bin'}:{os.environ['PATH']}",
    )

    def run(*command, wait=True):
        started = subprocess.Popen(
            [str(word) for word in command],
            cwd=program,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return processes.finish(started) if wait else started

    with daemons() as files:
        munge = {name: folder / "munge" / name for name in ("socket", "pid", "log", "seed")}
        options = [
            f"--socket={munge['socket']}",
            f"--pid-file={munge['pid']}",
            f"--log-file={munge['log']}",
            f"--seed-file={munge['seed']}",
        ]
        assert run("munged", "--force", f"--key-file={key}", *options)[0] == 0
        files.append(munge["pid"])
        assert run("slurmctld", "-f", folder / "slurm.conf")[0] == 0
        files.append(folder / "ctld.pid")
        for node in ("n1", "n2"):
            start = (
                f"hostname {node} && mount --bind {folder}/hosts /etc/hosts && "
                f"exec slurmd -f {folder}/slurm.conf -N {node}"
            )
            status, out = run("unshare", "--uts", "--mount", "sh", "-c", start)
            if status != 0 and "Operation not permitted" in out:
                pytest.skip("a node's own host name needs namespaces, which are not allowed here")
            assert status == 0, out
            files.append(folder / f"{node}.pid")

        def logs():
            return "\n".join(file.read_text()[-2000:] for file in sorted(folder.glob("*.log")))

        until(lambda: run("sinfo", "-h", "-o", "%D %t")[1].strip() == "2 idle", 60, logs)
        yield run
        run("scancel", "--user=root", "--signal=KILL", "--full")
        run("scancel", "--user=root")
        until(lambda: run("squeue", "-h")[1] == "", 60, logs)


def job_of(slurm, number):
    """Return what Slurm says about a job, by name."""
    _, out = slurm("scontrol", "show", "job", number, "--oneliner")
    return dict(word.partition("=")[::2] for word in out.split())


def test_slurm_tells_processes_their_gpus(slurm):
    def run(*options):
        status, out = slurm("srun", *options, sys.executable, "says.py")
        assert status == 0, out
        return said(out)

    one = run("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8")
    assert one == {0: ("n1", "all"), 1: ("n2", "all")}
    four = run("--nodes=1", "--ntasks-per-node=4", "--gpus-per-node=8")
    assert four == {i: ("n1", gpus) for i, gpus in enumerate(("0,1", "2,3", "4,5", "6,7"))}
    uneven = run("--nodes=2", "--ntasks=3", "--distribution=plane=2", "--gpus-per-node=2")
    assert uneven == {0: ("n1", "0"), 1: ("n1", "1"), 2: ("n2", "all")}
    # Slurm has shared them out.
    bound = run("--nodes=1", "--ntasks=2", "--gpus-per-task=2")
    assert bound == {0: ("n1", "all"), 1: ("n1", "all")}


def test_the_pages_slurm_script_goes_on_after_its_time_limit_until_it_is_complete(
    slurm, program, text
):
    (program / "text").symlink_to(text)
    script = block("bash", "Slurm")
    assert "#SBATCH --requeue" in script
    (program / "train.sh").write_text(script)
    token = re.search(r"`\((umask 077; openssl.*?)\)`", PAGE.read_text())[1]
    status, out = slurm("sh", "-c", token)
    assert status == 0, out
    assert (program / ".zeroxla_token").stat().st_mode & 0o777 == 0o600
    # Half the page's hosts, and a short limit; all else is as the page has it.
    given = ["--nodes=2", "--cpus-per-task=2", "--time=4", "--output=out.txt"]
    status, number = slurm("sbatch", "--parsable", *given, "train.sh")
    assert status == 0, number
    number, out = number.strip(), program / "out.txt"

    def printed():
        return out.read_text() if out.exists() else "nothing was printed"

    until(lambda: job_of(slurm, number).get("Restarts") == "1", 300, printed)
    run = program / "runs" / number
    stopped = int(re.search(r"Stopped after step (\d+) and saved", printed())[1])
    assert list(values(run, "loss")) == list(range(1, stopped + 1))
    assert job_of(slurm, number)["JobState"] == "PENDING"  # and not completed
    (program / "steps").write_text(str(stopped + 5))
    slurm("scontrol", "update", f"JobId={number}", "StartTime=now")
    until(lambda: job_of(slurm, number)["JobState"] == "COMPLETED", 300, printed)
    assert job_of(slurm, number)["ExitCode"] == "0:0"
    assert f"Resuming runs/{number} after step {stopped}" in printed()
    assert list(values(run, "loss")) == list(range(1, stopped + 6))
    # Two hosts, and one process on each.
    assert "Mesh: node=2 x device=1" in printed()


def test_mpirun_tells_processes_their_gpus_and_passes_the_status_on(program, monkeypatch):
    needs("mpirun")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    variables = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "JAX_PLATFORMS": "cpu", "ZEROXLA_TOKEN": "x"}

    def run(number, *program):
        # Docs: --map-by ppr:N:node --bind-to none.
        command = ["mpirun", "-n", number, "--map-by", f"ppr:{number}:node", "--bind-to", "none"]
        started = subprocess.Popen(
            [str(word) for word in (*command, "--oversubscribe", sys.executable, *program)],
            env=processes.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return processes.finish(started)

    says = program / "says.py"
    status, out = run(2, says)
    assert status == 0, out
    here = socket.gethostname()
    assert said(out) == {0: (here, "0,1"), 1: (here, "2,3")}
    status, out = run(4, says)
    assert said(out) == {i: (here, str(i)) for i in range(4)}, out
    status, out = run(2, "-c", "import sys; sys.exit(75)")
    assert status == 75, out


def test_mpich_needs_the_coordinator_and_no_more(program):
    needs("mpiexec.hydra")
    says = program / "says.py"
    asks = says.read_text().replace("initialize()", f'initialize("127.0.0.1:{free_port()}")')
    (program / "told.py").write_text(asks)

    def run(script):
        command = ["mpiexec.hydra", "-n", "2", sys.executable, str(script)]
        started = subprocess.Popen(
            command,
            env=processes.environment(CUDA_VISIBLE_DEVICES="0,1,2,3", JAX_PLATFORMS="cpu"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return processes.finish(started)

    status, out = run(says)
    assert status != 0
    assert "JAX does not find the coordinator from what MPICH or Intel MPI says" in out
    status, out = run(program / "told.py")
    here = socket.gethostname()
    assert said(out) == {0: (here, "0,1"), 1: (here, "2,3")}, out


def test_mpirun_in_a_slurm_job_counts_its_own_processes(slurm):
    """Its daemon on the other node is a task of `srun`, and has Slurm's variables of one."""
    needs("mpirun")
    root = "OMPI_ALLOW_RUN_AS_ROOT"
    inner = (
        f"export {root}=1 {root}_CONFIRM=1 ZEROXLA_TOKEN=x; exec mpirun -n 2 --map-by ppr:1:node "
        f"--bind-to none -x ZEROXLA_TOKEN {sys.executable} says.py"
    )
    given = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--wait", "--output=mpi.txt"]
    status, _ = slurm("sbatch", *given, "--wrap", inner)
    _, out = slurm("cat", "mpi.txt")
    assert status == 0, out
    assert said(out) == {0: ("n1", "all"), 1: ("n2", "all")}


def test_launch_starts_processes_over_a_real_ssh(program, text, tmp_path):
    needs("sshd", "ssh", "ssh-keygen")
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    Path("/run/sshd").mkdir(exist_ok=True)
    port = free_port()
    (folder / "sshd.conf").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host\nPidFile {folder}/pid\n"
        f"AuthorizedKeysFile {folder}/authorized\nStrictModes no\nPermitRootLogin yes\n"
        "PasswordAuthentication no\nUsePAM no\n"
    )
    # Two names for this machine.
    (folder / "hosts").write_text("localhost slots=4\n127.0.0.1 slots=4\n")
    ssh = f"ssh -p {port} -i {folder}/user -o BatchMode=yes -o StrictHostKeyChecking=no"
    ssh += f" -o UserKnownHostsFile={folder}/known"
    launch = ["launch", "--hostfile", folder / "hosts", "--ssh", ssh, "--port", free_port(), "--"]
    with daemons() as files:
        sshd = shutil.which("sshd")
        subprocess.run([sshd, "-f", str(folder / "sshd.conf")], check=True)
        files.append(folder / "pid")
        until((folder / "pid").exists, 20, lambda: "no sshd")
        status, out = processes.zeroxla(
            *launch, sys.executable, program / "says.py", JAX_PLATFORMS="cpu"
        )
        assert status == 0, out
        assert said(out) == {0: ("node 0", "all"), 1: ("node 1", "all")}
        # A signal to one process there stops all, and the launcher ends with its status.
        run = tmp_path / "run"
        train = [program / "bin" / "zeroxla", "train", "--data", text, "--run", run]
        started = processes.start(["-m", "zeroxla", *launch, *train], JAX_PLATFORMS="cpu")
        metrics = run / "metrics.jsonl"
        until(lambda: metrics.exists() and values(run, "loss"), 300, started.poll)
        os.kill(processes.working_on(run, "ZEROXLA_PROCESS_ID=1"), signal.SIGTERM)
        status, out = processes.finish(started)
        assert status == 75, out
        assert "launch:" not in out
