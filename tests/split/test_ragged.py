"""Rows that are sorted by expert: devices have the experts of their own groups, and their rows.

Every way in which public code writes such a mixture is planned for the axis `expert` and run on
devices of `vmap`, against the model whole under `jax.grad`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tools.quick import quick_compilation  # noqa: F401

from zeroxla.program.trace import trace
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.conversions import RanEquation, conversions_of, events_of
from zeroxla.split.holdings import COPIES, Kind, RowWindow, convert, ragged
from zeroxla.split.plan_proof import PlanProof, Verdict
from zeroxla.split.run_plan import PlanRunner
from zeroxla.split.split_axis import SplitAxis
from zeroxla.step.axes.axis_planner import AxisPlanner

pytestmark = pytest.mark.usefixtures("quick_compilation")

EXPERTS, TOP_K, WIDTH, HIDDEN = 8, 2, 12, 10
BY_BYTES = AxisCosts(latency=0.0)
"""What bytes cost alone: arrays are small here, and latencies would decide everything."""


def products(p, x, sizes, act=jax.nn.silu, **options):
    def dot(x, bank):
        return lax.ragged_dot(x, bank, sizes, **options)

    return dot(act(dot(x, p["gate"])) * dot(x, p["up"]), p["down"])


def routed(p, x):
    """Return the weights and the experts of each token, and the experts of all pairs in a row."""
    top, chosen = lax.top_k(x @ p["router"], TOP_K)
    return jax.nn.softmax(top), chosen.reshape(-1)


def combined(y, weights):
    return jnp.einsum("tkd,tk->td", y.reshape(-1, TOP_K, WIDTH), weights)


def back_by_gather(p, x):
    """MaxText's: tokens by number, and back by the inverse permutation."""
    weights, chosen = routed(p, x)
    order = jnp.argsort(chosen)
    y = products(p, jnp.take(x, order // TOP_K, axis=0), jnp.bincount(chosen, length=EXPERTS))
    return combined(jnp.take(y, jnp.argsort(order), axis=0), weights)


def back_by_scatter(p, x):
    weights, chosen = routed(p, x)
    order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=EXPERTS)
    options = {"preferred_element_type": jnp.float32}
    y = products(p, x[order // TOP_K], sizes, jax.nn.relu, **options)
    return (jnp.zeros_like(y).at[order].set(y).reshape(-1, TOP_K, WIDTH) * weights[..., None]).sum(
        1
    )


def added_to_tokens(p, x):
    """Gate and up in one product; weighted in the order of experts, and added up by token."""
    weights, chosen = routed(p, x)
    order, sizes = jnp.argsort(chosen), (chosen[:, None] == jnp.arange(EXPERTS)).sum(0)
    token = jnp.repeat(jnp.arange(x.shape[0]), TOP_K)[order]
    both = lax.ragged_dot(x[token], jnp.concatenate([p["gate"], p["up"]], -1), sizes)
    gate, up = jnp.split(both, 2, -1)
    y = lax.ragged_dot(jax.nn.gelu(gate) * up, p["down"], sizes)
    return jnp.zeros_like(x).at[token].add(y * weights.reshape(-1)[order][:, None])


def with_biases(p, x):
    """Biases of experts, sizes that are counted for each product anew, and a mask of rows."""
    weights, chosen = routed(p, x)
    order = jnp.argsort(chosen)
    own = chosen[order]

    def dot(x, bank, bias):
        return lax.ragged_dot(x, bank, jnp.bincount(chosen, length=EXPERTS)) + bias[own]

    rows = x[order // TOP_K]
    gate = jnp.minimum(dot(rows, p["gate"], p["bias"]), 1.0)
    up = dot(rows, p["up"], 2 * p["bias"])
    y = dot((up + 1) * gate * jax.nn.sigmoid(1.7 * gate), p["down"], p["last_bias"])
    y = jnp.where((jnp.arange(len(own)) < len(own) - 1)[:, None], y, 0)
    return combined(y[jnp.argsort(order)], weights)


@jax.custom_vjp
def sorted_rows(x, order):
    return x[order]


sorted_rows.defvjp(lambda x, o: (x[o], o), lambda o, ct: (ct[jnp.argsort(o)], None))


def sorted_by_a_rule(p, x):
    """Rows are repeated and permuted by a function with a derivative of its own (newer MaxText)."""
    weights, chosen = routed(p, x)
    order = jnp.argsort(chosen)
    rows = sorted_rows(jnp.repeat(x, TOP_K, 0), order)
    y = products(p, rows, jnp.bincount(chosen, length=EXPERTS))
    return combined(sorted_rows(y, jnp.argsort(order)), weights)


def computed_again(p, x):
    return jax.checkpoint(back_by_gather)(p, x)


def in_a_loop(p, x):
    banks = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 0.5]), p)
    return lax.scan(lambda x, p: (x + jax.checkpoint(back_by_gather)(p, x), None), x, banks)[0]


def rows_of_no_group(p, x):
    """The last experts have no rows, and theirs are in no group. What is not zero there counts."""
    weights, chosen = routed(p, x)
    order, counts = jnp.argsort(chosen), jnp.bincount(chosen, length=EXPERTS)
    sizes = jnp.where(jnp.arange(EXPERTS) < EXPERTS // 2, counts, 0)
    h = jnp.exp(lax.ragged_dot(x[order // TOP_K], p["gate"], sizes))
    y = 0.1 * (lax.ragged_dot(h, p["down"], sizes) + h.mean(-1, keepdims=True))
    return combined(y[jnp.argsort(order)], weights)


STYLES = {
    f.__name__: f
    for f in (
        *(back_by_gather, back_by_scatter, added_to_tokens, with_biases, sorted_by_a_rule),
        *(computed_again, in_a_loop, rows_of_no_group),
    )
}
SHAPES = {
    "bias": (EXPERTS, HIDDEN),
    "down": (EXPERTS, HIDDEN, WIDTH),
    "gate": (EXPERTS, WIDTH, HIDDEN),
    "last_bias": (EXPERTS, WIDTH),
    "router": (WIDTH, EXPERTS),
    "up": (EXPERTS, WIDTH, HIDDEN),
}


def made(skewed=False):
    rng = np.random.default_rng(0)
    params = {k: 0.4 * rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
    if skewed:  # All tokens take the first two experts: the others have no rows.
        params["router"][:] = 0
    return params, rng.normal(size=(8, 5, WIDTH)).astype(np.float32)


def loss_of(style, params, x):
    rows = x.reshape(-1, WIDTH)
    return jnp.mean(jnp.tanh(style(params, jnp.tanh(rows)) + rows) ** 2)


@functools.cache
def planned(name, axis, parts):
    """Return a style's plan; every way of it is proved."""
    params, x = made()
    program, _ = trace(lambda p, x: loss_of(STYLES[name], p, x), params, x)
    planner = AxisPlanner(name=axis, length=parts, costs=BY_BYTES, proof=PlanProof())
    return planner.plan(program, [len(params), 0, 1, 0], None)


def ragged_dots(plan, parts):
    return [
        event
        for event in events_of(plan, parts)
        if isinstance(event, RanEquation) and event.equation.name == "ragged_dot_general"
    ]


SLOW = ("back_by_scatter", "added_to_tokens", "in_a_loop", "rows_of_no_group", "computed_again")
CASES = [
    pytest.param(name, axis, parts, marks=[] if quick else pytest.mark.slow)
    for axis, parts in (("expert", 4), ("expert", 2), ("context", 5))
    for name in STYLES
    for quick in (name not in SLOW and parts == 4,)
]


@pytest.mark.parametrize(("name", "axis", "parts"), CASES)
def test_gradients_are_those_of_one_device(name, axis, parts):
    plan, along = planned(name, axis, parts), SplitAxis(parts=parts, name="axis")
    leaves = plan.program.inputs[:-1]

    def in_parts(args):
        params, x = args
        trios = zip(params.values(), leaves, plan.inputs, strict=False)
        held = [{h: convert(p, plan.flow.dims[v], COPIES, h, along)} for p, v, (h,) in trios]
        return PlanRunner(plan, along)([*held, {plan.inputs[-1][0]: x}])[0]

    @jax.jit
    def everywhere(args):
        each = jax.vmap(
            lambda _, args: jax.value_and_grad(in_parts)(args), (0, None), axis_name="axis"
        )
        return each(jnp.arange(parts), args)

    for skewed in (False, True):
        args = made(skewed)
        loss, (of_params, of_x) = everywhere(args)
        want, (params, x) = jax.value_and_grad(lambda a: loss_of(STYLES[name], *a))(args)
        np.testing.assert_allclose(loss, np.full(parts, want), rtol=2e-6)
        for leaf, ct in params.items():  # copies have summands as cotangents
            error = np.abs(of_params[leaf].sum(0) - ct).max() / max(np.abs(ct).max(), 1e-6)
            assert error < 5e-6, leaf
        np.testing.assert_allclose(of_x, np.broadcast_to(x, of_x.shape), atol=5e-7)
    assert ragged_dots(plan, parts)
    assert all(ran.way.is_split for ran in ragged_dots(plan, parts))


def test_banks_are_in_parts_and_tokens_are_reduced_and_not_pairs():
    """A device has the matrices of its experts. Tokens are gathered once for all products, and
    what the experts found is scattered in their number."""
    plan = planned("back_by_gather", "expert", 4)
    held = dict(zip(SHAPES, plan.inputs, strict=False))
    assert {k for k, (h,) in held.items() if h.kind is Kind.PART} == {"down", "gate", "up"}
    assert all(held[k][0].dim == 0 for k in ("down", "gate", "up"))
    moved = [c for c in conversions_of(plan, 4) if WIDTH in c.shape and (c.forward or c.backward)]
    assert [c.shape for c in moved if c.forward == "reduce-scatter"] == [(40, WIDTH)]
    assert all(c.shape[0] == 40 for c in moved)
    between = [c for c in conversions_of(plan, 4) if HIDDEN in c.shape]
    assert not any(c.forward or c.backward for c in between)


def test_context_splits_sorted_rows_in_equal_parts():
    plan = planned("back_by_gather", "context", 5)
    (rows, *_), *_ = [ran.way.needs[0] for ran in ragged_dots(plan, 5)]
    assert (rows.kind, rows.dim) == (Kind.PART, 0)
    assert all(h is COPIES for (h,) in plan.inputs[:-1])


def test_a_window_holds_the_rows_of_a_device_and_gives_them_back():
    sizes, x = np.array([3, 0, 0, 0, 2, 1], np.int32), np.arange(14.0).reshape(7, 2)
    held = ragged(0, None)

    def run(_):
        window = RowWindow.of(jnp.asarray(sizes), SplitAxis(parts=3, name="axis"))
        own = window.taken(jnp.asarray(x), held)
        return own, window.put_back(own, held)

    own, back = jax.vmap(run, axis_name="axis")(jnp.arange(3))
    np.testing.assert_array_equal(own[0][:3], x[:3])
    np.testing.assert_array_equal(own[1], np.zeros((7, 2)))  # empty groups
    np.testing.assert_array_equal(own[2][:4], x[3:])  # with the row that is in no group
    np.testing.assert_array_equal(back.sum(0), x)


def test_the_proof_finds_a_way_that_takes_rows_of_other_groups(monkeypatch):
    plan = planned("back_by_gather", "expert", 4)
    assert not any(PlanProof().check(plan, 4)[Verdict.WRONG])
    right = RowWindow.of.__func__ if hasattr(RowWindow.of, "__func__") else RowWindow.of

    def shifted(sizes, axis):
        window = right(sizes, axis)
        return RowWindow(start=window.start + 1, num=window.num)

    monkeypatch.setattr(RowWindow, "of", staticmethod(shifted))
    wrong = PlanProof().check(plan, 4)[Verdict.WRONG]
    assert {trial.eq.name for trial in wrong} >= {"ragged_dot_general"}
