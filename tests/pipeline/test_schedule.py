"""Schedules: every builder makes tables that can run, the checker refuses those that cannot.

The judge is `runs`, an event simulator that knows the rules and shares no code with the checker.
"""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroxla.inspect.schedule import schedule as report
from zeroxla.pipeline.make_schedule import (
    forward_only,
    gpipe,
    make_schedule,
    one_f_one_b,
    zero_bubble,
)
from zeroxla.pipeline.schedule import NONE, Schedule, ticks_of
from zeroxla.pipeline.schedule_check import check
from zeroxla.pipeline.schedule_cost import bubble, cost, critical_path
from zeroxla.pipeline.stash import make_stash

BUILDERS = {
    "fast": one_f_one_b,
    "low": lambda p, m: one_f_one_b(p, m, memory="low"),
    "gpipe": gpipe,
    "zb-h1": zero_bubble,
    "forward": forward_only,
}
SIZES = list(itertools.product(range(1, 7), range(1, 13)))
each_builder = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
TABLES = ("forward", "backward", "weight")


def runs(schedule):
    """Whether the stages, passing messages tick by tick, all finish and keep the stash bound."""
    p, m = schedule.stages, schedule.microbatches
    tables = [getattr(schedule, name).tolist() for name in TABLES]
    needs = [any(i >= 0 for row in table for i in row) for table in tables]
    needs[1] = needs[1] or needs[2]
    final = 2 if needs[2] else 1 if needs[1] else 0
    inbox = [{*range(m)} if s == 0 else set() for s in range(p)]
    gradients = [set() for _ in range(p)]
    done = [[set(), set(), set()] for _ in range(p)]
    for tick in range(schedule.ticks):
        sent_down, sent_up = [], []
        held = [
            (done[s][0] if s == 0 else inbox[s]) - done[s][final]
            for s in range(p)
        ]  # fmt: skip
        for s in range(p):
            for op in range(3):
                i = tables[op][tick][s]
                if i < 0:
                    continue
                if i in done[s][op]:
                    return False
                ready = (inbox[s], done[s][0] if s == p - 1 else gradients[s], done[s][1])[op]
                if i not in ready or (op == 1 and i not in done[s][0]):
                    return False
                done[s][op].add(i)
                if op == 0:
                    sent_down.append((s + 1, i))
                    if s == 0:
                        held[0] |= {i}
                if op == 1:
                    sent_up.append((s - 1, i))
        bound = schedule.stash_bound
        if bound is not None and any(len(h) > most for h, most in zip(held, bound, strict=True)):
            return False
        for s, i in sent_down:
            if s < p:
                inbox[s].add(i)
        for s, i in sent_up:
            if s >= 0:
                gradients[s].add(i)
    return all(
        len(done[s][op]) == (m if needs[op] or op == 0 else 0) for s in range(p) for op in range(3)
    )


def accepts(schedule):
    try:
        check(schedule)
    except ValueError as error:
        text = str(error)
    else:
        return True
    assert f"schedule {schedule.name!r} cannot run: " in text
    assert all(word in text for word in ("stage", "micro-batch", "tick"))
    return False


def changed(schedule, *changes):
    """With (table, tick, stage, micro-batch) written into it."""
    tables = {name: getattr(schedule, name).copy() for name in TABLES}
    for name, tick, stage, microbatch in changes:
        tables[name][tick, stage] = microbatch
    return dataclasses.replace(schedule, **tables)


def entries(schedule):
    return [
        (name, tick, stage, int(getattr(schedule, name)[tick, stage]))
        for name in TABLES
        for tick, stage in np.argwhere(getattr(schedule, name) != NONE).tolist()
    ]


@each_builder
def test_every_built_schedule_can_run(build):
    for p, m in SIZES:
        schedule = build(p, m)
        check(schedule)
        assert runs(schedule), (p, m)


@each_builder
def test_micro_batches_go_back_in_their_order(build):
    # So that gradients are summed in one order, whatever the schedule.
    for p, m in SIZES:
        schedule = build(p, m)
        for name in TABLES:
            for column in getattr(schedule, name).T:
                assert column[column != NONE].tolist() in ([], list(range(m)))


