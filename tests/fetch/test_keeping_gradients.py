"""Segments that keep less, and cut ones, compute the gradients of `jax.grad`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from tools.keeping import (
    LAYERS,
    LOSSES,
    RATES,
    W_DD,
    WIDTH,
    X_BD,
    places_of,
    plan_of,
    plan_of_layers,
)
from tools.wire import collectives_on

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.fetch.fetch_plan import make_plan
from zeroxla.fetch.keeping.choose import Keeper, Keeping
from zeroxla.fetch.keeping.cuts import cut_segments
from zeroxla.fetch.keeping.places import PlaceFinder
from zeroxla.fetch.keeping.plan_keeper import PlanKeeper
from zeroxla.fetch.runner import FetchRunner
from zeroxla.mesh.placement import Placement
from zeroxla.program.trace import trace
from zeroxla.wire.routes import LeafSource, Route


def gradients(plan, keeping, leaves, *inputs):
    """Return the gradients of a plan's leaves, or of its inputs if it has none, on one device."""
    alone = collectives_on(nodes=1, devices=1)
    routes = {
        v: Route(placement=Placement(shape=v.aval.shape, dim=v.aval.ndim - 1)) for v in plan.leaves
    }
    runner = FetchRunner(plan, alone, routes, FetchLimits(), keeping=keeping)
    sources = {v: LeafSource(x) for v, x in zip(plan.leaves, leaves, strict=True)}
    _, tape = runner.forward(sources, inputs, record=True)
    given = dict(zip(plan.inputs, inputs, strict=True))
    shards, of_inputs = runner.backward(sources, given, tape, [jnp.ones(())])
    return [shards[v] for v in plan.leaves] or [ct for ct in of_inputs if ct is not None]


def arrays(*shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [
        jax.random.normal(key, x.shape) / np.sqrt(x.shape[-2])
        for key, x in zip(keys, shapes, strict=True)
    ]


def corners(places):
    """Yield a choice for each corner of the tradeoffs, the last corner where one has fewer."""
    for i in range(max(len(p.points) for p in places)):
        points = [p.points[min(i, len(p.points) - 1)] for p in places]
        yield Keeping(places=tuple(places), choices=tuple(points), gap=0.0)


def assert_close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * float(jnp.abs(b).max()))


QUICK = ("norm", "gelu", "shared outputs", "wide and narrow")
"""The others are slow; test_memory.py of the step has a quick loop of perceptrons."""


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(loss, marks=() if name in QUICK else pytest.mark.slow, id=name)
        for name, loss in LOSSES.items()
    ],
)
def test_gradients_do_not_depend_on_what_is_kept(loss):
    function, shape = loss
    w, x = arrays(shape, X_BD)
    wanted = jax.grad(lambda w: jnp.sum(function(w, x)))(w)
    plan = plan_of(*loss)
    for keeping in corners(places_of(plan)):
        assert_close(gradients(plan, keeping, [w], x), [wanted])


def test_what_has_effects_never_runs_again():
    calls = []

    def noted(x):
        calls.append(1)
        return np.cos(x)

    def function(w, x):
        y = jnp.sin(x @ w)
        factor = io_callback(noted, X_BD, jax.lax.stop_gradient(y))
        return jnp.tanh(jnp.exp(factor) * y) @ w

    plan = plan_of(function, W_DD)
    (place,) = places_of(plan)
    (pinned,) = [eq for eq in place.kind.traced.program.equations if eq.is_pinned]
    assert [
        place.graph.maker[i] for i, v in enumerate(place.graph.values) if v in pinned.outputs
    ] == [-1]
    w, x = arrays(W_DD, X_BD)
    y = jnp.cos(jnp.sin(x @ w))
    wanted = jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.exp(y) * jnp.sin(x @ w)) @ w))(w)
    choices = list(corners([place]))
    assert len(choices) > 2
    for keeping in choices:
        calls.clear()
        assert_close(gradients(plan, keeping, [w], x), [wanted])
        assert len(calls) == 1


