"""Units: the repeated block is found from shapes, and leaves are cut into units in order."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroxla.fetch.units import (
    DEFAULT_UNIT_ELEMENTS,
    MIN_UNIT_ELEMENTS,
    Repetition,
    default_unit_elements,
    find_repetition,
    unit_of_each,
)

BIG = (256, 256)  # 65,536 elements: a block of these is no smaller than the least unit.
BLOCK = [BIG, (256,), (256, 1024), (1024,)]

SHAPES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=12)


def test_the_block_of_a_transformer_is_found():
    shapes = [(500, 256), *BLOCK * 6, (256,), (256, 500)]
    assert find_repetition(shapes) == Repetition(start=1, period=4, count=6)
    assert default_unit_elements(shapes) == sum(map(math.prod, BLOCK))
    units = unit_of_each(shapes, None)
    # The embedding, six blocks, and what follows.
    assert units == [0, *itertools.chain(*([i] * 4 for i in range(1, 7))), 7, 7]


def test_the_shortest_period_wins_among_equals():
    assert find_repetition([BIG] * 6) == Repetition(start=0, period=1, count=6)
    assert find_repetition([(2,), (3,), (4,)]) is None
    assert find_repetition([]) is None


def test_nothing_repeated_is_cut_at_the_stated_default():
    half = DEFAULT_UNIT_ELEMENTS // 2
    shapes = [(half,), (half + 1,), (half - 1,), (3 * half,), (1,)]
    assert default_unit_elements(shapes) == DEFAULT_UNIT_ELEMENTS
    assert unit_of_each(shapes, None) == [0, 1, 1, 2, 3]


def test_small_blocks_are_joined():
    tiny = [(8, 8), (8,)]  # 72 elements: 455 of them make one unit.
    units = unit_of_each(tiny * 1000, None)
    joined = MIN_UNIT_ELEMENTS // 72
    assert units == [i // 2 // joined for i in range(2000)]


@pytest.mark.parametrize(
    ("limit", "units"),
    [(100, [0, 0, 0, 0]), (30, [0, 0, 1, 2]), (20, [0, 1, 2, 3]), (1, [0, 1, 2, 3])],
)
def test_a_unit_closes_before_it_would_exceed_its_limit(limit, units):
    # 10, 20, 20, 50 elements; a leaf larger than the limit is a unit of its own.
    assert unit_of_each([(10,), (20,), (4, 5), (50,)], limit) == units


@given(shapes=SHAPES, limit=st.one_of(st.none(), st.integers(1, 40)))
def test_units_are_consecutive_and_bounded(shapes, limit):
    units = unit_of_each(shapes, limit)
    assert len(units) == len(shapes)
    assert all(b - a in (0, 1) for a, b in itertools.pairwise([0, *units]))
    if limit is not None:
        for unit in set(units):
            sizes = [math.prod(s) for s, u in zip(shapes, units) if u == unit]
            assert len(sizes) == 1 or sum(sizes) <= limit


@given(shapes=SHAPES)
def test_a_repetition_is_one_and_none_covers_more(shapes):
    found = find_repetition(shapes)
    covered = 0
    if found is not None:
        period = shapes[found.start : found.start + found.period]
        assert shapes[found.start : found.stop] == period * found.count
        assert found.count > 1
        covered = sum(map(math.prod, shapes[found.start : found.stop]))
    for start in range(len(shapes)):
        for length in range(1, (len(shapes) - start) // 2 + 1):
            block = shapes[start : start + length]
            count = 1
            while shapes[start + count * length : start + (count + 1) * length] == block:
                count += 1
            assert count == 1 or count * sum(map(math.prod, block)) <= covered
