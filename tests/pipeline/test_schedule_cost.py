"""Costs of schedules: the known ones, and the shortest that a search finds."""

import itertools

import pytest
from tools.quick import thinned
from tools.schedules import SIZES

from zeroxla.pipeline.make_schedule import forward_only, gpipe, one_f_one_b, zero_bubble
from zeroxla.pipeline.schedule import ticks_of
from zeroxla.pipeline.schedule_cost import bubble, cost, critical_path


@pytest.mark.parametrize("sizes", thinned([SIZES[::5]], slow=[SIZES]), ids=["some", "all"])
def test_lockstep_cost_of_1f1b_is_that_of_an_asynchronous_one(sizes):
    assert cost(one_f_one_b(4, 16)) == (16 + 4 - 1) * (1 + 2)
    for p, m in sizes:
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
