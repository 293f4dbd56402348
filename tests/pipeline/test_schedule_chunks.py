"""Schedules with several stages on a rank: their cost, what a rank holds, and bad tables."""

import dataclasses

import numpy as np
import pytest
from tools.quick import thinned
from tools.schedules import accepts, changed, runs

from zeroxla.pipeline.chunked_schedules import PUT_OFF, dualpipe_v, interleaved, zb_v
from zeroxla.pipeline.make_schedule import forward_only, gpipe, one_f_one_b, zero_bubble
from zeroxla.pipeline.schedule import NONE, Schedule
from zeroxla.pipeline.schedule_check import check
from zeroxla.pipeline.schedule_cost import bubble, cost, critical_path, work_of
from zeroxla.pipeline.stash import make_stash

COUNTS = (1, 2, 3, 5, 8, 12, 13, 16, 21, 40)  # of micro-batches


def over_1f1b(schedule):
    """The cost in lockstep, divided by that of 1F1B with one stage on each rank."""
    return cost(schedule) / cost(one_f_one_b(schedule.num_ranks, schedule.microbatches))


@pytest.mark.parametrize("chunks", thinned([3], slow=[2, 4]))
def test_interleaved_shortens_the_idle_time_by_the_chunks(chunks):
    assert over_1f1b(interleaved(4, 16)) == pytest.approx(0.921, abs=5e-4)
    for p in range(1, 9):
        for m in COUNTS:
            schedule = interleaved(p, m, chunks)
            check(schedule)
            held, bound = make_stash(schedule).in_flight, schedule.stash_bound
            assert all(a <= b for a, b in zip(held, bound, strict=True))
            if m >= 2 * p:
                assert held == tuple(p * (chunks + 1) - 2 * rank - 1 for rank in range(p))
            if m % p == 0:
                assert schedule.ticks == m * chunks + p * chunks + p - 2
                known = (m + (p - 1) / chunks) * (1 + 2)
                assert cost(schedule) == pytest.approx(known)
                assert bubble(schedule) == pytest.approx(1 - 3 * m / known)


@pytest.mark.parametrize("counts", thinned([COUNTS], slow=[range(1, 41)]), ids=["some", "all"])
def test_zb_v_fills_the_ticks_and_holds_what_1f1b_does(counts):
    assert over_1f1b(zb_v(4, 16)) <= 0.88
    for p in range(1, 9):
        for m in counts:
            schedule = zb_v(p, m)
            check(schedule)
            assert schedule.one_op
            assert cost(schedule) == schedule.ticks / 2  # F, B - W and W of a chunk are 1/2
            stash = make_stash(schedule)
            assert max(stash.peak_kept) <= PUT_OFF == 3
            assert all(h <= b for h, b in zip(stash.in_flight, schedule.stash_bound, strict=True))
            assert stash.num_tape_slots <= max(forwards_held(schedule)) <= 2 * p
            assert stash.num_last_tape_slots <= min(m, PUT_OFF + 2)
            if m >= 2 * p:
                assert schedule.ticks == 6 * m + p - 1 + max(p - 3, 0)
                # p inputs of whole ranks, of two chunks each, and one or two that wait.
                waiting = [1 if rank in (0, p - 1) else 2 for rank in range(p)]
                assert stash.in_flight == tuple(2 * p + n for n in waiting)


def forwards_held(schedule):
    """The most micro-batches of each rank's stages between their forward and weight gradient."""
    begun = np.cumsum(schedule.forward != NONE, axis=0)
    ended = np.cumsum(schedule.weight != NONE, axis=0)
    ended = np.concatenate([np.zeros_like(ended[:1]), ended[:-1]])  # a weight gradient still holds
    held = begun - ended
    return [
        held[:, schedule.stages_of(rank)].sum(axis=1).max() for rank in range(schedule.num_ranks)
    ]