# ---------------------------------------------------------------- segments that compute the same


def test_segments_that_compute_the_same_are_weighed_once():
    factors = iter([1.0, 2.0, 2.0, 3.0, 2.0])
    plan, program = plan_of_layers(lambda w, x: jnp.sin(jnp.tanh(x @ w) * next(factors)), 5)
    places = places_of(plan)
    first, *middle, last = (id(place.kind) for place in places)
    assert middle[0] == middle[1] != middle[2]
    assert len({first, *middle, last}) == 4  # the first has no input with a gradient
    args = arrays(*[W_DD] * 5, X_BD)
    wanted = jax.grad(lambda *args: program(*args)[0], range(5))(*args)
    for keeping in corners(places):
        assert all(keeping.of(plan, p.segment, ())[0].segment is p.segment for p in places)
        assert_close(gradients(plan, keeping, args[:5], args[5]), wanted)


# ---------------------------------------------------------------- cuts


def test_a_model_whose_leaves_all_stay_whole_is_cut_and_needs_less():
    layer = LAYERS["two products"]
    plan, program = plan_of_layers(layer, 6, gathered=False)
    cut = cut_segments(plan)
    assert len(plan.segments) == 1
    assert len(cut.segments) >= 3
    least, least_whole = (Keeper(places_of(p), RATES).least().num_bytes for p in (cut, plan))
    assert least < 0.6 * least_whole
    args = arrays(*[W_DD] * 6, X_BD)
    wanted = jax.grad(lambda *args: program(*args)[0], range(6))(*args)
    for keeping in (None, *corners(places_of(cut))):
        assert_close(gradients(cut, keeping, [], *args), wanted)


def test_pieces_that_run_twice_keep_the_inputs_of_a_segment_alone():
    plan, program = plan_of_layers(LAYERS["two products"], 6, gathered=False)
    keeper = PlanKeeper(plan, None, PlaceFinder(RATES))
    chosen = keeper.within(0.0, len(keeper.plans) - 1)
    assert keeper.plan_of(chosen) is keeper.plans[-1]
    assert len(chosen.places) >= 3
    assert all(place.runs_twice for place in chosen.places)
    assert chosen.num_bytes <= min(least.num_bytes for least in keeper.leasts())
    assert chosen.twice_flops == pytest.approx(sum(p.kind.forward_flops for p in chosen.places))
    assert chosen.seconds > chosen.twice_s > 0
    args = arrays(*[W_DD] * 6, X_BD)
    wanted = jax.grad(lambda *args: program(*args)[0], range(6))(*args)
    for keeping in (None, *corners(chosen.places)):
        assert_close(gradients(keeper.plans[-1], keeping, [], *args), wanted)


@pytest.mark.parametrize(
    ("unit_elements", "count", "is_cut"),
    [(10**9, 6, True), (3 * WIDTH**2, 6, False), (1, 3, False)],
)
def test_no_leaf_is_gathered_more_often_after_a_cut(unit_elements, count, is_cut):
    def loss(*args):
        *leaves, x = args
        for w in leaves:
            x = jnp.sin(jnp.tanh(x @ w) @ w)
        return jnp.sum(x)

    program, _ = trace(loss, *[W_DD] * count, X_BD)
    leaves = program.inputs[:-1]
    split = dict.fromkeys(leaves, 1)
    plan = make_plan(program, leaves, leaves, unit_elements=unit_elements, split_dims=split)
    cut = cut_segments(plan)
    gathered = [leaf for seg in cut.segments for leaf in seg.leaves]
    assert sorted(map(id, gathered)) == sorted(map(id, leaves))
    assert (len(cut.segments) > len(plan.segments)) == is_cut
    args = arrays(*[W_DD] * count, X_BD)
    wanted = jax.grad(lambda *args: program(*args)[0], range(count))(*args)
    assert_close(gradients(cut, None, args[:-1], args[-1]), wanted)
