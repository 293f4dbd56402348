"""`zeroxla coordinate`: what it prints, what it refuses, how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from zeroxla.cli.islands.events import in_words, is_rare
from zeroxla.cli.main import main
from zeroxla.mesh.processes.environment import ISLANDS_TOKEN, ISLANDS_TOKEN_FILE
from zeroxla.step.islands.membership.client import Membership

TOKEN = "between islands"
# Runs the command, and says at the end whether JAX was imported.
PROGRAM = (
    "import sys\nfrom zeroxla.cli.main import main\nstatus = main(sys.argv[1:])\n"
    "print('with jax' if 'jax' in sys.modules else 'without jax')\nsys.exit(status)"
)


@pytest.fixture
def coordinate(tmp_path):
    """A coordinator of one island in a process of its own; its output is in a pipe."""
    arguments = ["--islands", "1", "--listen", "127.0.0.1:0", "--state", tmp_path / "state.json"]
    process = subprocess.Popen(
        [sys.executable, "-uc", PROGRAM, "coordinate", *map(str, arguments)],
        env={**os.environ, ISLANDS_TOKEN: TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def test_a_coordinator_says_who_comes_and_goes_and_ends_at_a_signal(coordinate, tmp_path):
    said = coordinate.stdout.readline()
    assert said.startswith("Listening at 127.0.0.1:")
    address = said.split()[2]
    assert f"zeroxla island --join HOST:{address.rpartition(':')[2]} --slot K -- PROGRAM" in said
    member = Membership(address, TOKEN, slot=3, timeout=20)
    assert coordinate.stdout.readline()[9:] == "island 3 has joined\n"
    member.close()
    assert coordinate.stdout.readline()[9:] == "island 3 has left\n"
    assert (tmp_path / "state.json").is_file()
    coordinate.send_signal(signal.SIGTERM)
    out, _ = coordinate.communicate(timeout=20)
    assert out == "Stopped; islands train on by themselves.\nwithout jax\n"
    assert coordinate.returncode == 0


@pytest.mark.smoke
@pytest.mark.parametrize(
    "arguments", [["coordinate", "--islands=2"], ["island", "--join=a:1", "--", "true"]]
)
def test_without_a_secret_it_is_said_how_to_make_one(arguments, monkeypatch, capsys):
    monkeypatch.delenv(ISLANDS_TOKEN, raising=False)
    assert main(arguments) == 2
    assert f"`export {ISLANDS_TOKEN}=$(openssl rand -hex 16)`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--islands=0"], "--islands 0: at least 1"),
        (["--islands=1", "--deadline=0"], "--deadline 0.0: above 0"),
        (["--islands=1", "--listen=here"], "--listen here: give HOST:PORT"),
        (["--islands=1", "--listen=127.0.0.1:70000"], "--listen 127.0.0.1:70000: give HOST:PORT"),
        (["--islands=1", "--listen=192.0.2.1:1"], "cannot listen at 192.0.2.1:1"),
        (["--islands=1", "--state=no/such/folder/file"], "cannot write no/such/folder/file"),
    ],
)
def test_options_that_cannot_work(arguments, message, monkeypatch, capsys):
    monkeypatch.setenv(ISLANDS_TOKEN, TOKEN)
    assert main(["coordinate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_with_the_secret_must_be_there(monkeypatch, capsys):
    monkeypatch.delenv(ISLANDS_TOKEN, raising=False)
    monkeypatch.setenv(ISLANDS_TOKEN_FILE, "no-such-file")
    assert main(["coordinate", "--islands=1"]) == 2
    assert f"{ISLANDS_TOKEN_FILE}=no-such-file cannot be read" in capsys.readouterr().err


EVENTS = [
    ({"what": "joined", "slot": 2, "process": 0}, "island 2 has joined", True),
    ({"what": "lost", "slot": 2, "process": 1}, "process 1 of island 2 has left", True),
    ({"what": "started", "slots": [0, 2], "round": 7}, "islands 0, 2 begin at round 7", True),
    (
        {"what": "closed", "round": 7, "slots": [0, 2], "left_out": [], "rows": {}, "seconds": 0.5},
        "round 7: islands 0, 2 in 0.50 s",
        False,
    ),
    (
        {"what": "closed", "round": 7, "slots": [0], "left_out": [2], "rows": {}, "seconds": 60.0},
        "round 7: island 0 in 60.00 s, without island 2",
        True,
    ),
    (
        {"what": "unsaved", "path": "state.json", "error": "No space left on device"},
        "cannot write state.json (No space left on device); rounds wait until it can",
        True,
    ),
]


@pytest.mark.parametrize(("event", "words", "rare"), EVENTS)
def test_events_in_words(event, words, rare):
    assert in_words(event) == words
    assert is_rare(event) == rare


def test_an_event_that_is_not_known_yet_is_shown_as_it_is():
    assert in_words({"what": "new", "at": 0}) == "{'what': 'new', 'at': 0}"
