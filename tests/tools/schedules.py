"""Schedules of all kinds, and `runs`, an event simulator that shares no code with the checker."""

import dataclasses
import itertools

import numpy as np
import pytest

from zeroxla.pipeline.chunked_schedules import down_and_up, dualpipe_v, interleaved, zb_v
from zeroxla.pipeline.make_schedule import forward_only, gpipe, one_f_one_b, zero_bubble
from zeroxla.pipeline.schedule import NONE
from zeroxla.pipeline.schedule_check import check

FLAT = {
    "fast": one_f_one_b,
    "low": lambda p, m: one_f_one_b(p, m, memory="low"),
    "gpipe": gpipe,
    "zb-h1": zero_bubble,
    "forward": forward_only,
}
CHUNKED = {
    "interleaved": interleaved,
    "interleaved, 3 chunks": lambda p, m: interleaved(p, m, chunks=3),
    "zb-v": zb_v,
    "dualpipev": dualpipe_v,
    "forward, down and up": lambda p, m: forward_only(p, m, down_and_up(p)),
    "forward, one rank with two": lambda p, m: forward_only(p, m, (0, *range(p))),
}
BUILDERS = FLAT | CHUNKED
SIZES = list(itertools.product(range(1, 7), range(1, 13)))
TABLES = ("forward", "backward", "weight")
each_builder = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)


def can_be(build, p, m):
    """Whether a builder takes these sizes."""
    return build is not dualpipe_v or m >= 2 * p


def sizes_of(build):
    return [size for size in SIZES if can_be(build, *size)]


def runs(schedule):
    """Whether the ranks, passing messages tick by tick, all finish and keep the stash bound."""
    p, m, ranks = schedule.stages, schedule.microbatches, schedule.ranks
    tables = [getattr(schedule, name).tolist() for name in TABLES]
    needs = [any(i >= 0 for row in table for i in row) for table in tables]
    needs[1] = needs[1] or needs[2]
    final = 2 if needs[2] else 1 if needs[1] else 0
    inbox = [{*range(m)} if s == 0 else set() for s in range(p)]
    gradients = [set() for _ in range(p)]
    done = [[set(), set(), set()] for _ in range(p)]
    for tick in range(schedule.ticks):
        sent_down, sent_up, busy = [], [], set()
        held = [
            (done[s][0] if s == 0 else inbox[s]) - done[s][final]
            for s in range(p)
        ]  # fmt: skip
        for s in range(p):
            for op in range(3):
                i = tables[op][tick][s]
                if i < 0:
                    continue
                if i in done[s][op] or (op, ranks[s]) in busy:
                    return False
                ready = (inbox[s], done[s][0] if s == p - 1 else gradients[s], done[s][1])[op]
                if i not in ready or (op == 1 and i not in done[s][0]):
                    return False
                busy.add((op, ranks[s]))
                done[s][op].add(i)
                if op == 0:
                    sent_down.append((s + 1, i))
                    if s == 0:
                        held[0] |= {i}
                if op == 1:
                    sent_up.append((s - 1, i))
        of_rank = [sum(len(held[s]) for s in range(p) if ranks[s] == r) for r in {*ranks}]
        bound = schedule.stash_bound
        if bound is not None and any(h > most for h, most in zip(of_rank, bound, strict=True)):
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
