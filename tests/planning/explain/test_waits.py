"""Waits: who is waited for, where in a step, and that they add up."""

from __future__ import annotations

import pytest

from zeroxla.planning.explain.waits import BEGIN, END, MIDDLE, waits_of
from zeroxla.planning.lanes import Event


def computes(start, end, phase="forward"):
    return Event("compute", phase, start, end)


def travels(lane, start, end, phase="forward gather"):
    return Event(lane, phase, start, end)


def found(events, end_s=None):
    end_s = max(event.end_s for event in events) if end_s is None else end_s
    waits = waits_of(events, end_s)
    computed = sum(event.end_s - event.start_s for event in events if event.lane == "compute")
    assert sum(wait.seconds for wait in waits) == pytest.approx(end_s - computed)
    return [
        (wait.event and wait.event.lane, round(wait.start_s, 6), round(wait.end_s, 6), wait.place)
        for wait in waits
    ]


def test_computation_without_a_gap_waits_for_nothing():
    assert found([computes(0, 5), computes(5, 9), travels("node", 1, 8)]) == []


def test_the_first_gather_is_at_the_beginning_and_the_last_reduce_at_the_end():
    events = [
        travels("node", 0, 2),
        computes(2, 10),
        travels("node", 10, 11, "reduce"),
        computes(11, 12, "update"),
    ]
    assert found(events) == [("node", 0, 2, BEGIN), ("node", 10, 11, END)]


def test_what_a_link_has_left_over_at_the_end_could_have_been_hidden():
    events = [
        computes(0, 10),
        travels("node", 8, 12, "reduce"),
        travels("node", 12, 13, "reduce"),
        computes(13, 14, "update"),
    ]
    assert found(events) == [("node", 10, 12, MIDDLE), ("node", 12, 13, END)]


def test_a_gap_is_shared_out_among_hops():
    events = [
        computes(0, 10),
        travels("node", 9, 12),
        travels("device", 12, 13),
        computes(13, 30),
    ]
    assert found(events) == [("node", 10, 12, MIDDLE), ("device", 12, 13, MIDDLE)]


def test_of_two_links_the_one_that_ends_with_the_gap_is_waited_for():
    events = [computes(0, 10), travels("node", 9, 14), travels("device", 11, 12), computes(12, 30)]
    assert found(events) == [
        ("node", 10, 11, MIDDLE),
        ("device", 11, 12, MIDDLE),
    ]


def test_of_links_that_end_together_the_one_that_began_last_is_waited_for():
    events = [computes(0, 10), travels("node", 9, 12), travels("device", 11, 12), computes(12, 30)]
    assert found(events) == [("node", 10, 11, MIDDLE), ("device", 11, 12, MIDDLE)]


def test_a_gap_without_a_link_is_of_nobody():
    assert found([computes(0, 10), computes(11, 30)]) == [(None, 10, 11, MIDDLE)]
    events = [computes(0, 10), travels("node", 9, 11), computes(12, 30)]
    assert found(events) == [("node", 10, 11, MIDDLE), (None, 11, 12, MIDDLE)]


@pytest.mark.parametrize(("share", "places"), [(1, [BEGIN, END]), (5, [MIDDLE, MIDDLE])])
def test_the_ends_of_a_step_are_two_hundredths_of_its_computation(share, places):
    last = 102 - share
    events = [
        computes(0, share),
        travels("node", share, share + 1),
        computes(share + 1, last),
        travels("node", last, last + 1, "reduce"),
        computes(last + 1, 102, "backward"),
    ]
    assert [place for *_, place in found(events)] == places


def test_the_update_is_in_the_middle():
    events = [
        computes(0, 10),
        travels("node", 10, 12, "update"),
        computes(12, 13, "update"),
    ]
    assert found(events) == [("node", 10, 12, MIDDLE)]
