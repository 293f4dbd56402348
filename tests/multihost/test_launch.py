"""`zeroxla launch`: what it starts, what it prints, how it ends. The programs are shell scripts."""

import os
import re
import signal
import stat
import sys
import threading
import time
from pathlib import Path

import pytest
from tools.quick import thinned

from zeroxla.cli.launch.hostfile import Host, read_hostfile
from zeroxla.cli.launch.options import LaunchOptions
from zeroxla.cli.launch.run import launch

# The first line of what JAX prints in each process when one is silent.
NOTICE = (
    "E1124 20:53:13.014279   29407 coordination_service.cc:1518] [8586096984536979273] Use error "
    "polling to propagate the following error to all tasks: UNAVAILABLE: The following tasks are "
    "unhealthy (stopped sending heartbeats):"
)


def run(script, **options):
    return launch(LaunchOptions(**{"nodes": 2, **options}), ["sh", "-c", script])


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.smoke
def test_processes_are_told_who_they_are_and_lines_who_printed_them(capfd):
    script = (
        "echo $ZEROXLA_PROCESS_ID of $ZEROXLA_NUM_PROCESSES on $ZEROXLA_NODE with "
        "$ZEROXLA_SIMULATED_DEVICES, $NPROC threads; echo oops >&2"
    )
    assert run(script, devices_per_node=3) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        f"[{i}] {i} of 2 on node {i} with 3, {os.environ['NPROC']} threads" for i in (0, 1)
    ]
    assert sorted(err.splitlines()) == ["[0] oops", "[1] oops"]


def test_an_error_of_all_processes_is_said_once(capfd):
    """One that is only its own is said, too; other lines are everybody's."""
    script = "echo warning: x >&2; echo error: bad option >&2; exit 2"
    assert run(f'[ "$ZEROXLA_PROCESS_ID" = 1 ] && echo error: own >&2; {script}', nodes=3) == 2
    err = capfd.readouterr().err
    assert err.count("error: bad option") == 1
    assert err.count("error: own") == 1
    assert err.count("warning: x") == 3
    assert "ended with exit code 2" in err