def test_dualpipe_v_has_forwards_beside_backwards_and_holds_one_input_more():
    assert over_1f1b(dualpipe_v(4, 16)) == pytest.approx(0.921, abs=5e-4)
    for p in range(1, 9):
        for m in (2 * p, 2 * p + 1, 3 * p + 1, 40):
            schedule = dualpipe_v(p, m)
            check(schedule)
            stash = make_stash(schedule)
            assert stash.in_flight == schedule.stash_bound == (2 * p + 1,) * p
            assert stash.peak_kept == tuple(rank + 1 for rank in range(p))
            both = (schedule.forward != NONE)[:, :p] & (schedule.backward != NONE)[:, : p - 1 : -1]
            assert (both.sum(axis=0) == [m - 2 * p + rank + 1 for rank in range(p)]).all()
            assert cost(schedule) <= cost(one_f_one_b(p, m))
    for p, m in ((1, 1), (2, 3), (4, 7)):
        with pytest.raises(
            ValueError,
            match=rf"{p} ranks takes at least {2 * p} micro-batches, and there are {m}; use more",
        ):
            dualpipe_v(p, m)


def test_forwards_alone_are_used_as_they_arrive_wherever_stages_are():
    for ranks in ((0, 1, 2), (0, 1, 2, 2, 1, 0), (0, 1, 2) * 3, (0, 0, 1, 2, 1), (2, 0, 1, 0)):
        for m in (1, 2, 5, 12):
            schedule = forward_only(3, m, ranks)
            check(schedule)
            assert make_stash(schedule).in_flight == (1, 1, 1)
            assert schedule.ranks == ranks
            assert not schedule.trains
    # No rank ever waits between its first and its last forward.
    assert forward_only(3, 12, (0, 1, 2, 2, 1, 0)).ticks == 2 * 12 + 2 * 2
    assert forward_only(3, 12, (0, 1, 2) * 3).ticks == 3 * 12 + 2
    with pytest.raises(ValueError, match=r"of 3 ranks with stages on the ranks \(0, 1, 3\); name"):
        forward_only(3, 4, (0, 1, 3))


def test_work_is_that_of_a_rank_however_many_its_chunks():
    p, m = 4, 8
    for schedule in (one_f_one_b(p, m), interleaved(p, m), zb_v(p, m), dualpipe_v(p, m)):
        work = work_of(schedule, 1, 2.5, weight=1)
        assert work.shape == (schedule.ticks, p, 3)
        assert work.sum(axis=(0, 2)) == pytest.approx(np.full(p, m * 3.5))
        assert m * 3 < critical_path(schedule) <= cost(schedule)


def test_ranks_are_told_of_the_schedule():
    for build, ranks, chunks, one_op in (
        (zero_bubble, (0, 1, 2), 1, True),
        (one_f_one_b, (0, 1, 2), 1, False),
        (gpipe, (0, 1, 2), 1, True),
        (interleaved, (0, 1, 2, 0, 1, 2), 2, False),
        (zb_v, (0, 1, 2, 2, 1, 0), 2, True),
        (dualpipe_v, (0, 1, 2, 2, 1, 0), 2, False),
    ):
        schedule = build(3, 6)
        assert (schedule.ranks, schedule.num_ranks, schedule.num_chunks) == (ranks, 3, chunks)
        assert schedule.one_op == one_op
        of_rank = tuple(stage for stage, rank in enumerate(ranks) if rank == 1)
        assert schedule.stages_of(1) == of_rank


def test_arrivals_are_told_apart_by_their_hop():
    stash = make_stash(zb_v(4, 6))
    assert [*stash.input_arrivals] == [0, 1, 3]  # to itself at the turn, down, up
    assert [*stash.gradient_arrivals] == [0, 1, 3]
    turn = stash.input_arrivals[0] != NONE
    assert turn[:, 3].sum() == 6 == turn.sum()
    assert (stash.input_arrivals[1] != NONE).sum(axis=0).tolist() == [0, 6, 6, 6]
    assert (stash.input_arrivals[3] != NONE).sum(axis=0).tolist() == [6, 6, 6, 0]
    assert [*make_stash(interleaved(4, 6)).input_arrivals] == [1]
    assert [*make_stash(interleaved(4, 6)).gradient_arrivals] == [3]
    assert [*make_stash(zb_v(2, 6)).input_arrivals] == [0, 1]
    assert make_stash(one_f_one_b(1, 3)).input_arrivals == {}


def test_two_ops_of_a_kind_in_a_tick_are_refused_whatever_their_stages():
    schedule = interleaved(2, 2)
    moved = changed(schedule, ("forward", 3, 2, NONE), ("forward", 4, 2, 1))
    moved = changed(moved, ("forward", 4, 3, NONE), ("forward", 5, 3, 1))
    late = changed(moved, ("forward", 1, 0, NONE), ("forward", 2, 0, 1))
    assert not accepts(late)
    assert not runs(late)
    with pytest.raises(
        ValueError,
        match=r"rank 0 does forward of micro-batch 1 on stage 0 and of micro-batch 0 on stage 2 at "
        r"tick 2; keep one in a tick",
    ):
        check(late)


