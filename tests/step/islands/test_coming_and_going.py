"""Islands that are late, leave, come and come back; links and coordinators that are lost."""

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

pytestmark = pytest.mark.usefixtures("quick_compilation")
OUTER = Outer(every=2, optimizer=optax.sgd(0.7, momentum=0.9, nesterov=True))


def islands(num, num_steps, each, *, outer=OUTER, optimizer=None, **options):
    """Train islands in threads; return the outer parameters by version, the metrics of the steps,
    and the last state, None of one that has left, by slot; and the coordinator's events.

    Args:
      num: the number of islands.
      num_steps: the steps that each takes.
      each: called with (island, steps taken, events) before each step. It may wait; False ends the
        island.
      outer: how they exchange.
      optimizer: the inner optimizer.
      **options: of the coordinator.
    """
    rows = batches(num_steps)
    events = []
    with coordinator(num, say=events.append, **{"deadline": 5.0, **options}) as there:

        def run(index):
            step = make_step(outer, index, 4, optimizer)
            island = zeroxla.Island(step, there.address, TOKEN, slot=index, timeout=30)
            with island:
                state, told = island.init(KEY, part(rows[0], index, 4)), []
                seen = {state.versions[0]: copies(state)[0]}
                for done, batch in enumerate(rows):
                    if each(island, done, events) is False:
                        return seen, told, None
                    state, metrics = island(state, part(batch, index, 4))
                    told.append(metrics)
                    seen[state.versions[0]] = copies(state)[0]
                return seen, told, island.settle(state)

        found = in_threads(run, num)
    for seen, *_ in found:
        for other, *_ in found:
            for version in seen.keys() & other.keys():
                np.testing.assert_array_equal(seen[version], other[version])
    return found, events


def closed(events):
    """Return the slots that took part in each round."""
    return [event["slots"] for event in events if event["what"] == "closed"]


def test_an_island_that_leaves_takes_no_other_with_it():
    def each(island, done, events):
        return not (island.slot == 2 and done == 5)

    found, events = islands(3, 12, each)
    assert closed(events) == [[0, 1, 2]] * 2 + [[0, 1]] * 4
    _, told, state = found[0]
    assert state.versions == (6,)
    assert told[0]["islands"] == 3
    assert told[-1]["islands"] == 2


def test_an_island_that_is_late_is_left_out_and_catches_up():
    """It sleeps over a round; what it has changed meanwhile counts in the next."""

    def each(island, done, events):
        if island.slot == 1 and done == 5:
            while [0] not in closed(events):
                time.sleep(0.05)
        if [0] in closed(events):
            time.sleep(0.2)

    found, events = islands(2, 14, each, deadline=0.7)
    rounds = closed(events)
    assert rounds[:2] == [[0, 1]] * 2
    assert [0, 1] in rounds[rounds.index([0]) :]
    _, told, _ = found[1]
    assert max(x["rounds_behind"] for x in told) >= 1
    assert told[-1]["rounds_behind"] == 0


@pytest.mark.parametrize("optimizer", [None, optax.adam(1e-2)])
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
                while not (done_there.is_set() if index == 0 else number == 6):
                    state, metrics = island(state, part(rows[number % 8], index, 4))
                    number += 1
                    told.append(metrics)
                    if index == 0 and number == 5:
                        begun.set()
                    if index == 0 and number > 5:
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
    assert [x["outer_islands"] for x in told if "outer_islands" in x][-1] == 2
    assert two.versions[0] > versions[0]


@pytest.mark.parametrize("keeps", thinned([True], slow=[False]))
def test_islands_train_on_without_the_coordinator_and_meet_again(tmp_path, keeps):
    """It is killed in the middle of a run, and started again at the same port, with its file or
    without."""
    rows, outer = batches(40), OUTER
    there = zeroxla.Coordinator(
        "127.0.0.1:0", TOKEN, num_islands=2, state=tmp_path / "state.json", deadline=1.0
    )
    lost, back, alone = threading.Event(), threading.Event(), []
    events = []

    def restart():
        lost.wait(60)
        there.close()
        time.sleep(2.5)
        again = zeroxla.Coordinator(
            there.address,
            TOKEN,
            num_islands=2,
            state=tmp_path / ("state.json" if keeps else "other.json"),
            deadline=5.0,
            say=events.append,
        )
        back.set()
        return again

    def run(index):
        if index == 2:
            return restart()
        step = make_step(outer, index, 2)
        with zeroxla.Island(step, there.address, TOKEN, slot=index, timeout=30) as island:
            state = island.init(KEY, part(rows[0], index, 2))
            for done, batch in enumerate(rows):
                if done == 6:
                    lost.set()
                if done > 20:
                    back.wait(60)
                if done > 6:
                    time.sleep(0.1)
                state, metrics = island(state, part(batch, index, 2))
                if not metrics["coordinator"]:
                    alone.append(done)
            return island.settle(state)

    one, two, again = in_threads(run, 3)
    with again:
        assert again.ledger.round == one.round == two.round
    assert len(alone) > 2
    assert one.versions == two.versions
    assert one.versions[0] > 5
    for a, b in zip(copies(one), copies(two), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [event["slots"] for event in events if event["what"] == "closed"][-1] == [0, 1]


def test_a_link_that_is_cut_leaves_one_island_out():
    """Islands 1 and 2 cannot reach each other; 2 is left out, and takes the state from 0."""

    def each(island, done, events):
        time.sleep(0.1)
        post, slot = island._membership.post, island.slot
        if done == 3 and slot > 0:
            send = post.send

            def cut(to, name, body, *, timeout):
                others = {p.slot: p.addresses[0].member for p in island._membership.view.living}
                if to.member == others.get(3 - slot):
                    raise ConnectionError("cut")
                send(to, name, body, timeout=timeout)

            post.send = cut
        if done == 9 and slot > 0:
            del post.send

    found, events = islands(3, 16, each, deadline=3.0)
    rounds = closed(events)
    assert rounds[0] == [0, 1, 2]
    assert [0, 1, 2] in rounds[rounds.index([0, 1]) :]
    assert min(len(seen) for seen, *_ in found) > 4
