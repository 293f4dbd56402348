"""Every way that is listed for an equation computes what the equation does, derivative included.

CASES has functions of arrays. A function's equations are taken one by one, each with each of its
ways: the operands are converted from whole arrays, the results back to whole ones.

A way is written as "needs -> gives": `w` for whole, `c` for copies, `s` for summands, a number for
the dim of a part. 1.0 is the first factor of dim 1, if it has several.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from tools.quick import quick_compilation, thinned  # noqa: F401

from zeroxla.program import compat
from zeroxla.program.trace import Constant, Program, run, trace
from zeroxla.split.atoms import atoms_in, dims_of
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.axis_roles import AxisRole
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.halo import halo_ways
from zeroxla.split.holdings import SUMMANDS, WHOLE, Kind
from zeroxla.split.inner_ways import loop_ways, remat_ways, rule_ways
from zeroxla.split.run_plan import PlanRunner
from zeroxla.split.search import AxisSearch
from zeroxla.split.split_axis import SplitAxis
from zeroxla.split.ways import AxisPlan, ways_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

SEARCHED = {
    "scan": loop_ways,
    "remat2": remat_ways,
    "custom_jvp_call": rule_ways,
    "custom_vjp_call": rule_ways,
}
"""Equations whose bodies are searched."""


def floats(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def indices(below, *shape):
    return np.random.default_rng(sum(shape)).integers(0, below, shape).astype(np.int32)


@jax.custom_vjp
def scaled(x, scale):
    return x * scale


def _scaled_backward(kept, ct):
    x, scale = kept
    return ct * scale, jnp.sum(ct * x, axis=0)


scaled.defvjp(lambda x, scale: (x * scale, (x, scale)), _scaled_backward)


def looped(x, ws):
    """A loop over layers, which carries an array."""
    return lax.scan(lambda x, w: (jnp.tanh(x * w), x.sum(0)), x, ws)


def added_up(xs):
    """A loop whose turns only add to what is carried."""
    return lax.scan(lambda total, x: (total + x * x, x + 1), jnp.zeros(xs.shape[1:]), xs)


def branched(x, i):
    return lax.cond(i > 0, jnp.tanh, lambda x: x * 2, x)


def repeated(x):
    test, body = lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2)
    return lax.while_loop(test, body, (0, x))[1]


def layers(x, ws):
    """A loop over layers that are computed again in backward."""
    return lax.scan(jax.checkpoint(lambda x, w: (jax.nn.relu(x @ w), None)), x, ws)[0]


def shared_heads(x):
    """A fused projection of queries, of which two share a head of keys and values."""
    queries, keys, values = jnp.split(x, [32, 48], axis=1)
    queries = queries.reshape(4, 4, 2, 4)
    keys, values = (y.reshape(4, 4, 4) for y in (keys, values))
    scores = jnp.einsum("bkgh,bkh->bkg", queries, keys)
    return queries + jnp.einsum("bkg,bkh->bkgh", scores, values)


def convolved(x, w):
    return lax.conv_general_dilated(x, w, (1,), [(2, 0)], dimension_numbers=SEQUENCE)


SEQUENCE = ("NHC", "HIO", "NHC")
X, Y = floats(4, 8), floats(8, 4).T
SAME_PLACES = ["w w -> w", "0 0 -> 0", "1 1 -> 1"]

CASES = {  # function, arrays, ways of some of its equations
    "add, with broadcasting": (
        lambda x, b: x + b,
        [X, floats(8)],
        {
            "broadcast_in_dim": ["w -> w", "0 -> 1", "s -> s"],
            "add": ["w w -> w", "0 c -> 0", "1 1 -> 1", "s s -> s"],
        },
    ),
    "subtract": (lambda x, y: x - y, [X, Y], {"sub": [*SAME_PLACES, "s s -> s"]}),
    "multiply": (lambda x, y: x * y, [X, Y], {"mul": [*SAME_PLACES, "s c -> s", "c s -> s"]}),
    "an array by itself": (lambda x: x * x, [X], {"mul": [*SAME_PLACES, "s c -> s", "c s -> s"]}),
    "divide": (lambda x, y: x / y, [X, Y], {"div": [*SAME_PLACES, "s c -> s"]}),
    "add a number": (
        lambda x: x + 1.0,
        [X],
        {"add": ["w w -> w", "0 c -> 0", "1 c -> 1", "s s -> s"]},
    ),
    "choose": (
        lambda x, y, flags: jnp.where(flags > 0, x, y),
        [X, Y, indices(2, 4, 8)],
        {"select_n": ["w w w -> w", "0 0 0 -> 0", "1 1 1 -> 1"]},
    ),
    "product": (
        lambda x, w: x @ w,
        [X, floats(8, 12)],
        {"dot_general": ["w w -> w", "0 c -> 0", "1 0 -> s", "c 1 -> 1"]},
    ),
    "product, head by head": (
        lambda q, k: jnp.einsum("blnh,bmnh->bnlm", q, k),
        [floats(4, 8, 4, 4), floats(4, 12, 4, 4)],
        {"dot_general": ["w w -> w", "0 0 -> 0", "1 c -> 2", "2 2 -> 1", "3 3 -> s", "c 1 -> 3"]},
    ),
    "scores of a sequence with itself": (
        lambda x: jnp.einsum("blh,bmh->blm", x, x),
        [floats(4, 8, 12)],
        {"dot_general": ["w w -> w", "0 0 -> 0", "1 c -> 1", "2 2 -> s", "c 1 -> 2"]},
    ),
    "convolution": (
        convolved,
        [floats(4, 8, 4), floats(3, 4, 12)],
        {"conv_general_dilated": ["w w -> w", "0 c -> 0", "2 1 -> s", "c 2 -> 2", "1 c -> 1"]},
    ),
    "convolution of what came before": (  # a window begins two places before its result
        lambda x, w: lax.conv_general_dilated(x, w, (1,), [(2, -1)], dimension_numbers=SEQUENCE),
        [floats(4, 8, 4), floats(2, 4, 12)],
        {"conv_general_dilated": ["w w -> w", "0 c -> 0", "2 1 -> s", "c 2 -> 2"]},
    ),
    "convolution of an image, in steps": (
        lambda x, w: lax.conv_general_dilated(
            x, w, (2, 1), "SAME", rhs_dilation=(1, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        [floats(4, 16, 12, 3), floats(3, 3, 3, 5)],
        {"conv_general_dilated": ["w w -> w", "0 c -> 0", "1 c -> 1", "2 c -> 2"]},
    ),
    "patches": (
        lambda x, w: lax.conv_general_dilated(x, w, (2,), "VALID", dimension_numbers=SEQUENCE),
        [floats(4, 16, 3), floats(2, 3, 5)],
        {"conv_general_dilated": ["w w -> w", "0 c -> 0", "1 c -> 1"]},
    ),
    "largest in windows": (
        lambda x: nn.max_pool(x, (3,), (2,), "SAME"),
        [floats(4, 16, 8)],
        {"reduce_window_max": ["w -> w", "0 -> 0", "2 -> 2", "1 -> 1"]},
    ),
    "sum of windows": (
        lambda x: nn.avg_pool(x, (3,), (1,), "SAME"),
        [floats(4, 16, 8)],
        {"reduce_window_sum": ["w -> w", "0 -> 0", "2 -> 2", "1 -> 1"]},
    ),
    "largest": (lambda x: x.max(1), [X], {"reduce_max": ["w -> w", "0 -> 0", "1 -> w"]}),
    "place of the largest": (lambda x: x.argmax(1), [X], {"argmax": ["w -> w", "0 -> 0"]}),
    "sum": (lambda x: x.sum(1), [X], {"reduce_sum": ["w -> w", "0 -> 0", "1 -> s", "s -> s"]}),
    "top k": (lambda x: lax.top_k(x, 2)[0], [X], {"top_k": ["w -> w w", "0 -> 0 0"]}),
    "running sum": (lambda x: jnp.cumsum(x, 1), [X], {"cumsum": ["w -> w", "0 -> 0", "1 -> 1"]}),
    "running maximum, backwards": (
        lambda x: lax.cummax(x, 1, reverse=True),
        [X],
        {"cummax": ["w -> w", "0 -> 0", "1 -> 1"]},
    ),
    "running logarithm of sums": (
        lambda x: lax.cumlogsumexp(x, 0),
        [X],
        {"cumlogsumexp": ["w -> w", "0 -> 0", "1 -> 1"]},
    ),
    "running product of integers": (
        lambda x: lax.cumprod(x, 0),
        [indices(3, 4, 8)],
        {"cumprod": ["w -> w", "0 -> 0", "1 -> 1"]},
    ),
    "sort": (lambda x: jnp.sort(x, axis=0), [X], {"sort": ["w -> w", "1 -> 1"]}),
    "softmax": (
        lambda x: jax.nn.softmax(x, axis=1),
        [X],
        {
            "reduce_max": ["w -> w", "0 -> 0", "1 -> w"],
            "sub": ["w w -> w", "0 0 -> 0", "1 c -> 1", "s s -> s"],
            "exp": ["w -> w", "0 -> 0", "1 -> 1"],
            "reduce_sum": ["w -> w", "0 -> 0", "1 -> s", "s -> s"],
            "div": ["w w -> w", "0 0 -> 0", "1 c -> 1", "s c -> s"],
        },
    ),
    "reshape that splits": (
        lambda x: x.reshape(4, 3, 4, 8),
        [floats(4, 96)],
        {"reshape": ["w -> w", "0 -> 0", "1.1 -> 2", "1.2 -> 3", "s -> s"]},
    ),
    "reshape that merges": (
        lambda x: x.reshape(4, 96),
        [floats(4, 3, 4, 8)],
        {"reshape": ["w -> w", "0 -> 0", "2 -> 1.1", "3 -> 1.2", "s -> s"]},
    ),
    "transpose": (
        lambda x: x.transpose(2, 0, 1),
        [floats(4, 8, 12)],
        {"transpose": ["w -> w", "0 -> 1", "1 -> 2", "2 -> 0", "s -> s"]},
    ),
    "lookup in a table": (
        lambda t, i: t[i],
        [floats(8, 4), indices(8, 4, 12)],
        {"gather": ["w w -> w", "0 c -> s", "1 c -> 2", "c 0 -> 0", "c 1 -> 1"]},
    ),
    "lookup outside of a table": (
        lambda t, i: jnp.take(t, i, axis=0, mode="fill", fill_value=7.0),
        [floats(8, 4), indices(12, 4, 12)],
        {"gather": ["w w -> w", "0 c -> s", "1 c -> 2", "c 0 -> 0", "c 1 -> 1"]},
    ),
    "lookup of tokens by number": (  # rows and positions are one dim, of which either is split
        lambda x, i: x.reshape(32, 4)[i],
        [floats(4, 8, 4), indices(32, 12)],
        {"gather": ["w w -> w", "0.0 c -> s", "0.1 c -> s", "1 c -> 1", "c 0 -> 0"]},
    ),
    "lookup of tokens outside": (
        lambda x, i: jnp.take(x.reshape(32, 4), i, axis=0, mode="fill", fill_value=7.0),
        [floats(4, 8, 4), indices(80, 12) - 40],
        {"gather": ["w w -> w", "0.0 c -> s", "0.1 c -> s", "1 c -> 1", "c 0 -> 0"]},
    ),
    "lookup of tokens, clipped": (
        lambda x, i: jnp.take(x.reshape(32, 4), i, axis=0, mode="clip"),
        [floats(4, 8, 4), indices(80, 12) - 40],
        {"gather": ["w w -> w", "0.0 c -> s", "0.1 c -> s", "1 c -> 1", "c 0 -> 0"]},
    ),
    "lookup, table by table": (  # with batching dims
        jax.vmap(lambda x, i: x.reshape(32, 4).at[i].get(mode="fill", fill_value=0.0)),
        [floats(4, 4, 8, 4), indices(40, 4, 12)],
        {"gather": [*("w w -> w", "0 0 -> 0", "1.0 c -> s", "1.1 c -> s", "2 c -> 2", "c 1 -> 1")]},
    ),
    "rows of groups": (
        lax.ragged_dot,
        [floats(12, 4), floats(8, 4, 8), np.array([3, 0, 1, 0, 4, 2, 0, 1], np.int32)],
        {"ragged_dot_general": ["w w w -> w", "0 c c -> 0", "1 1 c -> s", "c 2 c -> 1"]},
    ),
    "take along": (
        lambda x, i: jnp.take_along_axis(x, i[..., None], axis=-1)[..., 0],
        [floats(4, 8, 12), indices(12, 4, 8)],
        {
            "gather": ["w w -> w", "0 0 -> 0", "1 1 -> 1", "2 c -> s"],
            "squeeze": ["w -> w", "0 -> 0", "1 -> 1", "s -> s"],
        },
    ),
    "windows of a table": (
        jax.vmap(lambda t, i: lax.dynamic_slice(t, (i, 0), (2, 4)), in_axes=(None, 0)),
        [floats(8, 4), indices(6, 12)],
        {"gather": ["w w -> w", "1 c -> 2", "c 0 -> 0"]},
    ),
    "concatenate": (
        lambda x, y: jnp.concatenate([x, y], 1),
        [X, floats(4, 4)],
        {"concatenate": ["w w -> w", "0 0 -> 0"]},
    ),
    "turned halves": (
        lambda x: x * 3 + jnp.concatenate([-x[:, 4:], x[:, :4]], 1),
        [X],
        {"slice": ["w -> w", "0 -> 0", "1 -> 1"]},
    ),
    "split, fused": (
        lambda x: jnp.split(x.reshape(4, 96), 3, axis=1),
        [floats(4, 3, 4, 8)],
        {"split": ["w -> w w w", "0 -> 0 0 0", "1.1 -> 1.0 1.0 1.0", "1.2 -> 1.1 1.1 1.1"]},
    ),
    "split, fused, heads shared": (
        shared_heads,
        [floats(4, 64)],
        {"split": ["w -> w w w", "0 -> 0 0 0", "1.0 -> 1.0 1.0 1.0", "1.2 -> 1.2 1.1 1.1"]},
    ),
    "split, of several classes": (
        lambda x: [jnp.tanh(y) for y in jnp.split(x, [16, 24], axis=1)],
        [floats(4, 32)],
        {"split": ["w -> w w w", "0 -> 0 0 0"], "tanh": ["w -> w", "0 -> 0", "1 -> 1"]},
    ),
    "padding": (lambda x: jnp.pad(x, [(0, 0), (1, 2)]), [X], {"pad": ["w w -> w", "0 c -> 0"]}),
    "update a slice": (
        lambda x, y: lax.dynamic_update_slice(x, y, (2, 0)),
        [floats(5, 4), floats(1, 4)],
        {"dynamic_update_slice": ["w w w w -> w", "1 1 c c -> 1"]},
    ),
    "relu": (jax.nn.relu, [X], {"custom_jvp_call": ["w -> w", "0 -> 0", "1 -> 1"]}),
    "a derivative of its own": (
        scaled,
        [X, floats(8)],
        {"custom_vjp_call": ["w w -> w", "0 c -> 0", "1 0 -> 1"]},
    ),
    "checkpoint": (jax.checkpoint(lambda x, w: jnp.tanh(x @ w)), [X, floats(8, 12)], {}),
    "scan": (looped, [X, floats(3, 8)], {}),
    "scan, turns that are added up": (added_up, [X], {}),
    "scan of checkpoints": (layers, [X, floats(3, 8, 8)], {}),
    "cond": (branched, [X, np.int32(1)], {"cond": ["w w -> w", "c 0 -> 0", "c 1 -> 1"]}),
    "cond, with a derivative of its own": (
        lambda x, i: lax.cond(i > 0, jax.nn.relu, jnp.sin, x),
        [X, np.int32(1)],
        {"cond": ["w w -> w", "c 0 -> 0", "c 1 -> 1"]},
    ),
    "cond, with a checkpoint": (
        lambda x, i: lax.cond(i > 0, jax.checkpoint(jnp.tanh), jnp.sin, x),
        [X, np.int32(1)],
        {"cond": ["w w -> w", "c 0 -> 0", "c 1 -> 1"]},
    ),
    "while, of integers": (repeated, [indices(9, 4, 8)], {"while": ["w w -> w w"]}),
}


class Equations:
    """The equations of a function, with the arrays that they read and their ways."""

    def __init__(self, function, arrays, parts, num_leaves=0):
        self.program, _ = trace(function, *arrays)
        leaves = [dims_of(x.shape) for x in arrays[:num_leaves]]
        self.flow = DimsFlow.of(self.program, leaves, compat.inlined_jaxpr)
        self.env = dict(zip(self.program.inputs, map(jnp.asarray, arrays), strict=True))
        run(self.program.equations, self.env)
        self.parts = parts

    def ways(self, eq):
        """Return the ways of an equation, as a search takes them."""
        if eq.name not in SEARCHED:
            found = ways_of(eq, self.flow, self.parts)
            return [*found, *halo_ways(eq, self.flow, self.parts, AxisCosts())]
        role = AxisRole(name="tensor", rows=frozenset())
        search = AxisSearch(parts=self.parts, role=role, costs=AxisCosts())
        return SEARCHED[eq.name](search, self.flow, eq)

    def written(self, eq, way):
        """Return a way in words."""
        needs = [
            "".join(self._written(h, x) for h in each)
            for x, each in zip(eq.inputs, way.needs, strict=True)
        ]
        gives = [self._written(h, v) for v, h in zip(eq.outputs, way.gives, strict=True)]
        return f"{' '.join(needs)} -> {' '.join(gives)}"

    def _written(self, holding, operand):
        if holding.kind is not Kind.PART:
            return holding.kind.value[0]
        atoms = list(dict.fromkeys(atoms_in(self.flow.of_operand(operand)[holding.dim])))
        return f"{holding.dim}" + (f".{atoms.index(holding.atom)}" if len(atoms) > 1 else "")


def differentiated(call, args, cts):
    """Return a function's results and the cotangents of its floating operands."""
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in args]

    def of_floats(floats):
        rest = iter(floats)
        outs = call([next(rest) if f else x for f, x in zip(is_float, args, strict=True)])
        return [x for x in outs if jnp.issubdtype(x.dtype, jnp.floating)], outs

    floats = [x for f, x in zip(is_float, args, strict=True) if f]
    _, pullback, outs = jax.vjp(of_floats, floats, has_aux=True)
    return outs, pullback(cts)[0]


