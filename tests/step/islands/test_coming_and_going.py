"""Islands that are late, leave, come and come back; links and coordinators that are lost."""

import errno
import threading
import time

import jax
import numpy as np
import optax
import pytest
from tools.islands import KEY, TOKEN, batches, coordinator, copies, in_threads, make_step, part
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla.config.outer import Outer
from zeroxla.step.islands.membership.client import Membership
from zeroxla.step.islands.membership.ledger import Ledger

pytestmark = pytest.mark.usefixtures("quick_compilation")
OUTER = Outer(every=2, optimizer=optax.sgd(0.7, momentum=0.9, nesterov=True))


MOST_STEPS = 600


def islands(num, until, each=lambda island, done, events: None, *, outer=OUTER, **options):
    """Train islands in threads until something has happened. How fast each is counts for nothing.

    Args:
      num: the number of islands.
      until: called with the coordinator's events; says whether all may end.
      each: called with (island, steps taken, events) before each step. It may wait; False ends the
        island.
      outer: how they exchange.
      **options: of the coordinator.

    Returns:
      For each island, the outer parameters by version, the metrics of the steps, and the state, or
      None of one that has left; and the coordinator's events.
    """
    rows, events = batches(8), []
    with coordinator(num, say=events.append, **{"deadline": 10.0, **options}) as there:

        def run(index):
            step = make_step(outer, index, 4)
            with zeroxla.Island(step, there.address, TOKEN, slot=index, timeout=60) as island:
                state, told = island.init(KEY, part(rows[0], index, 4)), []
                seen, done = {state.versions[0]: copies(state)[0]}, 0
                while not until(events):
                    if each(island, done, events) is False:
                        return seen, told, None
                    assert done < MOST_STEPS, events
                    state, metrics = island(state, part(rows[done % 8], index, 4))
                    done += 1
                    told.append(metrics)
                    seen[state.versions[0]] = copies(state)[0]
                return seen, told, island.settle(state)

        found = in_threads(run, num)
    check_same([seen for seen, *_ in found])
    return found, events


def check_same(copies):
    """Check that islands have the same outer parameters, bit for bit, wherever two have the same
    version."""
    for seen in copies:
        for other in copies:
            for version in seen.keys() & other.keys():
                np.testing.assert_array_equal(seen[version], other[version])


def closed(events):
    """Return the slots that took part in each round."""
    return [event["slots"] for event in events if event["what"] == "closed"]


def in_order(events, *rosters):
    """Return whether rounds of these slots were closed, one after another."""
    rounds = iter(closed(events))
    return all(any(roster == found for found in rounds) for roster in rosters)


@pytest.mark.slow
def test_an_island_that_leaves_takes_no_other_with_it():
    def each(island, done, events):
        return not (island.slot == 2 and done == 5)

    found, events = islands(3, lambda events: in_order(events, [0, 1, 2], [0, 1], [0, 1]), each)
    assert closed(events)[:4] == [[0, 1, 2]] * 2 + [[0, 1]] * 2
    _, told, state = found[0]
    assert state.versions[0] >= 4
    assert 3 in {x["islands"] for x in told}
    assert 2 in {x["islands"] for x in told}


@pytest.mark.slow
def test_an_island_that_is_late_is_left_out_and_catches_up():
    """It sleeps over a round; what it has changed meanwhile counts in a later one."""

    def each(island, done, events):
        if island.slot == 1 and done == 5:
            while [0] not in closed(events):
                time.sleep(0.05)
        if [0] in closed(events):
            time.sleep(0.1)  # The late one can keep up.

    found, _ = islands(2, lambda events: in_order(events, [0, 1], [0], [0, 1]), each, deadline=1.0)
    _, told, _ = found[1]
    assert max(x["rounds_behind"] for x in told) >= 1


