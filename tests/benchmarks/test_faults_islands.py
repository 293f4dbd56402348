"""What the benchmark of islands under faults plans, counts and finds in logs."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import faults_islands_figures as figures
from faults_islands_task import LENGTH, ROWS, batch_of


def closed(at, number, rows):
    """Return a coordinator's event."""
    return {"what": "event", "at": at, "event": {"what": "closed", "round": number, "rows": rows}}


def found(events, **changed):
    """Return a run of 100 seconds."""
    options = {"hashes": (), "losses": (), "rows": 8, "length": 10, "fragments": 2, **changed}
    return figures.Found(seconds=100.0, events=events, **options)


def hashed(slot, life, version, copy, fragment=0):
    """Return a line of an island's log."""
    about = {"slot": slot, "life": life, "fragment": fragment, "version": version}
    return {**about, "at": 0.0, "copy": copy, "optimizer": "m"}


def test_disturbances_have_all_phases_and_are_the_same_for_a_seed():
    planned = figures.disturbances(600, 20, 4, 5.0, 0)
    kills = [each for each in planned if each.kind == "kill"]
    assert [each.at for each in kills] == [20.0 * i for i in range(1, 30)]
    assert {each.phase for each in kills} == {"computing", "exchanging", "joining"}
    assert {each.slot for each in kills} == {0, 1, 2, 3}
    cuts = [each.seconds for each in planned if each.kind == "cut"]
    assert min(cuts) < 5.0 < max(cuts)
    assert sum(each.kind == "coordinator" for each in planned) == 2
    assert planned == figures.disturbances(600, 20, 4, 5.0, 0)
    assert planned != figures.disturbances(600, 20, 4, 5.0, 1)


def test_tokens_count_when_all_fragments_have_credited_them():
    run = found(
        [
            closed(10, 0, {"0": 80, "1": 40}),
            closed(20, 1, {"0": 160, "1": 120}),
            closed(101, 2, {"0": 1000}),
        ]
    )
    assert run.tokens == [(0.0, 0.0), (10, 600.0), (20, 2000.0), (101, 7000.0)]
    assert run.counted == 2000.0


def test_steps_outside_of_the_run_are_not_taken():
    steps = [{"what": "step", "at": at, "slot": 0} for at in (-1, 0, 50, 100, 101)]
    run = found(steps)
    assert run.taken == 3 * 80
    assert run.steps == {0: 5}


def test_rounds_that_were_closed_twice_or_never_told_of_are_found():
    rounds = figures.closed_rounds([closed(n, n, {}) for n in (0, 1, 3, 3, 4)])
    assert figures.closed_twice(rounds) == [3]
    assert figures.not_told(rounds) == [2]


def test_islands_that_had_other_parameters_are_found():
    lines = [hashed(0, 0, 1, "a"), hashed(1, 0, 1, "a"), hashed(1, 0, 2, "b")]
    assert figures.differing(lines) == []
    (other,) = figures.differing([*lines, hashed(2, 3, 2, "c")])
    assert other == {"fragment": 0, "version": 2, "who": [["1.0"], ["2.3"]]}


def test_a_version_may_not_shrink_in_a_process():
    lines = [hashed(0, 0, 5, "a"), hashed(0, 1, 3, "b"), hashed(0, 1, 4, "c")]
    assert figures.shrinking(lines) == []
    assert len(figures.shrinking([*lines, hashed(0, 1, 3, "b")])) == 1


def test_rows_that_were_credited_twice_are_found():
    rounds = figures.closed_rounds(
        [closed(0, 0, {"0": 80, "1": 1}), closed(1, 1, {"0": 80}), closed(2, 2, {"0": 16})]
    )
    assert figures.over_credited(rounds, {0: 12, 1: 0}, 8, 2) == {}
    assert figures.over_credited(rounds, {0: 11, 1: 0}, 8, 2) == {"0/0": 8}


def test_restarts_are_told_by_phase():
    names = ("spawned", "imported", "joined", "caught_up", "step", "step")
    events = [
        {"what": name, "at": at, "cpu": at / 2, "slot": 1, "life": life}
        for life in (0, 1)
        for at, name in enumerate(names)
    ]
    (row,) = figures.restarts(events)
    assert row == {"imported": 1, "joined": 1, "caught_up": 1, "step": 1, "all": 4}
    assert figures.medians(figures.restarts(events, clock="cpu"))["all"] == 2
    assert figures.restarts([e for e in events if e["what"] != "joined"]) == []


def test_a_life_begins_with_its_first_step():
    events = [
        {"what": what, "at": at, "slot": 0, "life": 0}
        for what, at in (("spawned", -9.0), ("step", 1.0), ("step", 2.0), ("ended", 30.0))
    ]
    events.append({"what": "spawned", "at": 30.0, "slot": 0, "life": 1})
    one, two = figures.lives(events, 50.0)
    assert (one.spawned, one.first, one.ended) == (-9.0, 1.0, 30.0)
    assert (two.spawned, two.first, two.ended) == (30.0, 50.0, 50.0)


@pytest.mark.parametrize(("at", "value"), [(0, 4.0), (1, 4.0), (1.5, 3.0), (3, 2.0), (9, 2.0)])
def test_a_curve_is_linear_between_its_points(at, value):
    assert figures.interpolated([(3, 2.0), (1, 4.0), (2, 2.0)], at) == value


def test_a_batch_depends_on_slot_and_number_alone():
    text = np.arange(1000, dtype=np.uint8)
    one = batch_of(text, 0, 1, 7)["tokens"]
    assert one.shape == (ROWS, LENGTH + 1)
    np.testing.assert_array_equal(one, batch_of(text, 0, 1, 7)["tokens"])
    assert (one != batch_of(text, 0, 2, 7)["tokens"]).any()
    assert (one != batch_of(text, 0, 1, 8)["tokens"]).any()
