"""A budget takes the best choice of what to keep. The tests try every other choice."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from tools.keeping import (
    LAYERS,
    LOSSES,
    RATES,
    W_LDD,
    Everything,
    graph_from,
    graph_of,
    places_of,
    plan_of,
    plan_of_layers,
    scan_body,
)

from zeroxla.fetch.keeping.choose import Keeper
from zeroxla.fetch.keeping.integer_program import best_choice
from zeroxla.fetch.keeping.places import SegmentPlace
from zeroxla.fetch.keeping.tradeoff import cheapest, tradeoff
from zeroxla.fetch.segments import Straight

SHARES = (0.9, 0.7, 0.5, 0.35, 0.2, 0.1, 0.0)
MOST_EXCESS = 1.05
EXACT = 1 + 1e-6

GRAPHS = {
    **{name: functools.partial(graph_of, *loss) for name, loss in LOSSES.items()},
    **{
        f"numbers {seed}": functools.partial(
            lambda seed: graph_from(np.random.default_rng(seed), num_equations=12, num_residuals=9),
            seed,
        )
        for seed in range(4)
    },
}


@pytest.fixture(params=GRAPHS.values(), ids=GRAPHS)
def graph(request):
    found = request.param()
    assert 0 < len(found.residuals) <= 12
    return found


# ---------------------------------------------------------------- one segment


def test_the_choice_within_a_limit_is_the_best_of_all(graph):
    everything = Everything.of(graph)
    points = tradeoff(graph)
    most, least = points[0].num_bytes, points[-1].num_bytes
    for share in SHARES:
        limit = least + share * (most - least)
        choice = best_choice(graph, limit)
        assert choice.num_bytes <= limit
        assert choice.seconds <= everything.best_within(limit) * MOST_EXCESS
    assert best_choice(graph, least - 1) is None


def test_the_tradeoff_runs_from_no_time_to_the_fewest_bytes_along_the_hull(graph):
    everything = Everything.of(graph)
    points = tradeoff(graph)
    assert points[0].seconds == 0
    assert points[-1].num_bytes == everything.num_bytes.min()
    for more, less in itertools.pairwise(points):
        assert more.num_bytes > less.num_bytes
        assert more.seconds < less.seconds
        price = (less.seconds - more.seconds) / (more.num_bytes - less.num_bytes)
        for corner in (more, less):
            cost = corner.seconds + price * corner.num_bytes
            assert cost <= everything.best_at(price) * EXACT


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 9), st.floats(1e-2, 1e2)
)
def test_the_cut_for_a_price_is_the_best_of_all(seed, equations, residuals, price):
    rng = np.random.default_rng(seed)
    graph = graph_from(rng, num_equations=equations, num_residuals=residuals)
    choice = cheapest(graph, price)
    cost = choice.seconds + price * choice.num_bytes
    assert cost == pytest.approx(Everything.of(graph).best_at(price), rel=1e-5)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(st.integers(0, 2**32), st.integers(1, 6), st.floats(1e-1, 1e1))
def test_values_wait_on_the_host_where_that_is_best(seed, equations, price):
    rng = np.random.default_rng(seed)
    graph = graph_from(rng, num_equations=equations, num_residuals=4, host=True)
    everything = Everything.of(graph, host=True)

    def seconds(choice):
        return choice.seconds + sum(graph.host_seconds[v] for v in choice.on_host)

    choice = cheapest(graph, price)
    cost = seconds(choice) + price * choice.num_bytes
    assert cost == pytest.approx(everything.best_at(price), rel=1e-5)
    for limit in (0, 5, 12):
        exact = best_choice(graph, limit)
        assert seconds(exact) == pytest.approx(everything.best_within(limit), rel=1e-5)


# ---------------------------------------------------------------- several segments


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_the_choice_for_several_segments_is_the_best_of_all(layer):
    plan, _ = plan_of_layers(layer, 2)
    places = places_of(plan)
    assert len(places) == 2
    assert sum(len(p.graph.residuals) for p in places) <= 12
    keeper = Keeper(places, RATES)
    first, last = (Everything.of(p.graph) for p in places)
    # While backward is at the last segment, what the first keeps is there too.
    at_last = first.num_bytes[:, None] + last.own_bytes
    peak = np.maximum(at_last, first.own_bytes[:, None])
    seconds = first.seconds[:, None] + last.seconds
    most = keeper.everything().num_bytes
    for share in SHARES:
        limit = peak.min() + share * (most - peak.min())
        chosen = keeper.within(limit)
        assert chosen.num_bytes <= limit
        best = seconds[peak <= limit].min()
        assert chosen.seconds <= best * MOST_EXCESS


# ---------------------------------------------------------------- when values are alive


def place_at(*path):
    unread: Any = None
    return SegmentPlace(segment=unread, kind=unread, path=path, trace=unread)


def test_what_earlier_segments_keep_is_there_at_later_ones():
    first, second = place_at((0, 1)), place_at((1, 1))
    assert first.times_alive(second) == 1
    assert first.times_alive(first) == 1
    assert second.times_alive(first) == 0


def test_a_loop_keeps_all_turns_while_it_runs_backward():
    before, after = place_at((0, 1)), place_at((2, 1))
    first, second = (place_at((1, 3), (i, 1)) for i in range(2))
    assert [first.times_alive(p) for p in (before, first, second, after)] == [0, 3, 3, 3]
    assert [second.times_alive(p) for p in (before, first, second, after)] == [0, 3, 3, 3]
    assert [before.times_alive(p) for p in (first, after)] == [1, 1]
    nested = place_at((1, 3), (1, 5), (0, 1))
    assert nested.times_alive(after) == 15
    assert nested.turns == 15


def test_a_remat_body_keeps_nothing_outside_its_own_backward():
    before, after = place_at((0, 1)), place_at((2, 1))
    first, second = (place_at((1, 0), (i, 1)) for i in range(2))
    assert [first.times_alive(p) for p in (before, first, second, after)] == [0, 1, 1, 0]
    assert [second.times_alive(p) for p in (first, second)] == [0, 1]
    inside = place_at((4, 3), (1, 0), (0, 1))  # a `jax.checkpoint` in each turn of a loop
    assert [inside.times_alive(p) for p in (inside, after)] == [1, 0]
    loop = place_at((4, 0), (1, 3), (0, 1))  # a loop in a `jax.checkpoint`
    assert [loop.times_alive(p) for p in (loop, place_at((4, 0), (2, 1)))] == [3, 3]


def test_places_of_a_loop_know_its_turns():
    plan = plan_of(lambda w, x: jnp.sin(scan_body(w, x)), W_LDD)
    body, last = places_of(plan)
    assert [body.turns, last.turns] == [3, 1]
    assert body.times_alive(last) == 3
    assert isinstance(plan.segments[-1], Straight)