def in_parts(found, eq, way):
    """Return a function that runs an equation in a way, and the holdings of its arguments.

    An argument is whole, or summands where only these are needed. The results are whole.
    """
    values = tuple(dict.fromkeys(eq.values))
    needs = {v: set() for v in values}
    for x, each in zip(eq.inputs, way.needs, strict=True):
        needs.get(x, set()).update(each)
    given = [SUMMANDS if needs[v] == {SUMMANDS} else WHOLE for v in values]
    plan = AxisPlan(
        program=Program(values, (eq,), eq.outputs),
        flow=found.flow,
        steps=((eq, way),),
        inputs=tuple((h,) for h in given),
        outputs=(WHOLE,) * len(eq.outputs),
        cost=0.0,
    )
    runner = PlanRunner(plan, SplitAxis(parts=found.parts, name="axis"))
    return lambda args: runner([{h: x} for h, x in zip(given, args, strict=True)]), given


def check(found, eq, ways):
    """Compare each way of an equation with the equation."""
    values, parts = tuple(dict.fromkeys(eq.values)), found.parts
    args, draw = [found.env[v] for v in values], np.random.default_rng(7)
    cts = [draw.normal(size=v.aval.shape).astype(v.aval.dtype) for v in eq.outputs if v.is_float]

    def call(args):
        env = dict(zip(values, args, strict=True))
        inputs = [x.value if isinstance(x, Constant) else env[x] for x in eq.inputs]
        return list(compat.call_equation(eq.source, eq.name_stack, inputs))

    def held(x, holding):
        if holding is WHOLE:
            return np.broadcast_to(x, (parts, *x.shape))
        others = draw.normal(size=(parts, *x.shape)).astype(x.dtype)
        others[0] = x - others[1:].sum(0)
        return others

    calls, given = zip(*(in_parts(found, eq, way) for way in ways), strict=True)
    stacks = [[held(x, h) for x, h in zip(args, each, strict=True)] for each in given]

    def run_all(stacks):
        # JAX's vmap lacks some rules for what all devices share.
        own = [(ct + 0 * lax.axis_index("axis")).astype(ct.dtype) for ct in cts]
        return [differentiated(call, args, own) for call, args in zip(calls, stacks, strict=True)]

    each = jax.jit(jax.vmap(run_all, axis_name="axis", axis_size=parts))(stacks)
    want = jax.tree.leaves(differentiated(call, args, cts))
    for way, have in zip(ways, map(jax.tree.leaves, each), strict=True):
        words = f"{eq.name} as {found.written(eq, way)}"
        for one, other in zip(want, have, strict=True):
            assert other.dtype == one.dtype, words
            everywhere = np.broadcast_to(one, (parts, *one.shape))
            np.testing.assert_allclose(other, everywhere, rtol=2e-5, atol=2e-5, err_msg=words)