@pytest.mark.parametrize("optimizer", thinned([optax.adam(1e-2)], slow=[None]))
def test_an_island_that_comes_later_takes_the_state_of_the_others(optimizer):
    begun, done_there = threading.Event(), threading.Event()
    rows = batches(8)
    outer = Outer(every=2, fragments=2, optimizer=OUTER.optimizer)
    with coordinator(1, deadline=10.0) as there:

        def run(index):
            if index == 1:
                begun.wait(30)
            step = make_step(outer, index, 4, optimizer)
            with zeroxla.Island(step, there.address, TOKEN, timeout=30) as island:
                state, told, number = island.init(KEY, part(rows[0], index, 4)), [], 0
                first = state.round, state.versions, np.asarray(state.inner.step)
                counts = [int(x) for x in jax.tree.leaves(state.inner.opt_state) if x.ndim == 0]
                while not (
                    done_there.is_set()
                    if index == 0
                    else any(x.get("outer_islands") == 2 for x in told)
                ):
                    assert number < MOST_STEPS
                    state, metrics = island(state, part(rows[number % 8], index, 4))
                    number += 1
                    told.append(metrics)
                    if index == 0 and number == 5:
                        begun.set()
                    if index == 1 or number > 5:
                        time.sleep(0.05)
                state = island.settle(state)
                if index == 1:
                    done_there.set()
                return state, first, counts, told, island

        _, (two, first, counts, told, island) = in_threads(run, 2)
    assert island.slot == 1
    round_of_first, versions, steps = first
    assert min(versions) > 0
    assert round_of_first >= 4
    assert steps >= 5
    assert all(count >= 5 for count in counts)
    assert told[-1]["islands"] == 2
    assert max(two.versions) > max(versions)


@pytest.mark.parametrize("keeps", thinned([True], slow=[False]))
def test_islands_train_on_without_the_coordinator_and_meet_again(tmp_path, keeps):
    """It is killed in the middle of a run, and started again at the same port, with its file or
    without."""
    rows, events = batches(8), []
    options = {"num_islands": 2, "deadline": 2.0}
    there = zeroxla.Coordinator("127.0.0.1:0", TOKEN, state=tmp_path / "one.json", **options)
    lost, alone = threading.Event(), [0, 0]

    def restart():
        lost.wait(60)
        there.close()
        while min(alone) < 3:
            time.sleep(0.05)
        state = tmp_path / ("one.json" if keeps else "two.json")
        return zeroxla.Coordinator(there.address, TOKEN, state=state, say=events.append, **options)

    def run(index):
        if index == 2:
            return restart()
        step, done = make_step(OUTER, index, 4), 0
        with zeroxla.Island(step, there.address, TOKEN, slot=index, timeout=60) as island:
            state = island.init(KEY, part(rows[0], index, 4))
            seen, times = {}, []
            while not in_order(events, [0, 1], [0, 1]):
                if done == 6:
                    lost.set()
                if done > 6:
                    time.sleep(0.05)
                assert done < MOST_STEPS, events
                state, metrics = island(state, part(rows[done % 8], index, 4))
                done += 1
                seen[state.versions[0]] = copies(state)[0]
                if not metrics["coordinator"]:
                    alone[index] += 1
                    times.append(time.monotonic())
            assert min(np.diff(times)) < 1.5  # Not each step waits for the deadline.
            return seen, island.settle(state)

    (one, _), (two, _), again = in_threads(run, 3)
    with again:
        assert again.ledger.lives == (2 if keeps else 1)
    check_same([one, two])
    assert len(one.keys() & two.keys()) > 3


@pytest.mark.slow
def test_a_slower_island_takes_part_with_the_steps_that_it_has():
    """It would be ready long after the deadline; when the round is about to close it goes along."""

    def each(island, done, events):
        time.sleep(0.3 if island.slot == 1 else 0.0)

    outer = Outer(every=40, optimizer=OUTER.optimizer)
    _, events = islands(2, lambda events: in_order(events, [0, 1]), each, outer=outer, deadline=4.0)
    (first, *_) = [event for event in events if event["what"] == "closed"]
    assert first["slots"] == [0, 1]
    assert first["rows"][0] == 40 * 4
    assert 4 <= first["rows"][1] < 40 * 4