@each_builder
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 3), (3, 4)])
def test_every_single_change_is_refused_unless_it_can_run(build, p, m):
    schedule = build(p, m)
    mutants = []
    for (name, tick, stage, i), (_, tick2, stage2, j) in itertools.combinations(
        entries(schedule), 2
    ):
        if getattr(schedule, name)[tick2, stage2] == j:
            mutants.append(changed(schedule, (name, tick, stage, j), (name, tick2, stage2, i)))
    for name, tick, stage, i in entries(schedule):
        mutants.append(changed(schedule, (name, tick, stage, NONE)))
        for other in range(schedule.ticks):
            there = int(getattr(schedule, name)[other, stage])
            if there == NONE:
                mutants.append(changed(schedule, (name, other, stage, i)))  # a second time
                # Earlier and later, one tick and more.
                mutants.append(
                    changed(schedule, (name, tick, stage, NONE), (name, other, stage, i))
                )
    verdicts = [(accepts(mutant), runs(mutant)) for mutant in mutants]
    assert all(accepted == can_run for accepted, can_run in verdicts)
    assert sum(not can_run for _, can_run in verdicts) > len(mutants) / 2


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_random_changes_are_refused_unless_they_can_run(data):
    p, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    schedule = data.draw(st.sampled_from(list(BUILDERS.values())))(p, m)
    if data.draw(st.booleans()):
        schedule = dataclasses.replace(schedule, stash_bound=None)
    cell = st.tuples(
        st.sampled_from(TABLES),
        st.integers(0, schedule.ticks - 1),
        st.integers(0, p - 1),
        st.integers(NONE, m - 1),
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
        input_arrivals=np.where(stash.input_arrivals == NONE, NONE, 0),
    )
    with pytest.raises(
        ValueError,
        match=r"input of micro-batch 1 arrives on stage 1 at tick 2 in slot 0, which holds "
        r"micro-batch 0 until tick 3",
    ):
        check(schedule, one)
    late = dataclasses.replace(stash, input_arrivals=np.roll(stash.input_arrivals, 1, axis=0))
    with pytest.raises(ValueError, match=r"input of micro-batch 0 arrives on stage 1 at tick 1"):
        check(schedule, late)
    few = dataclasses.replace(stash, num_input_slots=2)
    with pytest.raises(ValueError, match=r"on stage 1 at tick 3 in slot 2 of 2"):
        check(schedule, few)


@each_builder
def test_an_executor_that_follows_the_slots_computes_the_right_values(build):
    for p, m in SIZES[::2]:
        schedule = build(p, m)
        stash = make_stash(schedule)
        inputs = np.zeros((p, stash.num_input_slots), object)
        gradients = np.zeros((p, stash.num_gradient_slots), object)
        down, up, used = [None] * p, [None] * p, []
        for tick in range(schedule.ticks):
            for s in range(p):
                if (slot := stash.input_arrivals[tick, s]) != NONE:
                    inputs[s, slot] = down[s - 1]
                if (slot := stash.gradient_arrivals[tick, s]) != NONE:
                    gradients[s, slot] = up[s + 1]
            down, up = [None] * p, [None] * p
            for s in range(p):
                i, j, k = (int(getattr(schedule, name)[tick, s]) for name in TABLES)
                received = [
                    (("batch", n) if s == 0 else inputs[s, stash.input_slots[s, n]])
                    if n != NONE
                    else None
                    for n in (i, j, k)
                ]
                if i != NONE:
                    down[s] = ("forward", s, received[0])
                for n, x in ((j, received[1]), (k, received[2])):
                    if n != NONE:
                        above = "loss" if s == p - 1 else gradients[s, stash.gradient_slots[s, n]]
                        used.append((s, n, x, above))
                        if n == j:
                            up[s] = ("backward", s, x, above)
        assert used or not schedule.trains
        for s, n, x, above in used:
            expected = [("batch", n)]
            for before in range(p - 1):
                expected.append(("forward", before, expected[-1]))
            gradient = "loss"
            for after in range(p - 1, s, -1):
                gradient = ("backward", after, expected[after], gradient)
            assert (x, above) == (expected[s], gradient)


