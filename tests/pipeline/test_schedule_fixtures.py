"""1F1B with memory="low" has the order of DeepSpeed's training, and forward_only of its inference.

tests/fixtures/b_schedules.npz was recorded from `deepspeed.runtime.pipe.schedule` (version 0.19.8),
`TrainSchedule` and `InferenceSchedule`: per stage rows of (step, opcode, buffer or -1). It names
buffers, not micro-batches: which micro-batch is in a buffer follows from the loads and receives,
which come in the order of the micro-batches.
"""

from pathlib import Path

import numpy as np
import pytest

from zeroxla.pipeline.make_schedule import forward_only, one_f_one_b, zero_bubble
from zeroxla.pipeline.schedule import NONE
from zeroxla.pipeline.stash import make_stash

RECORDED = np.load(Path(__file__).parents[1] / "fixtures" / "b_schedules.npz")
OPS = RECORDED["opnames"].tolist()
CASES = [(2, 2), (2, 4), (4, 4), (4, 8), (3, 7), (1, 3), (2, 1), (4, 2)]
each_case = pytest.mark.parametrize(("p", "m"), CASES, ids=str)


def recorded(kind, p, m, stage):
    """[(step, "forward" or "backward", micro-batch)] in their order."""
    done, in_buffer, num_forwards = [], {}, 0
    for step, opcode, buffer in RECORDED[f"{kind}_s{p}_m{m}_stage{stage}"].tolist():
        if OPS[opcode] == "ForwardPass":
            in_buffer[buffer] = num_forwards
            done.append((step, "forward", num_forwards))
            num_forwards += 1
        elif OPS[opcode] == "BackwardPass":
            done.append((step, "backward", in_buffer[buffer]))
    return done


def ours(schedule, stage):
    return [
        (tick, name, int(table[tick, stage]))
        for tick in range(schedule.ticks)
        for name, table in (("forward", schedule.forward), ("backward", schedule.backward))
        if table[tick, stage] != NONE
    ]


@each_case
def test_1f1b_low_is_the_recorded_order_in_the_recorded_steps(p, m):
    schedule = one_f_one_b(p, m, memory="low")
    for stage in range(p):
        assert ours(schedule, stage) == recorded("TrainSchedule", p, m, stage)
        # Theirs has a step more, for reduction and update.
        assert schedule.ticks <= RECORDED[f"TrainSchedule_s{p}_m{m}_stage{stage}_nsteps"]


@each_case
def test_recorded_buffers_are_the_stash_but_at_least_two(p, m):
    for schedule in (one_f_one_b(p, m, memory="low"), zero_bubble(p, m)):
        in_flight = make_stash(schedule).in_flight
        buffers = [int(RECORDED[f"TrainSchedule_s{p}_m{m}_stage{s}_buffers"]) for s in range(p)]
        assert buffers == [max(2, held) for held in in_flight]


@each_case
def test_forward_only_is_the_recorded_order_of_inference(p, m):
    schedule = forward_only(p, m)
    for stage in range(p):
        assert ours(schedule, stage) == recorded("InferenceSchedule", p, m, stage)
        assert int(RECORDED[f"InferenceSchedule_s{p}_m{m}_stage{stage}_buffers"]) == 2


@each_case
def test_1f1b_fast_does_the_same_in_fewer_ticks(p, m):
    fast, low = one_f_one_b(p, m), one_f_one_b(p, m, memory="low")
    assert fast.ticks == m + 2 * (p - 1) <= low.ticks == 2 * (m + p - 1)
    for name in ("forward", "backward"):
        for stage in range(p):
            orders = [
                [i for _, op, i in ours(schedule, stage) if op == name] for schedule in (fast, low)
            ]
            assert orders[0] == orders[1] == list(range(m))
