"""Schedules: every builder makes tables that can run, the checker refuses those that cannot.

The judge is `runs`, an event simulator that knows the rules and shares no code with the checker.
"""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.quick import thinned
from tools.schedules import (
    BUILDERS,
    FLAT,
    SIZES,
    TABLES,
    accepts,
    can_be,
    changed,
    each_builder,
    entries,
    runs,
    sizes_of,
)

from zeroxla.pipeline.make_schedule import NAMES, make_schedule, one_f_one_b
from zeroxla.pipeline.schedule import NONE, Schedule
from zeroxla.pipeline.schedule_check import check
from zeroxla.pipeline.schedule_cost import cost
from zeroxla.pipeline.stash import make_stash

MANY = 1000  # the most changes of one schedule that are tried; they are drawn at random


@each_builder
def test_every_built_schedule_can_run(build):
    for p, m in sizes_of(build):
        schedule = build(p, m)
        check(schedule)
        assert runs(schedule), (p, m)


@each_builder
def test_micro_batches_go_back_in_their_order(build):
    # So that gradients are summed in one order, whatever the schedule.
    for p, m in sizes_of(build):
        schedule = build(p, m)
        for name in TABLES:
            for column in getattr(schedule, name).T:
                assert column[column != NONE].tolist() in ([], list(range(m)))


@each_builder
@pytest.mark.parametrize(("p", "m"), thinned([(1, 2), (2, 3)], slow=[(3, 4)], rows=True))
def test_every_single_change_is_refused_unless_it_can_run(build, p, m):
    schedule = build(p, m if can_be(build, p, m) else 2 * p)
    mutants = []
    for (name, tick, stage, i), (_, tick2, stage2, j) in itertools.combinations(
        entries(schedule), 2
    ):
        if getattr(schedule, name)[tick2, stage2] == j:
            mutants.append([(name, tick, stage, j), (name, tick2, stage2, i)])
    for name, tick, stage, i in entries(schedule):
        mutants.append([(name, tick, stage, NONE)])
        for other in range(schedule.ticks):
            there = int(getattr(schedule, name)[other, stage])
            if there == NONE:
                mutants.append([(name, other, stage, i)])  # a second time
                # Earlier and later, one tick and more.
                mutants.append([(name, tick, stage, NONE), (name, other, stage, i)])
    if len(mutants) > MANY:
        mutants = random.Random(0).sample(mutants, MANY)
    verdicts = [(accepts(changed(schedule, *m)), runs(changed(schedule, *m))) for m in mutants]
    assert all(accepted == can_run for accepted, can_run in verdicts)
    assert sum(not can_run for _, can_run in verdicts) > len(mutants) / 2


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_random_changes_are_refused_unless_they_can_run(data):
    p, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    build = data.draw(st.sampled_from(list(BUILDERS.values())))
    schedule = build(p, m if can_be(build, p, m) else 2 * p)
    if data.draw(st.booleans()):
        schedule = dataclasses.replace(schedule, stash_bound=None)
    cell = st.tuples(
        st.sampled_from(TABLES),
        st.integers(0, schedule.ticks - 1),
        st.integers(0, schedule.stages - 1),
        st.integers(NONE, schedule.microbatches - 1),
    )
    mutant = changed(schedule, *data.draw(st.lists(cell, min_size=1, max_size=4)))
    assert accepts(mutant) == runs(mutant)


def test_errors_name_stage_micro_batch_and_ticks():
    schedule = one_f_one_b(3, 4)
    with pytest.raises(ValueError, match=r"stage 1 never does forward of micro-batch 2, in 8 tick"):
        check(changed(schedule, ("forward", 3, 1, NONE)))
    with pytest.raises(
        ValueError, match=r"stage 1 does forward of micro-batch 2 2 times, at ticks 3, 6; keep one"
    ):
        check(changed(schedule, ("forward", 6, 1, 2)))
    with pytest.raises(
        ValueError,
        match=r"stage 2 does forward of micro-batch 0 at tick 1, but stage 1 does its forward at "
        r"tick 1; put it at tick 2 or later: what is sent is there in the next tick",
    ):
        check(changed(schedule, ("forward", 2, 2, NONE), ("forward", 1, 2, 0)))
    with pytest.raises(
        ValueError, match=r"stage 1 holds micro-batches 0, 1, 2 at tick 3, 3 of them, but its stash"
    ):
        check(dataclasses.replace(schedule, stash_bound=(5, 2, 1)))


