"""`zeroxla launch --islands` and `zeroxla island`: what they start. The programs are scripts."""

from __future__ import annotations

import os
import re
import signal
import stat
import threading
import time

import pytest
from tools.quick import thinned

from zeroxla.cli.islands.kept_coordinator import KeptCoordinator
from zeroxla.cli.islands.launch import launch_islands
from zeroxla.cli.launch.options import LaunchOptions
from zeroxla.cli.main import main
from zeroxla.mesh.processes.environment import ISLANDS_TOKEN
from zeroxla.step.islands.membership.client import Membership

TOKEN = "between islands"


def run(script, **options):
    """Run a script as two islands."""
    options = LaunchOptions(**{"islands": 2, **options})
    return launch_islands(options, ["sh", "-c", script])


@pytest.mark.smoke
def test_islands_are_told_who_they_are_and_share_out_the_devices(capfd):
    script = (
        "echo $ZEROXLA_SLOT at $ZEROXLA_ISLANDS with $ZEROXLA_SIMULATED_DEVICES; "
        "echo secret $ZEROXLA_ISLANDS_TOKEN"
    )
    assert run(script) == 0
    out, err = capfd.readouterr()
    lines = sorted(out.splitlines())
    addresses = re.findall(r"127\.0\.0\.1:\d+", out)
    assert len(addresses) == 2
    assert len(set(addresses)) == 1
    at = addresses[0]
    assert [x for x in lines if " at " in x] == [f"[island {i}] {i} at {at} with 4" for i in (0, 1)]
    (secret,) = {line.rpartition(" ")[2] for line in lines if "secret" in line}
    assert len(secret) == 64
    assert secret not in err


def test_each_island_has_its_nodes(capfd, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,c,d,e,f,g,h")
    script = "echo $ZEROXLA_PROCESS_ID of $ZEROXLA_NUM_PROCESSES with $CUDA_VISIBLE_DEVICES"
    assert run(script, nodes=2) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[island 0, node 0] 0 of 2 with a,b",
        "[island 0, node 1] 1 of 2 with c,d",
        "[island 1, node 0] 0 of 2 with e,f",
        "[island 1, node 1] 1 of 2 with g,h",
    ]
    with pytest.raises(ValueError, match="2 islands of 2 nodes of 3 devices and this machine sho"):
        run("true", nodes=2, devices_per_node=3)


def test_one_that_fails_is_started_again_and_stops_no_other(capfd):
    script = (
        "[ $ZEROXLA_SLOT = 0 ] && { sleep 2; echo done; exit 0; }; "
        'echo attempt $ZEROXLA_RESTART; [ "$ZEROXLA_RESTART" = 1 ] || kill -9 $$'
    )
    assert run(script, max_restarts=1) == 0
    out, err = capfd.readouterr()
    assert "[island 0] done" in out
    assert "[island 1] attempt 1" in out
    assert re.search(r"launch: island 1: Rank 0 \(this host, \d+\) was killed by SIGKILL", err)
    assert "launch: island 1: starting again (1 of 1 left)" in err
    assert "failed for good" not in err


def test_one_that_fails_for_good_is_named_and_others_go_on(capfd):
    script = "[ $ZEROXLA_SLOT = 1 ] && exit 3; sleep 2; echo done"
    assert run(script) == 3
    out, err = capfd.readouterr()
    assert out == "[island 0] done\n"
    assert err.endswith("launch: failed for good: island 1 (status 3); ended well: 0\n")


def test_one_that_was_interrupted_and_saved_has_not_failed(capfd):
    script = "[ $ZEROXLA_SLOT = 1 ] && exit 75; sleep 1"
    assert run(script, max_restarts=1) == 75
    assert capfd.readouterr().err == ""
    assert run(f"[ $ZEROXLA_SLOT = 0 ] && exit 3; {script}") == 3
    end = "launch: failed for good: island 0 (status 3); interrupted and saved: 1\n"
    assert capfd.readouterr().err.endswith(end)