SLOW = (  # Other cases have the same rules, or other arguments of the same equations.
    *("subtract", "multiply", "divide", "product", "scores of a sequence with itself"),
    *("convolution of what came before", "patches", "sum of windows", "place of the largest"),
    *("running maximum, backwards", "running logarithm of sums", "lookup outside of a table"),
    *("windows of a table", "turned halves", "split, fused", "split, of several classes"),
    *("reshape that merges", "scan", "checkpoint", "cond", "cond, with a checkpoint", "largest"),
    *("add a number", "product, head by head", "scan of checkpoints", "take along"),
    "convolution of an image, in steps",
)


@pytest.mark.parametrize("name", thinned([x for x in CASES if x not in SLOW], slow=SLOW))
def test_each_way_computes_what_the_equation_does(name):
    function, arrays, expected = CASES[name]
    found, seen = Equations(function, arrays, 4), {}
    for eq in found.program.equations:
        if not expected or eq.name in expected:
            ways = found.ways(eq)
            seen.setdefault(eq.name, [found.written(eq, way) for way in ways])
            check(found, eq, ways)
    assert {name: seen[name] for name in expected} == expected


def test_what_is_made_of_leaves_is_copies():
    """A weight that is transposed, before it meets an activation."""
    found = Equations(lambda w, x: x @ w.T, [floats(12, 8), floats(4, 8)], 2, num_leaves=1)
    for eq in found.program.equations:
        check(found, eq, found.ways(eq))
    first, second = found.program.equations
    assert [found.written(first, way) for way in found.ways(first)] == [
        "c -> c",
        "0 -> 1",
        "1 -> 0",
        "s -> s",
    ]
    assert found.written(second, found.ways(second)[0]) == "w w -> w"


def test_a_dim_that_the_parts_do_not_divide_is_not_split():
    for parts, expected in ((2, ["w -> w", "0 -> 0", "1 -> 1"]), (4, ["w -> w", "0 -> 0"])):
        found = Equations(jnp.exp, [floats(4, 6)], parts)
        (eq,) = found.program.equations
        assert [found.written(eq, way) for way in found.ways(eq)] == expected


def test_a_way_says_which_classes_of_the_program_it_splits():
    """Both sides of the product are known by other names in the program."""
    found = Equations(lambda x, w: jnp.exp(x @ w), [floats(4, 8), floats(8, 12)], 2)
    product, _ = found.program.equations
    x, w = (found.flow.of_operand(operand) for operand in product.inputs)
    whole, rows, summed, columns = found.ways(product)
    assert (whole.classes, whole.is_split) == (frozenset(), False)
    assert rows.classes == set(atoms_in(x[0]))
    assert summed.classes == set(atoms_in(x[1])) == set(atoms_in(w[0]))
    assert columns.classes == set(atoms_in(w[1]))
    assert rows.is_split