@pytest.mark.slow
def test_islands_train_on_while_the_disk_of_the_coordinator_is_full(tmp_path, monkeypatch):
    """Nobody is told of a round that was not written, and nobody waits for it for ever."""
    save, is_full, steps = Ledger.save, [False], [0, 0]

    def fail(self, path):
        if is_full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, path)

    monkeypatch.setattr(Ledger, "save", fail)

    def each(island, done, events):
        time.sleep(0.02)
        if done == 5:
            is_full[0] = True
        steps[island.slot] += is_full[0]
        if min(steps) > 6:
            is_full[0] = False

    def until(events):
        return min(steps) > 6 and in_order(events, [0, 1], [0, 1], [0, 1], [0, 1])

    _, events = islands(2, until, each, deadline=0.5, state=tmp_path / "state.json")
    unsaved = [event for event in events if event["what"] == "unsaved"]
    assert unsaved[0]["error"] == "No space left on device"
    assert min(steps) > 6


def test_an_island_that_is_refused_later_trains_on_and_says_so():
    """At the coordinator's address another run's coordinator listens by now."""
    row = part(batches(1)[0], 0, 4)
    options = {"num_islands": 1, "deadline": 1.0}
    there = zeroxla.Coordinator("127.0.0.1:0", TOKEN, **options)
    with zeroxla.Island(make_step(OUTER, 0, 4), there.address, TOKEN, timeout=30) as island:
        state = island.init(KEY, row)
        state, metrics = island(state, row)
        assert metrics["coordinator"]
        there.close()
        with zeroxla.Coordinator(there.address, TOKEN, **options) as other:
            stranger = Membership(other.address, TOKEN, slot=7, timeout=30)
            stranger.begin(facts={"model": "another"}, versions=(0,))
            assert island._membership.wait_for(lambda: bool(island._membership.view.refused), 20)
            with pytest.warns(UserWarning, match=r"refuses this island, which trains on .* model"):
                state, metrics = island(state, row)
            for _ in range(5):  # It is said once.
                state, metrics = island(state, row)
            assert not metrics["coordinator"]
            stranger.close()
    assert int(state.inner.step) == 7


def test_what_has_counted_without_this_island_is_not_counted_again():
    """Its parameters move by as much as the outer ones, and lose the difference that they have."""
    with coordinator(1) as there:
        step = make_step(OUTER, 0, 4)
        with zeroxla.Island(step, there.address, TOKEN) as island:
            state = island.init(KEY, part(batches(1)[0], 0, 4))
            state, _ = island(state, part(batches(1)[0], 0, 4))
            (programs,), meetings = island.programs, island._meetings
            own = programs.leaves_of(state.inner.params)
            difference = programs.difference(own, state.outer[0].copy)
            state = state.with_leaves({i: x + 0.25 for i, x in own.items()})  # trained since

            class Pending:
                num_rows, counted = 7, True

            Pending.difference = difference
            meetings._pending[0] = Pending
            meetings._drop(state, 0)
            assert meetings._rows_at == {0: 7}

            class Fetched:
                pass

            shared = (state.outer[0].copy, state.outer[0].opt_state)
            Fetched.arrays = [x + 1 for x in jax.tree.leaves(shared)]
            meetings.catch_up._fetches[0] = Fetched
            state = meetings.catch_up.deal(state, "adopt 0 9")
    left = programs.difference(programs.leaves_of(state.inner.params), state.outer[0].copy)
    real = np.asarray(difference) != 0
    np.testing.assert_allclose(np.asarray(left)[real], -0.25, atol=1e-6)
    assert state.versions == (9,)


@pytest.mark.slow
def test_a_link_that_is_cut_leaves_one_island_out():
    """Islands 1 and 2 cannot reach each other; 2 is left out, and takes the state from 0."""

    def each(island, done, events):
        time.sleep(0.05)
        post, slot = island._membership.post, island.slot
        if done == 3 and slot > 0:
            send = post.send

            def cut(to, name, body, *, timeout):
                others = {p.slot: p.addresses[0].member for p in island._membership.view.living}
                if to.member == others.get(3 - slot) and not in_order(events, [0, 1], [0, 1]):
                    raise ConnectionError("cut")
                send(to, name, body, timeout=timeout)

            post.send = cut

    found, _ = islands(3, lambda events: in_order(events, [0, 1, 2], [0, 1], [0, 1, 2]), each)
    assert min(len(seen) for seen, *_ in found) > 2