def test_slots_that_are_overwritten_or_missing_are_refused():
    schedule = one_f_one_b(3, 4)
    stash = make_stash(schedule)
    check(schedule, stash)
    one = dataclasses.replace(
        stash,
        input_slots=np.where(stash.input_slots == NONE, NONE, 0),
        input_arrivals={1: np.where(stash.input_arrivals[1] == NONE, NONE, 0)},
    )
    with pytest.raises(
        ValueError,
        match=r"input of micro-batch 1 is written on stage 1 at tick 2 to slot 0, which holds "
        r"micro-batch 0 until tick 3",
    ):
        check(schedule, one)
    late = dataclasses.replace(stash, input_arrivals={1: np.roll(stash.input_arrivals[1], 1, 0)})
    with pytest.raises(ValueError, match=r"input of micro-batch 0 arrives on stage 1 at tick 1"):
        check(schedule, late)
    few = dataclasses.replace(stash, num_input_slots=2)
    with pytest.raises(ValueError, match=r"on stage 1 at tick 3 to slot 2 of 2"):
        check(schedule, few)


@each_builder
def test_an_executor_that_follows_the_slots_computes_the_right_values(build):
    for p, m in sizes_of(build)[::3]:
        schedule = build(p, m)
        stages, ranks, stash = schedule.stages, schedule.ranks, make_stash(schedule)
        inputs = np.zeros((p, stash.num_input_slots), object)
        gradients = np.zeros((p, stash.num_gradient_slots), object)
        kept = np.zeros((p, stash.num_kept_slots), object)
        tapes = np.zeros((p, stash.num_tape_slots), object)
        last_tapes = np.zeros((p, stash.num_last_tape_slots), object)
        down, up, used = [None] * p, [None] * p, []
        for tick in range(schedule.ticks):
            for ring, arrivals, sent in (
                (inputs, stash.input_arrivals, down),
                (gradients, stash.gradient_arrivals, up),
            ):
                for hop, table in arrivals.items():
                    for r in range(p):
                        if (slot := table[tick, r]) != NONE:
                            ring[r, slot] = sent[(r - hop) % p]
            down, up = [None] * p, [None] * p
            for name in TABLES:
                for s in range(stages):
                    r, i = ranks[s], int(getattr(schedule, name)[tick, s])
                    if i == NONE:
                        continue
                    ring = tapes if s < stages - 1 else last_tapes
                    x = ("batch", i) if s == 0 else inputs[r, stash.input_slots[s, i]]
                    if name == "forward":
                        down[r] = ("forward", s, x)
                        if schedule.trains:
                            ring[r, stash.tape_slots[s, i]] = s, i
                        continue
                    assert ring[r, stash.tape_slots[s, i]] == (s, i)
                    above = "loss" if s == stages - 1 else gradients[r, stash.gradient_slots[s, i]]
                    used.append((s, i, x, above))
                    if name == "backward":
                        up[r] = ("backward", s, x, above)
                        if schedule.splits:
                            kept[r, stash.kept_slots[s, i]] = s, i
                    else:
                        assert kept[r, stash.kept_slots[s, i]] == (s, i)
        assert used or not schedule.trains
        for s, n, x, above in used:
            expected = [("batch", n)]
            for before in range(stages - 1):
                expected.append(("forward", before, expected[-1]))
            gradient = "loss"
            for after in range(stages - 1, s, -1):
                gradient = ("backward", after, expected[after], gradient)
            assert (x, above) == (expected[s], gradient)


def test_stashes_of_single_stages_keep_their_bounds_whatever_the_number_of_micro_batches():
    for p, m in [*SIZES, (4, 64), (6, 96)]:
        below = [p - s for s in range(p)]
        most = {"low": below, "zb-h1": below, "gpipe": [m] * p, "forward": [1] * p}
        most["fast"] = [2 * n - 1 for n in below]
        for name, bound in most.items():
            stash = make_stash(FLAT[name](p, m))
            assert stash.in_flight == tuple(min(n, m) for n in bound), (name, p, m)
            assert stash.num_input_slots == max((0, *stash.in_flight[1:]))
            # The last use of a gradient comes before the next one arrives.
            assert stash.num_gradient_slots == int(p > 1 and name != "forward"), (name, p, m)


