"""What strangers and broken programs send to the meeting does not end, delay or enter it."""

import dataclasses
import logging
import random
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from zeroxla.cli.launch.options import LaunchOptions
from zeroxla.cli.launch.ranks import free_port, make_ranks
from zeroxla.mesh.processes.environment import TOKEN, find_token
from zeroxla.mesh.processes.meeting import meet
from zeroxla.mesh.processes.reception import listening_address

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import meeting


@pytest.fixture
def reception():
    """Process 0 and process 1 of three, who wait for process 2; its port and their lists."""
    port, lists = free_port(), {}

    def attend(number):
        lists[number] = meet(
            meeting.member(number), f"127.0.0.1:{port}", timeout=30, token=meeting.TOKEN
        )

    threads = [threading.Thread(target=attend, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    while not meeting.is_open(port):
        time.sleep(0.01)

    def complete():
        began = time.monotonic()
        attend(2)
        for thread in threads:
            thread.join()
        members = [meeting.member(i) for i in range(3)]
        assert lists == dict.fromkeys(range(3), members)
        return time.monotonic() - began

    return port, complete


@pytest.mark.parametrize("kind", meeting.KINDS)
def test_a_guest_of_each_kind_is_dropped_with_a_line(reception, caplog, kind):
    port, complete = reception
    with socket.create_connection(("127.0.0.1", port), timeout=5) as guest:
        own = f"the meeting dropped a connection from 127.0.0.1:{guest.getsockname()[1]}: "
        challenge = guest.recv(meeting.CHALLENGE_BYTES, socket.MSG_WAITALL)
        rng = random.Random(0)
        try:
            guest.sendall(meeting.KINDS[kind](rng, challenge))
            guest.shutdown(socket.SHUT_WR)
            while guest.recv(65536):
                pass
        except OSError:
            pass  # it was dropped before it had said all
        assert complete() < 5
    said = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith(own) for line in said) == 1, said


def test_idle_guests_delay_nobody(reception):
    port, complete = reception
    idle = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(60)]
    assert complete() < 5
    for connection in idle:
        connection.close()


def test_many_at_once():
    logging.disable()
    try:
        seconds, let_in, _ = meeting.hold(60, random.Random(1))
    finally:
        logging.disable(logging.NOTSET)
    assert seconds < 5  # below 1 on a machine that does nothing else
    assert let_in > 50


def test_without_the_token_nobody_is_a_member(reception):
    port, complete = reception
    with pytest.raises(TimeoutError, match=r"gave no verdict: .* it has another ZEROXLA_TOKEN"):
        meet(meeting.member(2), f"127.0.0.1:{port}", timeout=5, token="another")
    complete()


def test_a_member_that_leaves_may_come_again(reception):
    port, complete = reception
    with socket.create_connection(("127.0.0.1", port), timeout=5) as gone:
        challenge = gone.recv(meeting.CHALLENGE_BYTES, socket.MSG_WAITALL)
        gone.sendall(
            meeting.prove(meeting.TOKEN, challenge) + meeting.to_line(meeting.member(2))[:-1]
        )
    complete()


def test_local_launches_listen_on_loopback_alone(reception):
    port, complete = reception
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    ]
    assert listening == [f"0100007F:{port:04X}"]
    complete()


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),
        ("::1", "::1"),
        ("192.0.2.7", ""),  # not of this machine: an address that a router translates
        ("no-such-host.invalid", ""),
    ],
)
def test_where_process_0_listens(host, address):
    assert listening_address(host) == address


def test_a_name_of_this_host_for_loopback_is_heard_everywhere(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: found)
    assert listening_address("alpha") == ""
    assert listening_address("localhost") == "127.0.1.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
@pytest.mark.parametrize("token", ["", "a secret"])
def test_a_meeting_without_a_token_is_told(host, token, caplog):
    """On loopback, only programs of this machine can come."""
    alone = dataclasses.replace(meeting.member(0), num_processes=1)
    meet(alone, f"{host}:{free_port()}", timeout=5, token=token)
    told = [record.getMessage() for record in caplog.records]
    if token or host == "127.0.0.1":
        assert told == []
    else:
        assert "share no token" in told[0]
        assert "Set ZEROXLA_TOKEN to" in told[0]


def test_each_launch_has_its_own_token(tmp_path):
    (tmp_path / "hosts").write_text("alpha\nbeta\n")
    options = LaunchOptions(hostfile=tmp_path / "hosts")
    first, second = make_ranks(options, 0), make_ranks(options, 0)
    assert len({rank.env[TOKEN] for rank in first}) == 1
    assert len(first[0].env[TOKEN]) == 64
    assert first[0].env[TOKEN] != second[0].env[TOKEN]
    assert not any(first[0].env[TOKEN] in word for rank in first for word in rank.command)


def test_the_token_is_read(tmp_path):
    file = tmp_path / "token"
    file.write_text("from a file\n")
    assert find_token({}) == ""
    assert find_token({"ZEROXLA_TOKEN_FILE": str(file)}) == "from a file"
    assert find_token({"ZEROXLA_TOKEN_FILE": str(file), "ZEROXLA_TOKEN": "itself"}) == "itself"
    with pytest.raises(ValueError, match=r"ZEROXLA_TOKEN_FILE=.* cannot be read"):
        find_token({"ZEROXLA_TOKEN_FILE": str(tmp_path / "none")})
    file.write_text("\n")
    with pytest.raises(ValueError, match=r"ZEROXLA_TOKEN_FILE=.* is empty"):
        find_token({"ZEROXLA_TOKEN_FILE": str(file)})