def on_one_rank():
    """Three stages on one rank, for one micro-batch."""
    tables = np.full((3, 6, 3), NONE)
    for stage in range(3):
        tables[0, stage, stage] = 0
        tables[1, 5 - stage, stage] = 0
    forward, backward, weight = tables
    return Schedule(
        name="by hand",
        stages=3,
        microbatches=1,
        forward=forward,
        backward=backward,
        weight=weight,
        ranks=(0, 0, 0),
        stash_bound=(3,),
    )


def test_slots_that_two_stages_of_a_rank_share_are_refused():
    schedule = on_one_rank()
    stash = make_stash(schedule)
    check(schedule, stash)
    assert runs(schedule)
    assert stash.input_slots.tolist() == [[NONE], [0], [1]]
    shared = dataclasses.replace(
        stash,
        input_slots=np.array([[NONE], [0], [0]]),
        input_arrivals={0: np.minimum(stash.input_arrivals[0], 0)},
    )
    with pytest.raises(
        ValueError,
        match=r"input of micro-batch 0 is written on stage 2 at tick 2 to slot 0, which holds "
        r"micro-batch 0 of stage 1 until tick 4; give one of them another slot",
    ):
        check(schedule, shared)
    with pytest.raises(
        ValueError,
        match=r"rank 0 holds micro-batches 0 of stage 0 and micro-batches 0 of stage 1 and "
        r"micro-batches 0 of stage 2 at tick 2, 3 of them, but its stash bound is 2",
    ):
        check(dataclasses.replace(schedule, stash_bound=(2,)))


def test_slots_of_what_waits_for_its_weight_gradient_are_proved():
    schedule = zb_v(4, 8)
    stash = make_stash(schedule)
    check(schedule, stash)
    one = dataclasses.replace(stash, kept_slots=np.zeros_like(stash.kept_slots))
    with pytest.raises(ValueError, match=r"residual of micro-batch \d is written on stage \d at"):
        check(schedule, one)
    with pytest.raises(ValueError, match=r"to slot 2 of 2; use one of the slots"):
        check(schedule, dataclasses.replace(stash, num_kept_slots=2))
    one = dataclasses.replace(stash, tape_slots=np.zeros_like(stash.tape_slots))
    with pytest.raises(ValueError, match=r"tape of micro-batch \d is written on stage \d at"):
        check(schedule, one)


def test_arrivals_by_other_hops_are_refused():
    schedule = zb_v(3, 6)
    stash = make_stash(schedule)
    tables = stash.input_arrivals
    with pytest.raises(
        ValueError,
        match=r"the stash has the input arrivals .* by hop; make a table \[ticks, ranks\] = "
        r"\[38, 3\] for each of the hops \[0, 1, 2\]",
    ):
        check(schedule, dataclasses.replace(stash, input_arrivals={0: tables[0], 1: tables[1]}))
    swapped = {0: tables[0], 1: tables[2], 2: tables[1]}
    with pytest.raises(ValueError, match=r"arrives on .* but is written to slot"):
        check(schedule, dataclasses.replace(stash, input_arrivals=swapped))


def test_ranks_without_a_stage_or_of_another_number_are_refused():
    schedule = interleaved(2, 3)
    with pytest.raises(ValueError, match=r"rank 1 has no stage in ranks=\(0, 2, 0, 2\); number"):
        dataclasses.replace(schedule, ranks=(0, 2, 0, 2))
    with pytest.raises(ValueError, match=r"there is no rank -1 in ranks=\(0, 1, -1, 1\)"):
        dataclasses.replace(schedule, ranks=(0, 1, -1, 1))
    with pytest.raises(ValueError, match=r"has 4 stages and 3 ranks of stages; give one for each"):
        dataclasses.replace(schedule, ranks=(0, 1, 0))
    with pytest.raises(ValueError, match=r"2 ranks and 4 stash bounds; give one for each rank"):
        dataclasses.replace(schedule, stash_bound=(1, 1, 1, 1))
    assert dataclasses.replace(schedule, ranks=None, stash_bound=None).ranks == (0, 1, 2, 3)
