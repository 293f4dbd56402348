"""Fetch plans: where a unit is gathered, what flows between segments, what is kept for backward."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from tools.wire import collectives_on

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.fetch.fetch_plan import make_plan
from zeroxla.fetch.order import tie_points
from zeroxla.fetch.runner import FetchRunner
from zeroxla.fetch.segments import LayerLoop, Remat, Straight
from zeroxla.mesh.placement import place
from zeroxla.program.trace import trace
from zeroxla.wire.routes import Route

WORLD = 8


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def plan_of(loss, *leaves, x=(2, 6), unit_elements=1, frozen=()):
    """The plan of loss(*leaves, x), its leaves placed as on 8 devices."""
    program, _ = trace(loss, *leaves, shape(*x))
    values = program.inputs[: len(leaves)]
    whole = make_plan(
        program, values, values, unit_elements=unit_elements, split_dims=dict.fromkeys(values)
    )
    skip = {
        leaf: dim
        for s in whole.segments
        if isinstance(s, LayerLoop)
        for leaf, dim in s.stacked.values()
    }
    dims = {v: place(v.aval.shape, WORLD, skip=[skip[v]] if v in skip else []).dim for v in values}
    active = [v for i, v in enumerate(values) if i not in frozen]
    return make_plan(program, values, active, unit_elements=unit_elements, split_dims=dims)


def runner_of(plan, limits=None):
    """A runner of the plan; it traces forward and backward, and runs nothing."""
    collectives = collectives_on(nodes=2, devices=4)
    stacked = {
        leaf: dim
        for s in plan.segments
        if isinstance(s, LayerLoop)
        for leaf, dim in s.stacked.values()
    }
    placements = {
        v: place(v.aval.shape, WORLD, skip=[stacked[v]] if v in stacked else [])
        for v in plan.leaves
    }
    routes = {v: Route(placement=p) for v, p in placements.items()}
    return FetchRunner(plan, collectives, routes, limits or FetchLimits())


def plan_of_scan(layers=3):
    def loss(w, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()

    return plan_of(loss, shape(layers, 6, 6))


def leaf_names(plan, segment):
    """Positions in plan.leaves of what a segment gathers."""
    return [plan.leaves.index(v) for v in segment.leaves]


def three(a, b, c, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ a) @ b) @ c)


def test_each_unit_is_a_segment():
    leaves = [shape(6, 8), shape(8, 8), shape(8, 3)]
    plan = plan_of(three, *leaves)
    assert [leaf_names(plan, s) for s in plan.segments] == [[0], [1], [2]]
    assert [len(u) for u in plan.units] == [1, 1, 1]
    # One activation flows between segments; the batch enters the first, the loss leaves the last.
    assert [[v.aval.shape for v in s.inputs] for s in plan.segments] == [
        [(2, 6)],
        [(2, 8)],
        [(2, 8)],
    ]
    assert [[v.aval.shape for v in s.outputs] for s in plan.segments] == [[(2, 8)], [(2, 8)], [()]]

    joined = plan_of(three, *leaves, unit_elements=48 + 64)
    assert [leaf_names(joined, s) for s in joined.segments] == [[0, 1], [2]]
    whole = plan_of(three, *leaves, unit_elements=None)
    assert [leaf_names(whole, s) for s in whole.segments] == [[0, 1, 2]]


def test_a_leaf_used_far_apart_is_gathered_in_both_places():
    plan = plan_of(lambda a, b, x: jnp.sum(jnp.tanh(x @ a @ b) @ a), shape(6, 6), shape(6, 6))
    assert [leaf_names(plan, s) for s in plan.segments] == [[0], [1], [0]]
    assert [[plan.leaves.index(v) for v in u] for u in plan.units] == [[0], [1]]


def test_values_that_follow_from_leaves_alone_never_flow_between_segments():
    def loss(a, b, x):
        half, mask = a.T.astype(jnp.bfloat16), jnp.tril(jnp.ones((6, 6)))
        y = jnp.tanh(x @ (half.astype(jnp.float32) * mask))
        y = jnp.tanh(y @ b)
        return jnp.sum(y @ half.astype(jnp.float32) * mask[0])

    plan = plan_of(loss, shape(6, 6), shape(6, 6))
    assert [leaf_names(plan, s) for s in plan.segments] == [[0], [1], [0]]
    for segment in plan.segments:
        assert {v.aval.shape for v in (*segment.inputs, *segment.outputs)} <= {(2, 6), ()}
    # Nor are they kept for backward: it gathers the leaf and makes them again.
    runner = runner_of(plan)
    for segment in plan.segments:
        assert not {v.aval.shape for v in runner.passes.linear[segment].saved} & {(6, 6)}


def test_backward_gathers_only_what_it_reads():
    def loss(table, w, bias, x):
        return jnp.sum(jnp.tanh(table[0] + x) @ w + bias)

    plan = plan_of(loss, shape(9, 6), shape(6, 8), shape(8))
    runner = runner_of(plan)
    assert [leaf_names(plan, s) for s in plan.segments] == [[0], [1], [2]]
    units = reversed(runner.passes.backward_order.units)
    assert [[plan.leaves.index(v) for v in leaves] for leaves in units] == [[], [1], []]


def test_a_scan_over_stacked_leaves_is_a_loop_whose_body_gathers_a_layer():
    plan = plan_of_scan()
    loop, last = plan.segments
    assert isinstance(loop, LayerLoop)
    assert isinstance(last, Straight)
    assert loop.leaves == ()
    assert last.leaves == ()
    assert loop.stacked == {0: (plan.leaves[0], 0)}
    (layer,) = loop.body.leaves
    assert layer.aval.shape == (6, 6)
    assert [s.leaves for s in loop.body.segments] == [(layer,)]
    # The tape of a turn holds activations: none of the size of a layer.
    runner = runner_of(plan)
    body = runner.bodies[loop].body
    saved = [v.aval.shape for s in loop.body.segments for v in body.passes.linear[s].saved]
    assert (6, 6) not in saved
    assert (2, 6) in saved


@pytest.mark.parametrize(
    ("before", "dims"),
    [
        (lambda w: w.astype(jnp.bfloat16), {0}),
        (lambda w: jnp.moveaxis(w, 1, 0), {1}),
        (lambda w: jnp.moveaxis(w.astype(jnp.bfloat16), 2, 0).swapaxes(1, 2), {2}),
    ],
)
def test_a_stack_may_be_cast_and_transposed_before_its_loop(before, dims):
    def loss(w, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w.astype(x.dtype)), None), x, before(w))[0].sum()

    plan = plan_of(loss, shape(6, 6, 6))
    (loop,) = [s for s in plan.segments if isinstance(s, LayerLoop)]
    assert {dim for _, dim in loop.stacked.values()} == dims


def test_a_scan_over_what_is_no_leaf_gathers_it_before():
    def loss(w, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, 2 * w)[0].sum()

    plan = plan_of(loss, shape(3, 6, 6))
    assert all(isinstance(s, Straight) for s in plan.segments)


def test_leaves_that_every_turn_reads_are_gathered_before_the_loop():
    def loss(w, shared, start, x):
        carry = jnp.broadcast_to(start, x.shape)
        return lax.scan(lambda c, w: (jnp.tanh(c @ w @ shared.T) + x, None), carry, w)[0].sum()

    plan = plan_of(loss, shape(3, 6, 6), shape(6, 6), shape(6))
    (loop,) = [s for s in plan.segments if isinstance(s, LayerLoop)]
    assert {plan.leaves.index(v) for v in loop.leaves} == {1, 2}
    assert [leaf.aval.shape for leaf in loop.body.leaves] == [(6, 6)]


@pytest.fixture(params=[False, True], ids=["", "remat3"])
def remat3(request):
    """Whether `jax.checkpoint` is the new one, as JAX plans to make it."""
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", request.param)
    yield
    jax.config.update("jax_remat3", before)


def test_a_checkpoint_larger_than_a_unit_is_opened(remat3):
    @jax.checkpoint
    def body(a, b, c, x):
        return three(a, b, c, x)

    leaves = [shape(6, 8), shape(8, 8), shape(8, 3)]
    (remat,) = plan_of(body, *leaves, unit_elements=1).segments
    assert isinstance(remat, Remat)
    assert [len(s.leaves) for s in remat.body.segments] == [1, 1, 1]
    (straight,) = plan_of(body, *leaves, unit_elements=10**6).segments
    assert isinstance(straight, Straight)
    assert len(straight.leaves) == 3


def test_a_norm_of_a_leaf_is_computed_once():
    """It is small: keeping it costs less than gathering its leaf again wherever it is read."""

    def loss(a, b, x):
        norm = jnp.sqrt(jnp.sum(a**2))
        return jnp.sum(jnp.tanh(x @ a * norm) @ b * norm) + norm

    plan = plan_of(loss, shape(6, 6), shape(6, 6))
    assert [leaf_names(plan, s) for s in plan.segments] == [[0], [1]]


def test_frozen_leaves_and_integers_have_no_gradient():
    def loss(a, b, x):
        y = jnp.tanh(jnp.tanh(x @ a) @ b)
        return jnp.sum(y * jnp.argmax(y, axis=0))

    leaves = [shape(6, 6), shape(6, 6)]
    plan = plan_of(loss, *leaves, frozen=[0])
    assert plan.leaves[1] in plan.active
    assert plan.leaves[0] not in plan.active
    first, second = plan.segments
    linear = runner_of(plan).passes.linear
    # Nothing trained lies before b: backward has nothing to do there.
    assert linear[first].targets == ()
    assert linear[second].targets == (plan.leaves[1],)


@pytest.mark.parametrize("max_live", [0, 35, 36, 359, 360])
def test_a_loop_keeps_all_its_layers_gathered_or_none(max_live):
    """Kept layers lie stacked on the tape: ten layers of 36 elements are 360."""
    plan = plan_of_scan(layers=10)
    (body,) = runner_of(plan, FetchLimits(max_live=max_live, max_reuse=10**9)).bodies.values()
    assert bool(body.body.passes.kept) == (max_live >= 360)


def test_prefetch_is_bounded_by_its_bucket():
    sizes = [10, 10, 0, 30, 10]
    # A gather may start at the entry of the segment named.
    assert tie_points(sizes, 0) == [0, 1, 2, 3, 4]
    assert tie_points(sizes, None) == [0, 0, 1, 2, 3]
    assert tie_points(sizes, 10**9) == [0, 0, 2, 0, 0]
    assert tie_points(sizes, 10) == [0, 0, 2, 3, 3]
    assert tie_points(sizes, 30) == [0, 0, 2, 1, 3]


def test_prefetch_stops_at_a_loop_and_crosses_turns_with_one_unit():
    sizes = [0, 10, 10, 10, 10]
    # Segment 2 is a loop: its own first gather may run ahead, none after it may.
    assert tie_points(sizes, None, loops=[2]) == [0, 0, 1, 3, 3]
    assert tie_points(sizes, 10**9, loops=[2]) == [0, 0, 0, 3, 3]
    # In a body the first unit, of segment 1, may be gathered in the turn before if it fits.
    assert tie_points(sizes, None, in_loop=True) == [0, -1, 1, 2, 3]
    assert tie_points([10, 10, 10], None, in_loop=True) == [-1, 0, 1]
    assert tie_points(sizes, 10**9, in_loop=True) == [0, -1, 0, 0, 0]
    assert tie_points(sizes, 9, in_loop=True) == [0, 1, 2, 3, 4]
