"""The plans that a search finds: known ones of known models, and the cheapest of small programs."""

import functools
import itertools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tools.quick import quick_compilation, thinned  # noqa: F401

from zeroxla.frontend import adapt
from zeroxla.models import GPT, Llama
from zeroxla.program import compat
from zeroxla.program.trace import Value, bytes_of, trace
from zeroxla.split import search
from zeroxla.split.atoms import atoms_in, dims_of
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.axis_roles import AxisRole
from zeroxla.split.conversions import conversions_of
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.holdings import COPIES, SUMMANDS, WHOLE, Kind, cheapest, convert, num_moves
from zeroxla.split.prices import can_be_given
from zeroxla.split.run_plan import PlanRunner
from zeroxla.split.search import AxisSearch
from zeroxla.split.split_axis import SplitAxis
from zeroxla.split.ways import ways_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

PARTS, LAYERS = 4, 2
ROWS, LENGTH = 512, 256  # An activation is so large that bytes cost more than latency.
WIDTHS = {"gpt": 32, "llama": 64}
BYTES = AxisCosts(latency=0.0)


def model(name, **options):
    if name == "gpt":
        return GPT.tiny(layers=LAYERS, length=LENGTH, width=WIDTHS[name], **options)
    return Llama.tiny(layers=LAYERS, width=WIDTHS[name], heads=8, kv_heads=4, **options)


@functools.cache
def traced(name, scan=True, **options):
    """Return the flow through a model's loss, its number of leaves, and the classes of its rows."""
    adapted = adapt(model(name, scan=scan, **options))
    batch = {"tokens": jax.ShapeDtypeStruct((ROWS, LENGTH + 1), jnp.int32)}
    key = jax.random.key(0)
    params, state = jax.eval_shape(adapted.init, key, batch)
    program, _ = trace(lambda *args: adapted.loss(*args, train=True)[0], params, state, batch, key)
    num_leaves = len(jax.tree.leaves(params))
    leaves = [dims_of(v.aval.shape) for v in program.inputs[:num_leaves]]
    flow = DimsFlow.of(program, leaves, compat.inlined_jaxpr)
    tokens = program.inputs[num_leaves + len(jax.tree.leaves(state))]
    return flow, num_leaves, frozenset(atoms_in(flow.dims[tokens][0]))


def searcher(role, rows=(), costs=None):
    role = AxisRole(name=role, rows=frozenset(rows))
    return AxisSearch(parts=PARTS, role=role, costs=costs or AxisCosts())


def plan_of(role, name, scan=True, costs=None):
    flow, num_leaves, rows = traced(name, scan)
    return searcher(role, rows, costs).plan(flow, num_leaves)


def travels(plan):
    """Return the conversions of a plan for which something travels."""
    return [c for c in conversions_of(plan, PARTS) if c.forward or c.backward]


def total(found, plan, num_leaves):
    """Return what a plan costs, its leaves included."""
    pairs = zip(plan.program.inputs[:num_leaves], plan.inputs, strict=False)
    return plan.cost + sum(
        found.role.leaf_price(found.costs, bytes_of(v), h, PARTS) for v, (h,) in pairs
    )


# models


@pytest.mark.parametrize("name", WIDTHS)
def test_along_tensor_a_block_gathers_twice_and_reduces_twice(name):
    """As Megatron's blocks with sequence parallelism do. Backward does the same, the other way."""
    blocks = [c for c in travels(plan_of("tensor", name)) if c.times == LAYERS]
    assert {c.shape for c in blocks} == {(ROWS, LENGTH, WIDTHS[name])}
    assert [(c.forward, c.backward) for c in blocks] == [
        ("all-gather", "reduce-scatter"),
        ("reduce-scatter", "all-gather"),
    ] * 2
    assert [(c.have.kind, c.want.kind) for c in blocks] == [
        (Kind.PART, Kind.COPIES),
        (Kind.SUMMANDS, Kind.PART),
    ] * 2
    assert {h.dim for c in blocks for h in (c.have, c.want)} == {1, None}