def test_slots_are_as_few_as_are_live_at_a_time():
    for build in BUILDERS.values():
        schedule = build(5, 10)
        stash = make_stash(schedule)
        for rank, most in enumerate(stash.peak_inputs):
            stages = [s for s in range(1, schedule.stages) if schedule.ranks[s] == rank]
            live = np.zeros(schedule.ticks, int)
            for stage in stages:
                arrives = {int(i): t + 1 for t, i in enumerate(schedule.forward[:, stage - 1])}
                last = {}
                for name in TABLES:
                    last |= {int(i): t for t, i in enumerate(getattr(schedule, name)[:, stage])}
                for i in range(10):
                    live[arrives[i] : last[i] + 1] += 1
            assert most == live.max() == stash.input_slots[stages].max(initial=NONE) + 1


def test_schedules_are_found_by_name():
    for name, options, build in (
        ("1f1b", {}, "fast"),
        ("1f1b", {"memory": "fast"}, "fast"),
        ("1f1b", {"memory": "low"}, "low"),
        ("gpipe", {}, "gpipe"),
        ("zb-h1", {}, "zb-h1"),
        ("interleaved", {}, "interleaved"),
        ("interleaved", {"chunks": 3}, "interleaved, 3 chunks"),
        ("zb-v", {}, "zb-v"),
        ("dualpipev", {}, "dualpipev"),
        ("forward", {}, "forward"),
        ("forward", {"chunks": 1}, "forward"),
    ):
        found, expected = make_schedule(name, 3, 6, **options), BUILDERS[build](3, 6)
        assert entries(found) == entries(expected)
        assert (found.name, found.ranks) == (expected.name, expected.ranks)
        assert name in (*NAMES, "forward")
        assert found.trains == (name != "forward")
    assert make_schedule("forward", 2, 3, chunks=2).ranks == (0, 1, 0, 1)


def test_names_and_options_that_no_schedule_has_are_refused():
    with pytest.raises(ValueError, match=r"'2f2b' is unknown; use one of '1f1b', 'gpipe', 'zb-h1'"):
        make_schedule("2f2b", 3, 4)
    with pytest.raises(ValueError, match=r"memory='tiny' is unknown; use 'fast'"):
        make_schedule("1f1b", 3, 4, "tiny")
    with pytest.raises(ValueError, match=r"memory='low' has no effect on schedule 'gpipe'"):
        make_schedule("gpipe", 3, 4, "low")
    for name in ("1f1b", "gpipe", "zb-h1", "zb-v", "dualpipev"):
        with pytest.raises(
            ValueError, match=rf"chunks=2 has no effect on schedule '{name}'; leave it out, or use"
        ):
            make_schedule(name, 3, 6, chunks=2)
    with pytest.raises(ValueError, match=r"chunks=1 for schedule 'interleaved'; use 2 or more, or"):
        make_schedule("interleaved", 3, 6, chunks=1)
    with pytest.raises(ValueError, match=r"chunks=0 for schedule 'forward'; use 1 or more"):
        make_schedule("forward", 3, 6, chunks=0)
    for name in (*NAMES, "forward"):
        with pytest.raises(ValueError, match=r"cannot have \d+ stages and 4 micro-batches"):
            make_schedule(name, 0, 4)


def test_tables_out_of_range_are_refused():
    good = one_f_one_b(2, 3)
    with pytest.raises(
        ValueError, match=r"weight of micro-batch 3 on stage 1 at tick 0, but there"
    ):
        changed(good, ("weight", 0, 1, 3))
    with pytest.raises(ValueError, match=r"table 'backward' is int32 \[4, 2\]; make it int32"):
        dataclasses.replace(good, backward=good.backward[:-1])
    with pytest.raises(ValueError, match=r"table 'forward' is float64"):
        dataclasses.replace(good, forward=good.forward.astype(float))
    with pytest.raises(ValueError, match=r"2 stages and 1 stash bounds"):
        dataclasses.replace(good, stash_bound=(1,))
    with pytest.raises(ValueError, match="read-only"):
        good.forward[0, 0] = 1


def test_a_schedule_written_by_hand_can_run():
    schedule = Schedule(
        name="by hand",
        stages=2,
        microbatches=1,
        forward=np.array([[0, -1], [-1, 0], [-1, -1]]),
        backward=np.array([[-1, -1], [-1, 0], [0, -1]]),
        weight=np.array([[-1, -1], [-1, 0], [0, -1]]),
    )
    check(schedule)
    assert runs(schedule)
    assert cost(schedule, 1, 2) == 1 + 3 + 2