def test_gpus_are_shared_out(capfd, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert run("echo $CUDA_VISIBLE_DEVICES") == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 4,5", "[1] 6,7"]
    with pytest.raises(ValueError, match=r"2 nodes of 3 devices and this machine shows 4 GPUs"):
        run("true", devices_per_node=3)


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("exit 3", 3, "ended with exit code 3"),
        pytest.param("kill -9 $$", 137, "was killed by SIGKILL", marks=pytest.mark.slow),
        pytest.param("kill -TERM $$", 143, "was killed by SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_one_that_fails_ends_all(capfd, end, status, said):
    script = f"echo working $ZEROXLA_PROCESS_ID; [ $ZEROXLA_PROCESS_ID = 0 ] || {end}; sleep 60"
    began = time.monotonic()
    assert run(script) == status
    assert time.monotonic() - began < 15
    err = capfd.readouterr().err
    assert "launch: Rank 1 (this host, " in err
    assert said in err
    assert err.endswith("Its last lines:\n  working 1\n")


def test_a_program_that_is_not_there(capfd):
    assert launch(LaunchOptions(nodes=2), ["no-such-program"]) == 1
    assert "cannot start no-such-program: No such file" in capfd.readouterr().err


def test_what_a_process_leaves_behind_is_ended(tmp_path):
    assert run(f"sleep 61 & echo $! > {tmp_path}/$ZEROXLA_PROCESS_ID") == 0
    for i in (0, 1):
        assert has_ended(int((tmp_path / str(i)).read_text()))


def test_all_are_started_again_as_often_as_asked(capfd):
    script = 'echo attempt $ZEROXLA_RESTART $ZEROXLA_STARTED; [ "$ZEROXLA_RESTART" = 2 ]'
    assert run(script, max_restarts=2, started="now") == 0
    out, err = capfd.readouterr()
    assert {line[4:] for line in out.splitlines()} == {f"attempt {i} now" for i in range(3)}
    assert "starting all again (2 of 2 left)" in err
    assert "starting all again (1 of 2 left)" in err
    assert run("exit 4", max_restarts=1) == 4


@pytest.mark.parametrize(
    ("ends", "status", "said"),
    [
        (("exit 75", "exit 75"), 75, ""),
        (("exit 0", "exit 75"), 75, ""),
        (("sleep 1; exit 75", "exit 75"), 75, ""),
        (("exit 75", "sleep 1; exit 3"), 3, r"Rank 1 \(this host, \d+\) ended with exit code 3"),
    ],
)
def test_an_interruption_that_was_saved_is_passed_on_and_is_no_failure(capfd, ends, status, said):
    script = f"if [ $ZEROXLA_PROCESS_ID = 0 ]; then {ends[0]}; else {ends[1]}; fi"
    assert run(script, max_restarts=0 if said else 1) == status
    err = capfd.readouterr().err
    assert re.search(said, err) if said else err == ""


def test_one_that_hangs_is_named(capfd):
    script = (
        "[ $ZEROXLA_PROCESS_ID = 0 ] || { echo asleep; sleep 60; }; "
        "while :; do echo; sleep .2; done"
    )
    assert run(script, deadline=2) == 1
    err = capfd.readouterr().err
    assert "Rank 1 (this host, " in err
    assert "gave no sign of life for 2 s (--deadline 2)" in err
    assert err.endswith("  asleep\n")


@pytest.mark.slow
def test_a_stopped_process_is_named(capfd):
    script = "[ $ZEROXLA_PROCESS_ID = 0 ] || kill -STOP $$; sleep 60"
    assert run(script, deadline=2) == 1
    assert "has been stopped by a signal for" in capfd.readouterr().err


@pytest.mark.parametrize("number", thinned(["1"], slow=["/job:jax_worker/replica:0/task:1"]))
def test_one_that_the_others_do_not_hear_is_named(capfd, number):
    said = f"{NOTICE}\n{number}\nThe tasks have"
    frames = "".join(f"    @     0x7f{i:02} f()\n" for i in range(30))
    script = (
        f"[ $ZEROXLA_PROCESS_ID = 1 ] || {{ echo '{said} crashed\n{frames}'; exit 3; }}; sleep 60"
    )
    assert run(script, heartbeat=7) == 3
    err = capfd.readouterr().err
    assert re.search(
        r"launch: Rank 1 \(this host, \d+\) was not heard of by the others for 7 s "
        r"\(--heartbeat\): it hangs, or the network does not carry. Rank 0 .* ended with "
        r"exit code 3",
        err,
    )
    assert "0x7f" not in err
    assert "heartbeats" not in err


def test_one_that_was_killed_is_not_said_to_be_silent(capfd):
    """The others may have noticed, too, before all are ended."""
    said = f"{NOTICE}\n1\nThe tasks have"
    script = f"[ $ZEROXLA_PROCESS_ID = 1 ] && kill -9 $$; echo '{said} crashed'; sleep 60"
    assert run(script) == 128 + 9
    err = capfd.readouterr().err
    assert re.search(r"launch: Rank 1 .* was killed by SIGKILL", err)
    assert "not heard of" not in err


@pytest.mark.parametrize(
    ("trap", "status"), thinned([("echo saved; exit 75", 75)], slow=[("", 130)], rows=True)
)
def test_ctrl_c_reaches_all_as_a_request_to_end(capfd, trap, status):
    script = f"trap '{trap}' TERM; echo ready; while :; do sleep .1; done"
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert run(script, grace=2) == status
    out = capfd.readouterr().out.splitlines()
    assert sorted(out) == sorted(
        f"[{i}] {word}" for i in (0, 1) for word in (("ready", "saved") if trap else ("ready",))
    )


# host files


def fake_ssh(tmp_path):
    """What stands in for ssh: another environment, another folder, the same machine."""
    path = tmp_path / "fake_ssh"
    path.write_text(
        f'#!/bin/sh\nhost=$1; shift; echo "$host" >> {tmp_path}/hosts.log; cd /\n'
        'exec env -i PATH=/usr/bin:/bin SSH_HOST="$host" sh -c "$*"\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_hosts_are_reached_over_ssh_with_the_environment(tmp_path, capfd, monkeypatch):
    (tmp_path / "hosts").write_text(
        "# two of them\nme@alpha slots=2\n\nbeta slots=2  # the other\n"
    )
    monkeypatch.setenv("JAX_TEST_ONLY", "passed on")
    monkeypatch.setenv("MINE", "with 'quotes' and\ttabs")
    monkeypatch.setenv("NOT_MINE", "kept here")
    monkeypatch.chdir(tmp_path)
    status = run(
        'echo $SSH_HOST $ZEROXLA_PROCESS_ID $ZEROXLA_COORDINATOR "$JAX_TEST_ONLY" "$MINE" '
        '"$NOT_MINE" $(pwd) $CUDA_VISIBLE_DEVICES',
        nodes=None,
        hostfile=tmp_path / "hosts",
        ssh=fake_ssh(tmp_path),
        export=("MINE",),
    )
    assert status == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        f"[{i}] {host} {i} alpha:29400 passed on with 'quotes' and\ttabs  {tmp_path} 0,1"
        for i, host in enumerate(["me@alpha", "beta"])
    ]


def test_a_host_out_of_reach_is_named(tmp_path, capfd):
    (tmp_path / "hosts").write_text("alpha\nbeta\n")
    options = LaunchOptions(hostfile=tmp_path / "hosts", ssh="sh -c 'exit 255'")
    assert launch(options, ["true"]) == 1
    assert "is out of reach: sh ended with 255" in capfd.readouterr().err


def test_a_lost_connection_ends_the_program_there(tmp_path):
    """Its end of the connection, the standard input of child.py, is closed."""
    (tmp_path / "hosts").write_text("alpha\n")
    options = LaunchOptions(hostfile=tmp_path / "hosts", ssh=fake_ssh(tmp_path), deadline=1)
    assert launch(options, ["sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 62"]) == 1
    assert has_ended(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("alpha slots=2\nbeta slot=2\n", r":2: 'beta slot=2' is not of the form"),
        ("alpha slots=0\n", r":1: slots=0; leave the host out"),
        ("alpha\nalpha\n", r":2: alpha is there twice"),
        ("alpha slots=2\nbeta slots=4\n", r"slots are alpha: 2, beta: 4"),
        ("alpha slots=2\nbeta\n", r"slots are alpha: 2, beta: none given"),
    ],
)
def test_bad_host_files(tmp_path, text, message):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_hostfile(tmp_path / "hosts")


def test_host_files_are_read(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the host file .*: No such file"):
        read_hostfile(tmp_path / "hosts")
    (tmp_path / "hosts").write_text("a slots=8\nuser@b.example   slots=8\n")
    assert read_hostfile(tmp_path / "hosts") == [Host("a", 8), Host("user@b.example", 8)]
    with pytest.raises(ValueError, match=r"--nodes 3 and .* names 2 hosts"):
        run("true", nodes=3, hostfile=tmp_path / "hosts")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "--nodes 0: at least 1"),
        ({"devices_per_node": 0}, "--devices-per-node 0: at least 1"),
        ({"max_restarts": -1}, "--max-restarts -1: at least 0"),
        ({"deadline": -1.0}, "--deadline -1.0: at least 0"),
        ({"heartbeat": 0.0}, "--heartbeat 0.0: at least 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        LaunchOptions(**options)


def test_no_program():
    with pytest.raises(ValueError, match="needs a program; write it after --"):
        launch(LaunchOptions(), [])


def steps(count, then):
    """A program that begins steps, and then does something else in process 1."""
    return (
        "import os, sys, time\n"
        "from zeroxla.mesh.processes import progress\n"
        "rank = os.environ['ZEROXLA_PROCESS_ID']\n"
        f"for i in range({count} + (rank == '0')):\n"
        "    progress.mark(); time.sleep(.1)\n"
        "print('begun', flush=True)\n"
        f"if rank == '1':\n    {then}\n"
        "else:\n    time.sleep(3)\n"
    )


def run_python(program, **options):
    return launch(LaunchOptions(nodes=2, **options), [sys.executable, "-c", program])


def test_one_that_hangs_between_steps_is_named(capfd):
    began = time.monotonic()
    assert run_python(steps(4, "time.sleep(600)"), heartbeat=1) == 1
    assert time.monotonic() - began < 15
    err = capfd.readouterr().err
    assert re.search(
        r"launch: Rank 1 \(this host, \d+\) hangs: it has begun 4 steps, and others have waited in "
        r"the next one for \d s \(--heartbeat 1\), \d+ s after the start. Its last lines:\n  begun",
        err,
    )


@pytest.mark.parametrize(
    "then",
    thinned(
        ["with progress.compiling(): time.sleep(3)"],
        slow=["[(print('.', flush=True), time.sleep(.4)) for _ in range(8)]"],
    ),
    ids=["compiles", "prints"],
)
def test_one_that_others_wait_for_with_reason_is_left_alone(capfd, then):
    assert run_python(steps(4, then), heartbeat=1) == 0
    assert "launch:" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_step_that_usually_takes_long_may_take_long(capfd):
    program = steps(3, "time.sleep(1.5)").replace("time.sleep(.1)", "time.sleep(2 * (rank == '1'))")
    assert run_python(program, heartbeat=1) == 0
    assert "launch:" not in capfd.readouterr().err