@pytest.mark.parametrize("name", WIDTHS)
def test_along_context_a_block_brings_queries_keys_and_values_to_heads_and_the_sum_back(name):
    blocks = [c for c in travels(plan_of("context", name)) if c.times == LAYERS]
    assert {(c.forward, c.backward) for c in blocks} == {("all-to-all", "all-to-all")}
    assert len(blocks) == {"gpt": 2, "llama": 4}[name]  # GPT's projection is fused.
    assert [(c.have.dim, c.want.dim) for c in blocks] == [(1, 2)] * (len(blocks) - 1) + [(2, 1)]


@pytest.mark.parametrize("name", WIDTHS)
def test_along_context_the_gradient_of_a_head_read_in_chunks_is_summed_once(name):
    """Two chunks cannot be dealt to four devices. Their turns add up a sum of summands, which ZeRO
    reduces."""
    flow, num_leaves, rows = traced(name, loss_chunk=LENGTH // 2)
    plan = searcher("context", rows).plan(flow, num_leaves)
    head = {v.aval.shape for v in flow.program.inputs[:num_leaves] if 64 in v.aval.shape}
    assert not head & {c.shape for c in travels(plan)}


@pytest.mark.parametrize("name", WIDTHS)
def test_along_context_the_fewest_bytes_are_those_of_queries_keys_values_and_their_sum(name):
    blocks = [c for c in travels(plan_of("context", name, costs=BYTES)) if c.times == LAYERS]
    width = WIDTHS[name]
    key_widths = {"gpt": width, "llama": width // 2}[name]
    elements = ROWS * LENGTH * (2 * width + 2 * key_widths)
    for received in zip(*(c.received(PARTS) for c in blocks), strict=True):
        assert sum(received) == LAYERS * 4 * elements * (PARTS - 1) / PARTS**2


ROLES = thinned(
    [("gpt", "tensor"), ("gpt", "context")],
    slow=[("llama", "tensor"), ("llama", "context")],
    rows=True,
)


@pytest.mark.parametrize(("name", "role"), ROLES)
def test_blocks_that_are_written_out_are_split_as_in_a_loop(role, name):
    moved, costs = [], []
    for scan in (True, False):
        plan, moves = plan_of(role, name, scan), Counter()
        for c in travels(plan):
            moves[c.forward, math.prod(c.shape)] += c.times
        moved.append(moves)
        costs.append(plan.cost)
    assert costs[0] == pytest.approx(costs[1], rel=1e-3)
    assert moved[0] == moved[1]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["tensor", "context"])
@pytest.mark.parametrize("name", WIDTHS)
def test_more_states_give_no_dearer_plan(role, name, monkeypatch):
    flow, num_leaves, rows = traced(name, scan=False)
    costs = []
    for width in (8, search.WIDTH, 4 * search.WIDTH):
        monkeypatch.setattr(search, "WIDTH", width)
        found = searcher(role, rows)
        costs.append(total(found, found.plan(flow, num_leaves), num_leaves))
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == pytest.approx(costs[-2])


@pytest.mark.parametrize(("name", "role"), ROLES)
def test_states_that_are_left_out_are_not_missed(role, name, monkeypatch):
    flow, num_leaves, rows = traced(name, scan=False)
    found = searcher(role, rows)
    cost = total(found, found.plan(flow, num_leaves), num_leaves)
    monkeypatch.setattr(search, "LEADERS", 0)
    other = total(found, found.plan(flow, num_leaves), num_leaves)
    assert cost == pytest.approx(other, rel=0.01)


@pytest.mark.parametrize("scan", thinned([True], slow=[False]))
def test_a_search_finds_the_same_plan_again(scan):
    found = []
    for _ in range(2):
        traced.cache_clear()
        plan = plan_of("tensor", "llama", scan)
        holdings = [str(h) for h in (*plan.inputs, *plan.outputs)]
        moves = [(c.shape, str(c.have), str(c.want), c.where) for c in travels(plan)]
        found.append((plan.cost, holdings, moves))
    assert found[0] == found[1]


# small programs


def perceptron(w, v, x):
    return (jnp.tanh(x @ w) @ v).sum()


def residual(w, x):
    y = jnp.sin(x)
    return (y + y @ w).sum()


def normed(w, x):
    return ((x / x.sum(1, keepdims=True)) @ w).max()


def attention(w, x):
    queries = x @ w
    return (jnp.exp(queries @ x.T) @ x).sum()


def tied(table, i):
    return (table[i] @ table.T).sum()


def twice(w, x):
    return jnp.exp(jnp.tanh(x @ w) @ w.T).sum()


def both_sides(w, x, y):
    return (x @ w).sum() + jnp.einsum("lf,df->ld", y, w).sum()


def transposed(w, x, y):
    return (x @ w).sum() + (y @ w.T).sum()


def with_constant(w, x):
    return ((x @ w) @ np.ones((16, 8), np.float32)).sum()


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PROGRAMS = {  # function, leaves, other arguments
    "perceptron": (perceptron, [f32(8, 32), f32(32, 8)], [f32(16, 8)]),
    "residual": (residual, [f32(16, 16)], [f32(8, 16)]),
    "normed": (normed, [f32(16, 32)], [f32(8, 16)]),
    "attention": (attention, [f32(8, 8)], [f32(16, 8)]),
    "a table that is read twice": (
        tied,
        [f32(32, 8)],
        [jax.ShapeDtypeStruct((16,), jnp.int32)],
    ),
    "a matrix that is read twice": (twice, [f32(8, 16)], [f32(64, 8)]),
    "a matrix from both sides": (both_sides, [f32(8, 16)], [f32(16, 8), f32(16, 16)]),
    "a matrix and its transpose": (transposed, [f32(8, 16)], [f32(16, 8), f32(16, 16)]),
    "a product with a constant": (with_constant, [f32(8, 16)], [f32(4, 8)]),
}
COSTS = {
    "as they are": AxisCosts(),
    "bytes only": BYTES,
    "slow links": AxisCosts(link=1e-9, latency=1e-9),
    "slow memory": AxisCosts(latency=1e-9, memory=1e-10, leaf=1e-11),
    "dear leaves": AxisCosts(link=1e-9, latency=1e-12, leaf=4e-9),
}


QUICK = ("as they are", "dear leaves")
"""The costs of the quick tests; the slow ones take the others."""


def priced_ways(found, flow, eq):
    """Return the ways that an equation may take, each with what its work costs."""
    work = found.costs.work(eq)
    ways = found.role.allowed(eq, ways_of(eq, flow, PARTS), flow)
    return [(way, work / (PARTS if way.is_split else 1)) for way in ways]


def cost_of(found, flow, num_leaves, ways):
    """Return what a choice of ways costs; infinity if it cannot be.

    An operand is converted where it is first needed so; a leaf that is needed in several holdings
    is gathered whole, and its parts are made of that.
    """
    inputs = flow.program.inputs
    leaves = dict.fromkeys(inputs[:num_leaves])
    held = {v: set() if v in leaves else {WHOLE} for v in inputs}
    cost = 0.0

    def need(operand, want):
        nonlocal cost
        if not isinstance(operand, Value):
            return want is not SUMMANDS
        have = held[operand]
        if operand in leaves:
            have.add(want if can_be_given(flow, operand, want) else COPIES)
        elif want not in have:
            if want is SUMMANDS:
                return False
            if not (flow.made_of_leaves(operand) and COPIES in have):
                has_gradient = flow.has_gradient(operand)
                share, first = cheapest(have, want, PARTS, has_gradient=has_gradient)
                moves = num_moves(first, want, has_gradient=has_gradient)
                cost += found.costs.link * share * bytes_of(operand) + found.costs.latency * moves
            have.add(want)
        return want is not SUMMANDS or operand not in leaves

    for eq, (way, work) in zip(flow.program.equations, ways, strict=True):
        if not all(need(x, want) for x, (want,) in zip(eq.inputs, way.needs, strict=True)):
            return math.inf
        held.update((v, {h}) for v, h in zip(eq.outputs, way.gives, strict=True))
        cost += work
    for operand in flow.program.outputs:
        need(operand, WHOLE)
    for leaf in leaves:
        (given,) = held[leaf] if len(held[leaf]) == 1 else (COPIES,)
        cost += found.role.leaf_price(found.costs, bytes_of(leaf), given, PARTS)
    return cost


def flow_of(name):
    """Return the flow through a small program, and its number of leaves."""
    function, leaves, others = PROGRAMS[name]
    program, _ = trace(function, *leaves, *others)
    return DimsFlow.of(program, [dims_of(x.shape) for x in leaves], compat.inlined_jaxpr), len(
        leaves
    )


@pytest.mark.parametrize("role", ["tensor", "context"])
@pytest.mark.parametrize(
    "costs", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in COSTS]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_choice_of_ways_is_cheaper(name, costs, role):
    assert total_of(name, costs, role) == pytest.approx(least_of(name, costs, role))


def total_of(name, costs, role):
    """Return what the plan of a small program costs."""
    flow, num_leaves = flow_of(name)
    found = searcher(role, costs=COSTS[costs])
    return total(found, found.plan(flow, num_leaves), num_leaves)


@functools.cache
def least_of(name, costs, role):
    """Return what the cheapest choice of ways costs."""
    flow, num_leaves = flow_of(name)
    found = searcher(role, costs=COSTS[costs])
    options = [priced_ways(found, flow, eq) for eq in flow.program.equations]
    return min(cost_of(found, flow, num_leaves, ways) for ways in itertools.product(*options))


@pytest.mark.parametrize(
    ("name", "role"),
    thinned(
        [
            *((name, "tensor") for name in ("perceptron", "normed", "a table that is read twice")),
            *(("a matrix and its transpose", "tensor"), ("attention", "context")),
        ],
        slow=[
            *(
                (name, "tensor")
                for name in ("residual", "attention", "a matrix that is read twice")
            ),
            *(("a matrix from both sides", "tensor"), ("a product with a constant", "tensor")),
        ],
        rows=True,
    ),
)
def test_a_plan_computes_what_the_program_does(name, role):
    flow, num_leaves = flow_of(name)
    plan = searcher(role, costs=BYTES).plan(flow, num_leaves)
    runner, draw = PlanRunner(plan, SplitAxis(parts=PARTS, name=role)), np.random.default_rng(0)
    arrays = [
        draw.uniform(0.1, 0.5, v.aval.shape).astype(np.float32)
        if v.is_float
        else draw.integers(0, 8, v.aval.shape)
        for v in flow.program.inputs
    ]
    leaves, others = arrays[:num_leaves], arrays[num_leaves:]

    def whole(leaves):
        return flow.program(*leaves, *others)[0]

    def in_parts(leaves):
        given = [{WHOLE: jnp.asarray(x)} for x in others]
        held = [
            {h: convert(x, flow.dims[v], COPIES, h, runner.axis)}
            for x, v, (h,) in zip(leaves, flow.program.inputs, plan.inputs, strict=False)
        ]
        return runner([*held, *given])[0]

    def on_a_device(leaves):
        value, grads = jax.value_and_grad(in_parts)(leaves)
        return jax.tree.map(lambda x: x[None], (value, [jax.lax.psum(x, role) for x in grads]))

    mesh = Mesh(np.array(jax.devices()[:PARTS]), (role,))
    mapped = jax.shard_map(on_a_device, mesh=mesh, in_specs=P(), out_specs=P(role), check_vma=False)
    found = jax.jit(mapped)(leaves)
    for one, other in zip(
        jax.tree.leaves(jax.value_and_grad(whole)(leaves)), jax.tree.leaves(found), strict=True
    ):
        np.testing.assert_allclose(other, np.broadcast_to(one, other.shape), rtol=1e-5, atol=1e-5)
