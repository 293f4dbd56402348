"""If processes differ, or one of them fails or stops, all say so instead of waiting for ever."""

import re

import pytest

from multihost import processes

# What they may differ in, apart from the optimizer: compared in the same way, and the test of an
# axis has other rows.
SLOW = ("another config", "other rows", "another schedule")


def launched(*cases):
    """Return what each process has said of each case."""
    status, said, out = processes.launch("agreements.py", *cases, devices_per_node=1)
    assert status == 0, out
    return said


@pytest.fixture(scope="module")
def said():
    return launched(
        "first cannot", "first refuses", "others say more", "own batch", "another optimizer"
    )


@pytest.fixture(scope="module")
def said_of_more():
    return launched(*SLOW)


@pytest.mark.parametrize(
    ("case", "messages"),
    [
        (
            "first cannot",
            [r"OSError: no space", r"RuntimeError: process 0 failed at its folder: OSError: no sp"],
        ),
        ("first refuses", [r"ValueError: no such run"]),
        (
            "others say more",
            [r"ValueError: processes differ in their text; mend it \|   y: None in process 0, 2"],
        ),
        (
            "own batch",
            [r"ValueError: the batch leaf 'tokens' is an array of this process alone, and there "],
        ),
        (
            "another optimizer",
            [r"ValueError: processes differ in their train program; .* \|   program: \w+ in proc"],
        ),
    ],
)
def test_both_are_told(said, case, messages):
    for process in (0, 1):
        assert re.match(messages[min(process, len(messages) - 1)], said[process][case])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "another config",
            r"ValueError: processes differ in their init program; .* \|   accumulate: 1 in pro",
        ),
        ("other rows", r"ValueError: the processes 0, 1 all have devices for rows 0 to 3 of"),
        (
            "another schedule",
            r"ValueError: processes differ in their train program; .* \|   program: \w+ in proc",
        ),
    ],
)
def test_both_are_told_of_more(said_of_more, case, message):
    for process in (0, 1):
        assert re.match(message, said_of_more[process][case])


@pytest.mark.slow
def test_one_that_stops_answering_ends_all_and_is_named():
    status, _, out = processes.launch("agreements.py", "stops answering", heartbeat=3)
    assert status != 0
    assert re.search(r"launch: Rank 1 \(.*\) has been stopped by a signal for \d+ s\.", out)
    assert re.search(r"Rank 0 \(.*\) (was killed by|ended with)", out)
