"""If processes differ, or one of them fails or stops, all say so instead of waiting for ever."""

import re

import pytest

from multihost import agreements, processes


@pytest.fixture(scope="module")
def said():
    cases = [name for name in agreements.CASES if name != "stops answering"]
    status, said, out = processes.launch("agreements.py", *cases, devices_per_node=1)
    assert status == 0, out
    return said


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
        (
            "another config",
            [r"ValueError: processes differ in their init program; .* \|   accumulate: 1 in pro"],
        ),
        (
            "other rows",
            [r"ValueError: the processes 0, 1 all have devices for rows 0 to 3 of"],
        ),
        (
            "another schedule",
            [r"ValueError: processes differ in their train program; .* \|   program: \w+ in proc"],
        ),
    ],
)
def test_both_are_told(said, case, messages):
    for process in (0, 1):
        assert re.match(messages[min(process, len(messages) - 1)], said[process][case])


@pytest.mark.slow
def test_one_that_stops_answering_ends_all_and_is_named():
    status, _, out = processes.launch("agreements.py", "stops answering", heartbeat=3)
    assert status != 0
    assert re.search(r"launch: Rank 1 \(.*\) has been stopped by a signal for \d+ s\.", out)
    assert re.search(r"Rank 0 \(.*\) (was killed by|ended with)", out)