def test_stashes_keep_their_bounds_whatever_the_number_of_micro_batches():
    for p, m in [*SIZES, (4, 64), (6, 96)]:
        below = [p - s for s in range(p)]
        most = {"low": below, "zb-h1": below, "gpipe": [m] * p, "forward": [1] * p}
        most["fast"] = [2 * n - 1 for n in below]
        for name, bound in most.items():
            stash = make_stash(BUILDERS[name](p, m))
            assert stash.in_flight == tuple(min(n, m) for n in bound), (name, p, m)
            assert stash.num_input_slots == max((0, *stash.in_flight[1:]))
            # The last use of a gradient comes before the next one arrives.
            assert stash.num_gradient_slots == int(p > 1 and name != "forward"), (name, p, m)


def test_slots_are_as_few_as_are_live_at_a_time():
    for build in BUILDERS.values():
        schedule = build(5, 9)
        stash = make_stash(schedule)
        for stage in range(1, 5):
            arrives = {int(i): t + 1 for t, i in enumerate(schedule.forward[:, stage - 1])}
            last = {}
            for name in TABLES:
                last |= {int(i): t for t, i in enumerate(getattr(schedule, name)[:, stage])}
            live = [
                sum(arrives[i] <= tick <= last[i] for i in range(9))
                for tick in range(schedule.ticks)
            ]
            assert stash.peak_inputs[stage] == max(live) == stash.input_slots[stage].max() + 1


def test_lockstep_cost_of_1f1b_is_that_of_an_asynchronous_one():
    assert cost(one_f_one_b(4, 16)) == (16 + 4 - 1) * (1 + 2)
    for p, m in SIZES:
        for forward, backward in ((1, 2), (1, 3), (2, 1)):
            known = (m + p - 1) * (forward + backward)
            fast, low = one_f_one_b(p, m), one_f_one_b(p, m, memory="low")
            assert cost(fast, forward, backward) == known
            assert cost(gpipe(p, m), forward, backward) == known
            for schedule in (fast, low, gpipe(p, m)):
                assert critical_path(schedule, forward, backward) == known
            assert cost(forward_only(p, m), forward, backward) == (m + p - 1) * forward


def test_bubble_of_1f1b_is_the_known_one():
    for p, m in SIZES:
        known = pytest.approx((p - 1) / (m + p - 1))
        assert bubble(one_f_one_b(p, m)) == known
        assert bubble(gpipe(p, m)) == known
        assert bubble(forward_only(p, m)) == known
        low = one_f_one_b(p, m, memory="low")
        assert bubble(low, forward=1, backward=1) == known
        assert 1 - 2 * m * p / (p * low.ticks) == known


def test_low_memory_pays_for_waiting_in_lockstep():
    low = one_f_one_b(4, 16, memory="low")
    assert cost(low) == 72 == pytest.approx(1.263 * critical_path(low), rel=1e-3)


def test_zero_bubble_saves_a_tick_per_hop_and_no_table_with_its_bound_saves_more():
    for p, m in SIZES:
        schedule = zero_bubble(p, m)
        assert cost(schedule) == schedule.ticks == 3 * m + 2 * (p - 1)
        assert cost(schedule) == cost(one_f_one_b(p, m)) - (p - 1)
        assert critical_path(schedule) <= cost(schedule)
        assert (ticks_of(schedule.weight, m) == ticks_of(schedule.backward, m) + 1).all()
    for p, m in ((1, 3), (2, 1), (2, 4), (3, 2), (3, 3)):
        assert shortest(p, m) == zero_bubble(p, m).ticks