@pytest.mark.parametrize(
    ("trap", "status"), thinned([("echo saved; exit 75", 75)], slow=[("", 130)], rows=True)
)
def test_ctrl_c_reaches_all_islands(capfd, trap, status):
    script = f"trap '{trap}' TERM; echo ready; while :; do sleep .1; done"
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert run(script, grace=2, max_restarts=3) == status
    out, err = capfd.readouterr()
    for word in ("ready", "saved") if trap else ("ready",):
        assert all(f"[island {i}] {word}" in out for i in (0, 1))
    assert "starting again" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--islands=2", "--hostfile=hosts"], "start `zeroxla coordinate` on one host, and `zerox"),
        (
            ["--islands=2", "--port=29400"],
            "--islands 2 with --port 29400: each island takes a port",
        ),
        (["--islands=0"], "--islands 0: at least 1"),
        (["--islands=2", "--round-deadline=0"], "--round-deadline 0.0: above 0"),
        (["--state=file"], "--state: without effect, there are no islands"),
        (["--islands=2", "--state=no/such/file"], "cannot write no/such/file"),
        (["--islands=2"], "launch needs a program; write it after --"),
    ],
)
def test_options_that_do_not_go_together(arguments, message, capsys):
    program = [] if message.startswith("launch needs") else ["--", "true"]
    assert main(["launch", *arguments, *program]) == 2
    assert message in capsys.readouterr().err


class TestKeptCoordinator:
    def test_fewer_islands_begin_when_others_have_ended(self, tmp_path):
        said = []
        with KeptCoordinator(
            TOKEN, num_islands=2, state=tmp_path / "file", deadline=20, say=said.append
        ) as kept:
            member = Membership(kept.address, TOKEN, slot=0, timeout=20)
            member.tell(facts={"model": "one"}, versions=(0,))
            assert not member.wait_for(lambda: member.view.started, 0.5)
            kept.expect(2)  # changes nothing
            kept.expect(1)
            assert member.wait_for(lambda: member.view.started, 20)
            member.close()
        assert [event["slots"] for event in said if event["what"] == "started"] == [[0]]

    def test_a_run_that_has_begun_waits_for_nobody_who_has_ended(self, tmp_path):
        with KeptCoordinator(
            TOKEN, num_islands=2, state=tmp_path / "file", deadline=20, say=lambda event: None
        ) as kept:
            members = [Membership(kept.address, TOKEN, slot=i, timeout=20) for i in (0, 1)]
            for member in members:
                member.tell(facts={"model": "one"}, versions=(0,))
            for member in members:
                assert member.wait_for(lambda member=member: member.view.started, 20)
                member.close()
            time.sleep(0.2)
            kept.expect(2)
            with_file = Membership(kept.address, TOKEN, slot=1, timeout=20)
            with_file.tell(facts={"model": "one"}, versions=(0,))
            assert with_file.wait_for(lambda: with_file.view.started, 20)
            with_file.close()


def fake_ssh(tmp_path):
    """What stands in for ssh: another environment, the same machine. It notes its arguments."""
    path = tmp_path / "fake_ssh"
    path.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/arguments.log; shift\n'
        'exec env -i PATH=/usr/bin:/bin sh -c "$*"\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_an_island_over_ssh_has_the_secret_on_no_command_line(tmp_path, capfd, monkeypatch):
    (tmp_path / "hosts").write_text("alpha\nbeta\n")
    monkeypatch.setenv(ISLANDS_TOKEN, "a secret")
    options = ["--join", "10.0.0.1:29500", "--slot", "7", "--hostfile", str(tmp_path / "hosts")]
    script = (
        "echo $ZEROXLA_ISLANDS $ZEROXLA_SLOT $ZEROXLA_ISLANDS_TOKEN, "
        "$ZEROXLA_PROCESS_ID of $ZEROXLA_NUM_PROCESSES"
    )
    command = ["island", *options, "--ssh", fake_ssh(tmp_path), "--", "sh", "-c", script]
    assert main(command) == 0
    out, _ = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        f"[{i}] 10.0.0.1:29500 7 a secret, {i} of 2" for i in (0, 1)
    ]
    assert "a secret" not in (tmp_path / "arguments.log").read_text()


def test_an_island_takes_its_slot_from_the_environment_and_is_started_again(capfd, monkeypatch):
    monkeypatch.setenv(ISLANDS_TOKEN, "a secret")
    monkeypatch.setenv("ZEROXLA_SLOT", "5")
    script = 'echo $ZEROXLA_SLOT $ZEROXLA_RESTART; [ "$ZEROXLA_RESTART" = 1 ]'
    program = ["--", "sh", "-c", script]
    assert main(["island", "--join=10.0.0.1:29500", "--max-restarts=1", *program]) == 0
    out, err = capfd.readouterr()
    assert out == "[0] 5 0\n[0] 5 1\n"
    assert "island: starting all again (1 of 1 left)" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--join=nowhere"], "--join nowhere: give HOST:PORT"),
        (["--join=a:1", "--slot=-1"], "--slot -1: at least 0"),
        (["--join=a:1", "--nodes=0"], "--nodes 0: at least 1"),
        (["--join=a:1"], "island needs a program; write it after --"),
    ],
)
def test_an_island_that_cannot_start(arguments, message, monkeypatch, capsys):
    monkeypatch.setenv(ISLANDS_TOKEN, "a secret")
    assert main(["island", *arguments]) == 2
    assert message in capsys.readouterr().err
