"""Who takes part in which round: cases by hand, and random ones against what must always hold."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zeroxla.step.islands.membership.blame import to_leave_out
from zeroxla.step.islands.membership.ledger import Ledger
from zeroxla.step.islands.membership.messages import MemberReport, Position
from zeroxla.step.islands.membership.rounds import Rounds

FACTS = {"model": "mlp"}


class Fleet:
    """Islands as their coordinator sees them."""

    def __init__(self, num, *, ledger=None, deadline=10.0, fragments=2):
        self.rounds = Rounds(ledger or Ledger(), num_islands=num, deadline=deadline)
        self.now, self.fragments = 0.0, fragments
        self.reports = {}

    def say(self, member, **changed):
        """An island reports."""
        old = self.reports.get(member) or MemberReport(
            slot=member - 1,
            process=0,
            num_processes=1,
            port=7000 + member,
            facts=FACTS,
            trains=True,
            versions=(0,) * self.fragments,
        )
        self.reports[member] = dataclasses.replace(old, **changed)
        self.rounds.heard(member, self.reports[member], "10.0.0.1", self.now)
        self.rounds.decide(self.now)

    def lose(self, member):
        del self.reports[member]
        self.rounds.lost(member)
        self.rounds.decide(self.now)

    def wait(self, seconds):
        self.now += seconds
        self.rounds.decide(self.now)

    def view(self, member):
        return self.rounds.view(member, self.now)

    def roster(self):
        member = next(iter(self.reports))
        return [place.slot for place in self.view(member).roster]

    def hold(self, member, digest="same"):
        view = self.view(member)
        self.say(member, held={view.round: (view.attempt, digest)})

    def fail(self, member, slots, move=0):
        view = self.view(member)
        self.say(member, failed={view.round: (view.attempt, move, tuple(slots))})


def fleet(num, **options):
    """Return a fleet of islands that all train."""
    found = Fleet(num, **options)
    for member in range(1, num + 1):
        found.say(member)
    return found


def test_a_round_begins_when_all_are_ready_and_ends_when_all_hold_it():
    islands = fleet(3)
    assert islands.view(1).started
    islands.say(1, ready={0: 5})
    islands.say(2, ready={0: 7})
    assert islands.roster() == []
    assert islands.view(3).closes_in == 10
    islands.say(3, ready={0: 9}, position=Position(batches=4, rows=36))
    assert [(p.slot, p.rows, p.addresses[0].port) for p in islands.view(2).roster] == [
        (0, 5, 7001),
        (1, 7, 7002),
        (2, 9, 7003),
    ]
    attempt = islands.view(1).attempt
    islands.hold(1)
    islands.hold(2)
    assert islands.view(1).round == 0
    islands.hold(3)
    view = islands.view(1)
    assert (view.round, view.versions, view.attempt) == (1, (1, 0), "")
    assert (view.closed[0].round, view.closed[0].attempt) == (0, attempt)
    assert islands.rounds.ledger.positions[2] == Position(batches=4, rows=36)


def test_who_is_late_is_left_out():
    islands = fleet(3)
    islands.say(1, ready={0: 1})
    islands.say(2, ready={0: 1})
    islands.wait(9.9)
    assert islands.roster() == []
    islands.wait(0.2)
    assert islands.roster() == [0, 1]
    islands.hold(1)
    islands.hold(2)
    (event,) = [e for e in islands.rounds.events if e["what"] == "closed"]
    assert (event["slots"], event["left_out"]) == ([0, 1], [2])
    islands.say(
        3, ready={0: 1}
    )  # It is told so by the view, and may not take part in a closed one.
    assert islands.view(3).round == 1
    islands.say(3, ready={1: 2})  # The other fragment is not behind.
    islands.say(1, ready={1: 1})
    islands.say(2, ready={1: 1})
    assert islands.roster() == [0, 1, 2]


def test_who_is_behind_takes_no_part_until_it_has_caught_up():
    islands = fleet(2)
    islands.say(1, ready={0: 1})
    islands.wait(11)
    islands.hold(1)
    for member in (1, 2):
        islands.say(member, ready={1: 1})
    islands.hold(1)
    islands.hold(2)
    islands.say(2, ready={2: 1})  # of fragment 0, of which it has version 0
    islands.say(1, ready={2: 1})
    assert islands.roster() == [0]
    islands.hold(1)
    islands.say(2, versions=(2, 1), ready={})
    islands.say(1, ready={3: 1})
    assert islands.roster() == []
    islands.say(2, ready={3: 1})
    assert islands.roster() == [0, 1]


def test_one_that_merges_later_than_others_is_waited_for():
    islands = fleet(2, fragments=1)
    for member in (1, 2):
        islands.say(member, ready={0: 1})
    islands.hold(1)
    islands.hold(2)
    islands.say(1, versions=(1,), ready={1: 1})
    assert islands.roster() == []
    islands.say(2, versions=(0,), ready={1: 1})  # It holds the round, and has not merged it yet.
    assert islands.roster() == [0, 1]


def test_one_that_is_lost_in_an_exchange_is_left_out_of_the_next_attempt():
    islands = fleet(3)
    for member in (1, 2, 3):
        islands.say(member, ready={0: 1})
    first = islands.view(1).attempt
    islands.hold(1)
    islands.lose(3)
    assert islands.roster() == [0, 1]
    assert islands.view(1).attempt != first
    islands.hold(2)
    assert islands.view(1).round == 0  # 1 holds the first attempt.
    islands.hold(1)
    assert islands.view(1).round == 1


def test_one_that_is_lost_when_all_others_hold_the_result_changes_nothing():
    islands = fleet(3)
    for member in (1, 2, 3):
        islands.say(member, ready={0: 1})
    islands.hold(1)
    islands.hold(2)
    islands.lose(3)
    assert islands.view(1).round == 1


def test_a_silent_one_is_left_out_after_twice_the_deadline():
    islands = fleet(3)
    for member in (1, 2, 3):
        islands.say(member, ready={0: 1})
    islands.hold(1)
    islands.hold(2)
    islands.wait(19)
    assert islands.roster() == [0, 1, 2]
    islands.wait(2)
    assert islands.roster() == [0, 1]


def test_islands_that_cannot_reach_each_other():
    islands = fleet(3)
    for member in (1, 2, 3):
        islands.say(member, ready={0: 1})
    islands.fail(2, [2])
    islands.fail(3, [1])
    islands.fail(1, [1, 2], move=1)  # It has nothing of them because they have nothing.
    assert islands.roster() == [0, 1]


def test_one_that_holds_something_else_is_left_out():
    islands = fleet(3)
    for member in (1, 2, 3):
        islands.say(member, ready={0: 1})
    islands.hold(1)
    islands.hold(2, "other")
    islands.hold(3)
    assert islands.roster() == [0, 2]


BLAME = {
    "one side of a pair": ({0: (0, {1})}, {1}),
    "both sides": ({0: (0, {1}), 1: (0, {0})}, {1}),
    "most are said of 0": ({1: (0, {0}), 2: (0, {0})}, {0}),
    "two pairs": ({0: (0, {1}), 2: (0, {3})}, {1, 3}),
    "itself": ({2: (0, {2})}, {2}),
    "consequences": ({0: (0, {1}), 2: (1, {0}), 3: (1, {0})}, {1}),
}


@pytest.mark.parametrize("name", BLAME)
def test_who_is_to_blame(name):
    failed, expected = BLAME[name]
    assert to_leave_out(failed) == expected


def test_islands_whose_bits_differ_are_told_of_which_fragments():
    islands = fleet(3)
    for member, bits in ((1, 11), (2, 12), (3, 11)):
        islands.say(member, versions=(0, 0), checksums={0: (0, bits), 1: (0, 5)})
    assert [islands.view(m).astray for m in (1, 2, 3)] == [(), (0,), ()]
    islands.say(2, checksums={0: (0, 11), 1: (0, 5)})
    assert islands.view(2).astray == ()
    islands.say(2, checksums={0: (1, 12), 1: (0, 5)})  # of a version that others do not have yet
    assert islands.view(2).astray == ()


def test_islands_that_may_not_take_part():
    islands = fleet(2)
    islands.rounds.heard(7, dataclasses.replace(islands.reports[1], slot=1), "10.0.0.1", 0.0)
    assert "another island has slot 1" in islands.view(7).refused
    islands.rounds.heard(
        8, dataclasses.replace(islands.reports[1], slot=5, facts={"model": "cnn"}), "10.0.0.1", 0.0
    )
    assert "has other model than the others; model: mlp there, cnn here" in islands.view(8).refused
    islands.rounds.heard(9, dataclasses.replace(islands.reports[1], slot=None), "10.0.0.1", 0.0)
    assert islands.view(9).slot == 2
    assert islands.view(10) is None
    islands.lose(1)
    islands.rounds.heard(11, dataclasses.replace(islands.reports[2], slot=None), "10.0.0.1", 0.0)
    assert islands.view(11).slot == 0  # It comes back.


def test_those_that_are_there_at_the_start_are_waited_for_while_they_catch_up():
    """One of them has opened a checkpoint with outer parameters, and gives them to the other."""
    islands = Fleet(2)
    islands.say(1, versions=(2, 2), round=4, trains=False)
    islands.say(2, versions=(0, 0), trains=False)
    assert (islands.view(1).started, islands.view(2).versions) == (True, (2, 2))
    islands.say(1, trains=True, ready={4: 1})
    assert islands.roster() == []
    islands.say(2, versions=(2, 2))
    assert islands.roster() == []
    islands.say(2, trains=True, ready={4: 1})
    assert islands.roster() == [0, 1]


def test_all_processes_of_an_island_take_part():
    islands = Fleet(1)
    islands.say(1, slot=0, num_processes=2)
    islands.say(2, slot=0, process=1, num_processes=2)
    assert islands.view(1).started
    islands.say(2, ready={0: 1})
    assert islands.roster() == []
    islands.say(1, ready={0: 1})
    assert [a.member for a in islands.view(1).roster[0].addresses] == [1, 2]
    islands.hold(1, "rows of 1")
    assert islands.view(1).round == 0
    islands.hold(2, "rows of 2")
    assert islands.view(1).round == 1
    assert islands.view(1).closed[0].digests == ("rows of 1", "rows of 2")


def test_a_coordinator_that_was_away_goes_on_and_counts_what_was_closed():
    """It dies after it has written that a round is closed, and before it has told anybody."""
    islands = fleet(2)
    for member in (1, 2):
        islands.say(member, ready={0: 1})
    for member in (1, 2):
        islands.hold(member)
    ledger, attempt = islands.rounds.ledger, islands.reports[1].held[0]
    again = Fleet(2, ledger=ledger)
    for member in (1, 2):
        again.say(member, ready={0: 1}, held={0: attempt}, round=0)
    view = again.view(1)
    assert (view.started, view.round, view.versions) == (True, 1, (1, 0))
    assert view.closed[0].attempt == attempt[0]


def test_a_coordinator_without_its_file_learns_from_the_islands():
    again = Fleet(3)
    for member in (1, 2):
        again.say(member, round=7, versions=(4, 3))
    assert not again.view(1).started
    again.wait(11)  # They train, so they need not wait for a third.
    assert (again.view(1).round, again.view(1).versions) == (7, (4, 3))


def test_when_no_island_is_left_those_that_come_go_on_from_what_they_have():
    islands = fleet(2)
    for member in (1, 2):
        islands.say(member, ready={0: 1})
    for member in (1, 2):
        islands.hold(member)
    islands.lose(1)
    islands.lose(2)
    islands.say(3, slot=0, trains=False, versions=(0, 0))
    assert not islands.view(3).started
    islands.say(4, slot=1, trains=False, versions=(0, 0))
    view = islands.view(3)
    assert (view.started, view.round, view.versions, view.closed) == (True, 0, (0, 0), {})
    islands.say(4, trains=True)
    islands.lose(3)
    islands.lose(4)
    islands.say(5, slot=0, trains=False, versions=(0, 0))
    islands.wait(9)
    assert not islands.view(5).started
    islands.wait(2)
    assert islands.view(5).started  # The other one need not come.


def test_a_round_that_only_lost_islands_have_merged_is_forgotten():
    islands = fleet(2)
    for member in (1, 2):
        islands.say(member, ready={0: 1})
    for member in (1, 2):
        islands.hold(member)
        islands.say(member, versions=(1, 0))
    islands.say(1, ready={1: 1})
    islands.wait(11)
    islands.hold(1)  # alone
    assert islands.view(2).versions == (1, 2)
    islands.lose(1)
    islands.say(2, ready={2: 1})
    islands.hold(2)
    assert islands.view(2).versions == (3, 2)
    islands.say(2, versions=(3, 0), ready={3: 1})
    assert islands.roster() == []
    assert islands.rounds.next_time() is not None
    islands.wait(11)
    assert islands.view(2).versions == (3, 0)
    islands.hold(2)
    assert islands.view(2).versions == (3, 4)
    # The one that comes back has a version that others never had, and takes the newer one.
    islands.say(3, slot=0, trains=False, versions=(1, 2))
    assert islands.view(3).versions == (3, 4)


def test_an_island_learns_in_which_rounds_it_has_counted():
    """It holds the result of a round, is cut, and comes back after two rounds of the fragment."""
    islands = fleet(2, fragments=1)
    for member in (1, 2):
        islands.say(member, ready={0: 1})
    for member in (1, 2):
        islands.hold(member)
    islands.lose(2)
    islands.say(1, versions=(1,), ready={1: 1})
    islands.hold(1)
    islands.say(2, slot=1, ready={0: 1}, versions=(0,))
    view = islands.view(2)
    assert (view.closed[0].round, view.counted) == (1, (1,))
    assert islands.view(1).counted == (2,)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["ready", "hold", "fail", "odd", "lose", "join", "wait", "restart"]),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    max_size=60,
)


@given(EVENTS)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_two_islands_merge_different_results(events):
    """Islands merge what the last view closes and they hold; the rest must catch up."""
    islands = fleet(4, fragments=1)
    merged = {}  # by round, the attempts and digests that were merged
    has = dict.fromkeys(range(1, 5), 0)
    for what, i, j in events:
        member, view = i + 1, None
        if member in islands.reports:
            view = islands.view(member)
        if what == "join" and view is None:
            has[member] = max(has.values())
            islands.say(member, versions=(has[member],))
        elif what == "wait":
            islands.wait(4.0)
        elif what == "restart":
            reports, now = islands.reports, islands.now
            islands = Fleet(4, ledger=islands.rounds.ledger, fragments=1)
            islands.now = now
            for other, report in reports.items():
                islands.say(other, **{f.name: getattr(report, f.name) for f in
                                      dataclasses.fields(report)})  # fmt: skip
        elif view is None:
            continue
        elif what == "lose" and len(islands.reports) > 1:
            islands.lose(member)
        elif what == "ready":
            islands.say(member, ready={view.round: 1}, versions=(has[member],))
        elif view.attempt and any(p.slot == i for p in view.roster):
            if what == "hold":
                islands.hold(member)
            elif what == "odd":
                islands.hold(member, f"odd {i}")
            elif what == "fail":
                islands.fail(member, [j])
        for other, report in list(islands.reports.items()):
            view = islands.view(other)
            if view is None or not view.versions:
                continue
            closed = view.closed.get(0)
            for number, (attempt, digest) in report.held.items():
                if closed is not None and (closed.round, closed.attempt) == (number, attempt):
                    merged.setdefault(number, set()).add((attempt, digest))
                    has[other] = view.versions[0]
                    assert (digest,) == closed.digests
            if has[other] < view.versions[0] and view.round not in report.ready:
                has[other] = view.versions[0]  # It has caught up.
    assert all(len(found) == 1 for found in merged.values())
    # Those that are left go on: with all ready and holding, a round ends.
    islands.wait(21)
    islands.wait(21)
    before = islands.rounds.ledger.round
    newest = islands.rounds.ledger.versions
    for member in list(islands.reports):
        islands.say(member, versions=newest or (0,), held={}, failed={}, ready={before: 1})
    islands.wait(11)
    for _ in range(4):
        for member in list(islands.reports):
            if islands.view(member).attempt:
                islands.hold(member)
    assert islands.rounds.ledger.round > before
