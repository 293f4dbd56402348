"""The coordinator and its islands over TCP, without JAX."""

import contextlib
import errno
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zeroxla.step.islands.membership import door
from zeroxla.step.islands.membership.client import Membership
from zeroxla.step.islands.membership.coordinator import Coordinator
from zeroxla.step.islands.membership.frames import FrameError, FrameWriter
from zeroxla.step.islands.membership.ledger import Ledger
from zeroxla.step.islands.membership.messages import Closed, MemberReport, Position, View

TOKEN = "between islands"
FACTS = {"model": "mlp"}


@pytest.fixture
def run():
    """Start coordinators and islands that are closed at the end."""
    with contextlib.ExitStack() as stack:

        class Run:
            def coordinator(self, **options):
                options = {"num_islands": 2, "deadline": 5.0, **options}
                place = options.pop("address", "127.0.0.1:0")
                return stack.enter_context(Coordinator(place, TOKEN, **options))

            def join(self, there, token=TOKEN, **options):
                found = Membership(there.address, token, **{"timeout": 10.0, **options})
                stack.callback(found.close)
                return found

        yield Run()


def begin(*members, versions=(0,)):
    for member in members:
        member.tell(facts=FACTS, versions=versions)
    for member in members:
        member.begin()
        member.tell(trains=True)


def do_round(number, *members):
    """Let islands hold the result of a round without an exchange."""
    for member in members:
        member.note("ready", number, 1)
    for member in members:
        assert member.wait_for(lambda m=member: m.view.attempt.startswith(f"{number}/"), 10)
        member.note("held", number, (member.view.attempt, "same"))
    for member in members:
        assert member.wait_for(lambda m=member: m.view.round > number, 10)
        member.drop(number)


def test_islands_come_train_and_leave(run):
    events = []
    there = run.coordinator(say=events.append)
    one, two = run.join(there), run.join(there)
    assert sorted([one.view.slot, two.view.slot]) == [0, 1]
    assert not one.view.started
    begin(one, two)
    one.tell(position=Position(batches=3, rows=24))
    do_round(0, one, two)
    assert one.view.versions == two.view.versions == (1,)
    assert one.wait_for(lambda: len(one.view.living) == 2, 5)
    two.close()
    assert one.wait_for(lambda: len(one.view.living) == 1, 5)
    three = run.join(there)  # takes the slot that is free
    assert three.view.slot == two.report.slot
    assert three.view.started
    four = run.join(there, slot=9)
    assert four.view.slot == 9
    kinds = [event["what"] for event in events]
    assert kinds[:4] == ["joined", "joined", "started", "closed"]
    assert "lost" in kinds


def test_it_goes_on_from_its_file(run, tmp_path):
    state = tmp_path / "state.json"
    there = run.coordinator(state=state)
    one, two = run.join(there), run.join(there)
    begin(one, two)
    one.tell(position=Position(batches=7, rows=56))
    do_round(0, one, two)
    there.close()
    assert one.wait_for(lambda: not one.is_connected, 5)
    found = Ledger.load(state)
    assert (found.round, found.versions, found.lives) == (1, (1,), 1)
    assert found.positions[one.report.slot] == Position(batches=7, rows=56)
    again = run.coordinator(address=there.address, state=state)
    for member in (one, two):
        member.tell(versions=(1,), round=1)
        assert member.wait_for(lambda m=member: m.is_connected and m.view.started, 10)
    do_round(1, one, two)
    assert again.ledger.lives == 2
    assert again.ledger.versions == (2,)
    slot = one.report.slot
    one.close()
    assert two.wait_for(lambda: len(two.view.living) == 1, 10)
    assert run.join(again, slot=slot).view.position == Position(batches=7, rows=56)


def test_nobody_is_told_of_a_round_that_could_not_be_written(run, tmp_path, monkeypatch):
    """The disk of the coordinator is full for a while."""
    events = []
    there = run.coordinator(state=tmp_path / "state.json", say=events.append)
    one, two = run.join(there), run.join(there)
    begin(one, two)
    for member in (one, two):
        member.note("ready", 0, 1)
    assert one.wait_for(lambda: bool(one.view.attempt), 5)
    assert two.wait_for(lambda: bool(two.view.attempt), 5)
    save, full = Ledger.save, [True]

    def fail(self, path):
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, path)

    monkeypatch.setattr(Ledger, "save", fail)
    for member in (one, two):
        member.note("held", 0, (member.view.attempt, "same"))
    assert not one.wait_for(lambda: one.view.round > 0, 0.5)
    assert Ledger.load(tmp_path / "state.json").round == 0
    full[0] = False
    assert one.wait_for(lambda: one.view.round == 1, 5)
    assert Ledger.load(tmp_path / "state.json").round == 1
    (first, *_) = [event for event in events if event["what"] == "unsaved"]
    assert first["error"] == "No space left on device"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    Ledger(round=3).save(path)
    monkeypatch.setattr("zeroxla.step.islands.membership.ledger.os.getpid", lambda: "x")
    (tmp_path / ".state.json.x").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        Ledger(round=4).save(path)
    assert Ledger.load(path).round == 3
    assert [x.name for x in tmp_path.iterdir()] == ["state.json"]


