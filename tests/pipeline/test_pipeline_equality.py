"""A pipelined step equals the whole model under `jax.grad`, for every pair of a model, a number of
stages, a share of devices, a number of micro-batches, a schedule and a preset of wires.

Quick are rows of the smallest model: one for each schedule of two stages, of which one has wires of
ZeRO++. The other rows of the pairwise cover are slow, and `-m full` takes all combinations.
"""

import math
from collections.abc import Hashable, Iterable

import pytest
from tools.equality import GRADIENT_TOLERANCE
from tools.pipeline_equality import CHUNKED, Row, cover, matrix, measure
from tools.quick import covering, quick_compilation  # noqa: F401

COVER = list(cover())
# Relative to a leaf's norm, of a gradient that makes two hops in 4 bits: each loses at most half a
# step of max/7 of an element, of a normal distribution some 12 % of its norm. Rounded weights alone
# cost AlexNet's first kernel 19 %, on one device and without stages.
WIRES_TOLERANCE, ALEXNET_TOLERANCE = 0.2, 0.3


def check(row: Row) -> None:
    errors = measure(row)
    if row.preset.startswith("zeropp"):
        assert errors.loss <= 0.01, (row, errors)
        bound = ALEXNET_TOLERANCE if row.model == "alexnet" else WIRES_TOLERANCE
        assert 1e-4 < errors.gradient[1] <= bound, (row, errors)
        assert errors.norm <= 0.05, (row, errors)
    else:
        assert errors.loss <= GRADIENT_TOLERANCE, (row, errors)
        assert errors.gradient[1] <= GRADIENT_TOLERANCE, (row, errors)
        assert errors.norm <= GRADIENT_TOLERANCE, (row, errors)


SMALL = [Row("ties", 2, (1, 1), 4, schedule, "step") for schedule in ("gpipe", "dualpipev", "zb-v")]
"""Quick rows of schedules that the cover has on larger meshes."""


def settings_of(row: Row) -> Iterable[Hashable]:
    """Return the schedule of a row, if a quick row must have it.

    Here, only rows of "ties", a list of layers, are quick. test_state.py has a quick row of blocks
    that are written out, with the schedule "zb-h1", and test_axes.py has one of blocks in a loop,
    with "1f1b".
    """
    elsewhere = ("1f1b", "zb-h1", *(small.schedule for small in SMALL))
    return () if row.model != "ties" or row.schedule in elsewhere else (row.schedule,)


def cost_of(row: Row) -> float:
    """About the time to compile a row, where 1 is the least."""
    model = {"ties": 1, "gpt, unrolled": 5}.get(row.model, 3)
    wires, chunks = row.preset.startswith("zeropp"), row.schedule in CHUNKED
    return model * 1.5 ** (wires + chunks) * math.sqrt(row.pipe * math.prod(row.share))


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("row", [*SMALL, *covering(COVER, settings_of, cost=cost_of)], ids=str)
def test_a_step_equals_the_whole_model(row):
    check(row)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "pipe", "share"), sorted({(row.model, row.pipe, row.share) for row in matrix()})
)
def test_every_step_equals_the_whole_model(model, pipe, share):
    for row in matrix():
        if (row.model, row.pipe, row.share) == (model, pipe, share):
            check(row)


def test_the_cover_meets_every_pair():
    met = set().union(*(row.pairs for row in COVER))
    assert all(row.pairs <= met for row in matrix() if row.preset != "zeropp_hq, tick")