def shortest(p, m):
    """The fewest ticks of F, B or W with at most p - s micro-batches from F to W on stage s."""
    start = ((0, 0, 0),) * p  # how many forwards, input and weight gradients each stage has done
    reached, ticks = {start}, 0
    while ((m, m, m),) * p not in reached:
        following = set()
        for state in reached:
            choices = []
            for s, (f, b, w) in enumerate(state):
                choices.append([(f, b, w)])
                if f < (state[s - 1][0] if s else m) and f - w < p - s:
                    choices[s].append((f + 1, b, w))
                if b < (state[s + 1][1] if s < p - 1 else f):
                    choices[s].append((f, b + 1, w))
                if w < b:
                    choices[s].append((f, b, w + 1))
            following |= set(itertools.product(*choices))
        reached, ticks = following, ticks + 1
    return ticks


def test_split_backwards_cost_what_whole_ones_do():
    schedule = zero_bubble(3, 5)
    assert cost(schedule, 1, 2) == cost(schedule, 1, 2, weight=1)
    everything = cost(schedule, 1, 2, weight=0.5) * 3 * (1 - bubble(schedule, 1, 2, weight=0.5))
    assert everything == pytest.approx(3 * 5 * (1 + 2))
    with pytest.raises(ValueError, match=r"weight=3; use none below 0, and for weight a part of"):
        cost(schedule, 1, 2, weight=3)


def test_schedules_are_found_by_name():
    for name, memory, build in (
        ("1f1b", None, "fast"),
        ("1f1b", "fast", "fast"),
        ("1f1b", "low", "low"),
        ("gpipe", None, "gpipe"),
        ("zb-h1", None, "zb-h1"),
        ("forward", None, "forward"),
    ):
        found, expected = make_schedule(name, 3, 4, memory), BUILDERS[build](3, 4)
        assert entries(found) == entries(expected)
        assert found.name == expected.name
    with pytest.raises(ValueError, match=r"'2f2b' is unknown; use one of '1f1b', 'gpipe', 'zb-h1'"):
        make_schedule("2f2b", 3, 4)
    with pytest.raises(ValueError, match=r"memory='tiny' is unknown; use 'fast'"):
        make_schedule("1f1b", 3, 4, "tiny")
    with pytest.raises(ValueError, match=r"memory='low' has no effect on schedule 'gpipe'"):
        make_schedule("gpipe", 3, 4, "low")
    with pytest.raises(ValueError, match=r"cannot have 0 stages and 4 micro-batches"):
        make_schedule("1f1b", 0, 4)


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


def test_report_says_what_a_schedule_costs_and_holds():
    text = str(report(one_f_one_b(4, 16)))
    for words in (
        "Schedule 1f1b (stages: 4, micro-batches: 16)",
        "15.8%",
        "1.000 x (m + p - 1)(F + B)",
        "received inputs 5, gradients 1",
        "5 + 1",
    ):
        assert words in text
    found = report(zero_bubble(4, 16)).to_dict()
    assert found["in_flight"] == [4, 3, 2, 1]
    assert found["lockstep"] == found["ticks"] == 54
    with pytest.raises(ValueError, match="cannot run"):
        report(changed(gpipe(2, 2), ("forward", 0, 0, NONE)))


@each_builder
def test_picture_has_a_box_for_each_entry_and_none_over_another(build, tmp_path):
    schedule = build(4, 8)
    figure = report(schedule).plot(path=tmp_path / "schedule.png")
    (axes,) = figure.axes
    boxes = [p for p in axes.patches if p.get_linewidth() == 0.7]
    assert len(boxes) == len(entries(schedule)) == len(axes.texts)
    assert axes.get_xlim() == (0, cost(schedule))
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        f"stage {s}" for s in range(4)
    ]
    assert axes.yaxis_inverted()
    for y in {box.get_y() for box in boxes}:
        row = sorted((b.get_x(), b.get_x() + b.get_width()) for b in boxes if b.get_y() == y)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(row))
    colors = {box.get_facecolor() for box in boxes}
    assert len(colors) == len({name for name, *_ in entries(schedule)})
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


def test_picture_of_many_micro_batches_leaves_out_numbers_too_small_to_read():
    figure = report(one_f_one_b(2, 600)).plot()
    assert not figure.axes[0].texts
    assert figure.get_figwidth() <= 24