def test_an_island_that_is_another_program_is_refused(run):
    there = run.coordinator(num_islands=1)
    one, two = run.join(there), run.join(there)
    begin(one)
    with pytest.raises(ValueError, match="has other model than the others; model: mlp there, cnn"):
        two.begin(facts={"model": "cnn"}, versions=(0,))
    with pytest.raises(ValueError, match=r"refuses this island: another island has slot 0"):
        run.join(there, slot=0, timeout=1.0)


def test_who_does_not_come_or_cannot_come_is_named(run):
    there = run.coordinator()
    with pytest.raises(
        TimeoutError, match=r"did not answer within 1 s, or has another token or version"
    ):
        run.join(there, "another", timeout=1.0)
    one = run.join(there, timeout=0.5)
    with pytest.raises(TimeoutError, match=r"other islands did not come within 0 s; start them"):
        one.begin(facts=FACTS, versions=(0,))
    with pytest.raises(ValueError, match="token is empty"):
        run.join(there, "")


BAD = {
    "num_islands": ({"num_islands": 0}, "num_islands=0; a run has at least 1"),
    "deadline": ({"deadline": 0.0}, "deadline=0.0; give seconds above 0"),
    "address": ({"address": "here"}, "'here' is not an address"),
    "elsewhere": ({"address": "192.0.2.1:7000"}, "cannot listen at 192.0.2.1:7000"),
    "folder": ({"state": "/nonexistent/state.json"}, "cannot write /nonexistent/state.json: No"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_coordinator_that_cannot_be(run, name):
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        run.coordinator(**options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not JSON", "cannot be read as a coordinator's state"),
        ("[]", "is not the state of a coordinator"),
        (json.dumps({"format": 99}), "format 99, and this version reads 1"),
        (json.dumps({"format": 1, "facts": {}}), "is not the state of a coordinator"),
    ],
)
def test_a_file_that_is_something_else(run, tmp_path, text, message):
    state = tmp_path / "state.json"
    state.write_text(text)
    with pytest.raises(ValueError, match=message):
        run.coordinator(state=state)
    assert state.read_text() == text


def greeted(there, member):
    """Return a connection to a coordinator that knows the token."""
    host, port = there.address.split(":")
    connection, _, key = door.call(host, int(port), TOKEN, member, timeout=5)
    return connection, FrameWriter(connection, key, member)


def test_one_that_is_silent_is_lost_after_the_deadline(run):
    """A link that is cut sends no end of the connection."""
    there = run.coordinator(num_islands=1, deadline=1.0)
    one = run.join(there)
    begin(one)
    connection, writer = greeted(there, 77)
    report = MemberReport(
        slot=5, process=0, num_processes=1, port=1, facts=FACTS, trains=True, versions=(0,)
    )
    writer.write("message", report.to_bytes())
    assert one.wait_for(lambda: len(one.view.living) == 2, 5)
    begin_at = time.monotonic()
    assert one.wait_for(lambda: len(one.view.living) == 1, 5)
    assert 0.5 < time.monotonic() - begin_at < 3
    connection.close()


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b"\xff", b'{"slot": -1}', b"[" * 9999])
def test_a_message_of_another_form_ends_the_connection(run, body):
    there = run.coordinator(num_islands=1)
    connection, writer = greeted(there, 77)
    writer.write("message", body)
    connection.settimeout(5)
    with contextlib.suppress(OSError):
        while connection.recv(1 << 16):
            pass
    connection.close()
    with pytest.raises(FrameError, match="another form"):
        MemberReport.of(body)
    begin(run.join(there))


def test_messages_come_as_they_were_sent():
    report = MemberReport(
        slot=3,
        process=1,
        num_processes=2,
        port=7,
        host="h",
        facts={"a": "b"},
        trains=True,
        round=9,
        versions=(1, 2),
        position=Position(batches=4, rows=5),
        ready={9: 8},
        held={9: ("9/1.1", "digest")},
        failed={8: ("8/1.1", 1, (0, 2))},
        checksums={0: (1, 2**40)},
    )
    assert MemberReport.of(report.to_bytes()) == report
    view = View(slot=1, closes_in=0.5, closed={0: Closed(round=1, attempt="a", digests=("d",))})
    assert View.of(view.to_bytes()) == view


def test_a_coordinator_needs_no_jax():
    code = (
        "import sys, zeroxla; zeroxla.Coordinator('127.0.0.1:0', 't', num_islands=1).close(); "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_decision_needs_clocks_that_agree():
    """Hosts' clocks may be apart by hours: only durations count, on a clock of each process."""
    folder = Path(door.__file__).parent
    texts = [path.read_text() for path in (*folder.glob("*.py"), *folder.parent.glob("*.py"))]
    assert len(texts) > 15
    assert not any(word in text for text in texts for word in ("time.time(", "datetime"))


def test_it_listens_at_one_address_only_once(run):
    there = run.coordinator()
    with pytest.raises(ValueError, match=r"cannot listen at .*with a free port"):
        run.coordinator(address=there.address)
    with socket.create_connection(tuple(there.address.split(":"))):
        pass
