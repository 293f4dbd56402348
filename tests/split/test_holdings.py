"""Conversions between holdings: the array on each device, its cotangent, and the bytes sent.

A holding is a linear map from an array to what the devices hold. NumPy writes it down here: for
each device and each element that it holds, the place of the element in the array.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tools.quick import quick_compilation  # noqa: F401

from zeroxla.inspect import comms
from zeroxla.split.atoms import Atom, dim_in_pieces, dim_of
from zeroxla.split.holdings import (
    COPIES,
    SUMMANDS,
    WHOLE,
    Holding,
    Kind,
    can_convert,
    cheapest,
    conversion_share,
    convert,
    moved_share,
    num_moves,
    part,
)
from zeroxla.split.split_axis import SplitAxis

pytestmark = pytest.mark.usefixtures("quick_compilation")

n, x, y, h, z = (Atom(4) for _ in range(5))
PIECES = dim_in_pieces([(z, *dim_of(2)), (*dim_of(3), z)])


@dataclasses.dataclass(frozen=True)
class Known:
    """A holding as the code says it, and as NumPy does: (outer, split, inner) of each piece."""

    holding: Holding
    dim: int | None = None
    layout: tuple = ()


FULL = {"whole": Known(WHOLE), "copies": Known(COPIES), "summands": Known(SUMMANDS)}
SPLITS = {
    "rows": Known(part(0, n), 0, ((1, 4, 1),)),
    "outer": Known(part(1, x), 1, ((1, 4, 4),)),
    "inner": Known(part(1, y), 1, ((4, 4, 1),)),
    "heads": Known(part(2, h), 2, ((3, 4, 2),)),
    "pieces": Known(part(3, z), 3, ((1, 4, 2), (3, 4, 1))),
}
ONE_ARRAY = (((n,), (x, y), (*dim_of(3), h, *dim_of(2)), PIECES), FULL | SPLITS)
"""An array, a dim of which is one run, is a product, is a fused projection, is in pieces."""
QUERIES_AND_KEYS = (
    ((n,), (n,), (*dim_of(3), n)),
    {
        "first": Known(part(0, n), 0, ((1, 4, 1),)),
        "second": Known(part(1, n), 1, ((1, 4, 1),)),
        "third": Known(part(2, n), 2, ((3, 4, 1),)),
    },
)
"""An array that has one class three times; any of its dims can be split."""

ARRAYS = (ONE_ARRAY, QUERIES_AND_KEYS)
HAVES = [pytest.param(*array, name, id=name) for array in ARRAYS for name in array[1]]


def wants(known, name):
    """Return the holdings to which one can be converted, by name."""
    is_full = name in ("whole", "copies")
    return {b: k for b, k in known.items() if b != name and (b != "summands" or is_full)}


PAIRS = [
    pytest.param(dims, known[a], second, id=f"{a} to {b}")
    for dims, known in ARRAYS
    for a in known
    for b, second in wants(known, a).items()
]
QUICK = ("summands", "heads", "pieces", "third")
"""Quick are conversions of these, those to heads, and those between full arrays and rows."""


def is_quick(pair):
    first, second = pair.id.split(" to ")
    return {first, second} <= {*FULL, "rows"} or first in QUICK or second == "heads"


def slowly(case):
    """Return a case of a test as one of the slow tests."""
    return pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)


def shape_of(dims):
    return tuple(SplitAxis(parts=1).dim_size(dim) for dim in dims)


def places(dims, known, parts):
    """Return int[parts, ...]: for what each device holds its place in the array."""
    every = np.arange(np.prod(shape_of(dims))).reshape(shape_of(dims))
    if known.dim is None:
        return np.broadcast_to(every, (parts, *every.shape))
    taken, end = [[] for _ in range(parts)], 0
    for outer, split, inner in known.layout:
        size = outer * split * inner
        piece = np.arange(end, end + size).reshape(outer, parts, split // parts, inner)
        for i in range(parts):
            taken[i] += piece[:, i].ravel().tolist()
        end += size
    return np.stack([every.take(mine, known.dim) for mine in taken])


def held(array, dims, known, parts, holding=None):
    """Return what the devices hold of an array. `holding` takes the place of that of `known`."""
    stack = array.ravel()[places(dims, known, parts)]
    if (holding or known.holding) is not SUMMANDS:
        return stack
    others = np.random.default_rng(1).integers(-9, 9, stack.shape).astype(array.dtype)
    others[0] = array - others[1:].sum(0)
    return others


def read(stack, dims, known, parts, holding):
    """Return the array that devices hold; check that they hold the same where they must."""
    if holding is SUMMANDS:
        return np.sum(stack, axis=0)
    at = places(dims, known, parts)
    array = np.full(np.prod(shape_of(dims)), np.nan)
    array[at.ravel()] = np.ravel(stack)
    np.testing.assert_array_equal(array[at], stack)
    return array.reshape(shape_of(dims))


def random(shape, seed):
    return np.random.default_rng(seed).integers(-99, 99, shape).astype(np.float32)


@pytest.mark.parametrize("parts", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(("dims", "known", "name"), HAVES)
def test_a_conversion_keeps_the_array_and_its_transpose_the_cotangent(dims, known, name, parts):
    axis = SplitAxis(parts=parts, name="axis")
    array, cotangent = random(shape_of(dims), 2), random(shape_of(dims), 3)
    first, others = known[name], wants(known, name)
    given = held(array, dims, first, parts)
    cts = {b: held(cotangent, dims, k, parts, k.holding.dual) for b, k in others.items()}

    def run(x, cts):
        found = {}
        for b, second in others.items():
            change = functools.partial(
                convert, dims=dims, have=first.holding, want=second.holding, axis=axis
            )
            out, pullback = jax.vjp(change, x)
            found[b] = out, *pullback(cts[b])
        return found

    found = jax.jit(jax.vmap(run, axis_name="axis"))(given, cts)
    for b, second in others.items():
        (out, back), have, want = found[b], first.holding, second.holding
        np.testing.assert_array_equal(read(out, dims, second, parts, want), array, err_msg=b)
        back_again = read(back, dims, first, parts, have.dual)
        np.testing.assert_array_equal(back_again, cotangent, err_msg=b)
        # <convert(x), ct> = <x, transpose(ct)>; what all devices compute alike counts once.
        once = [stack[:1] if h is WHOLE else stack for h, stack in ((want, out), (have, given))]
        there, here = (np.vdot(a, c[: len(a)]) for a, c in zip(once, (cts[b], back), strict=True))
        assert there == here == np.vdot(array, cotangent), b


@pytest.mark.parametrize(
    ("dims", "known", "name"),
    [x if x.id in ("copies", "heads", "summands") else slowly(x) for x in HAVES],
)
def test_other_arrays_than_floating_ones_are_converted_without_a_derivative(dims, known, name):
    axis, first, others = SplitAxis(parts=2, name="axis"), known[name], wants(known, name)
    dtypes = [np.int32] if first.holding is SUMMANDS else [np.int32, bool]
    arrays = [(random(shape_of(dims), 4) > 0).astype(dtype) for dtype in dtypes]
    given = [held(array, dims, first, 2) for array in arrays]

    def run(xs):
        return {
            b: [convert(x, dims, first.holding, second.holding, axis) for x in xs]
            for b, second in others.items()
        }

    program = jax.jit(jax.vmap(run, axis_name="axis")).trace(given)
    assert "custom_vjp" not in str(program.jaxpr)
    found = program.lower().compile()(given)
    for b, second in others.items():
        for array, out in zip(arrays, found[b], strict=True):
            assert out.dtype == array.dtype
            again = read(out, dims, second, 2, second.holding)
            np.testing.assert_array_equal(again, array, err_msg=b)


@pytest.mark.parametrize(
    ("dims", "first", "second"), [x if is_quick(x) else slowly(x) for x in PAIRS]
)
def test_the_shares_of_a_conversion_are_the_bytes_that_travel(dims, first, second):
    parts, have, want = 4, first.holding, second.holding
    axis = SplitAxis(parts=parts, name="axis")
    mesh = Mesh(np.array(jax.devices()[:parts]), ("axis",))
    array = np.zeros(shape_of(dims), np.float32)
    given, cts = (held(array, dims, known, parts) for known in (first, second))

    def forward(x):
        return convert(x[0], dims, have, want, axis)[None]

    def backward(ct):
        x = jnp.zeros(given.shape, given.dtype)[:1]
        return jax.vjp(forward, x)[1](ct)[0]

    def traffic(function, stack):
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=P("axis"), out_specs=P("axis"), check_vma=False
        )
        report = comms(jax.jit(mapped).lower(stack).compile(), mesh)
        return report.total_bytes(), report.count() + report.count(kind="all-reduce")

    moved, back = traffic(forward, given), traffic(backward, cts)
    assert moved[0] == moved_share(have, want, parts) * array.nbytes
    share = conversion_share(have, want, parts, has_gradient=True)
    assert moved[0] + back[0] == share * array.nbytes
    assert conversion_share(have, want, parts, has_gradient=False) * array.nbytes == moved[0]
    # An all-reduce counts as two.
    assert moved[1] == num_moves(have, want, has_gradient=False)
    assert moved[1] + back[1] == num_moves(have, want, has_gradient=True)


def test_nothing_is_done_for_one_part_or_for_the_same_holding():
    dims, known = ONE_ARRAY
    array = jnp.zeros(shape_of(dims))
    for a, b in itertools.product(known.values(), known.values()):
        assert convert(array, dims, a.holding, b.holding, SplitAxis(parts=1)) is array
    for a in known.values():
        assert convert(array, dims, a.holding, a.holding, SplitAxis(parts=2, name="n")) is array


def test_parts_do_not_become_summands():
    dims, known = ONE_ARRAY
    for have, want in itertools.product(known.values(), known.values()):
        is_one = have.dim is None or want.holding is not SUMMANDS
        assert can_convert(have.holding, want.holding) == is_one
        if not is_one:
            axis = SplitAxis(parts=2, name="axis")
            with pytest.raises(AssertionError):
                convert(jnp.zeros(shape_of(dims)), dims, have.holding, want.holding, axis)


def test_a_dual_of_a_dual_is_the_holding_itself():
    duals = {WHOLE: WHOLE, COPIES: SUMMANDS, SUMMANDS: COPIES, part(1, x): part(1, x)}
    for one, other in duals.items():
        assert one.dual == other
        assert other.dual == one
    assert part(1, x).moved(1) == part(2, x)
    assert WHOLE.moved(1) is WHOLE


def test_the_cheapest_conversion_is_taken_backward_included():
    """Forward, copies of a whole array cost nothing; their cotangents are summed."""
    rows = part(0, n)
    assert cheapest([WHOLE, rows], COPIES, 4, has_gradient=False)[1] == WHOLE
    assert cheapest([WHOLE, rows], COPIES, 4, has_gradient=True) == (1.5, WHOLE)
    assert cheapest([SUMMANDS, rows], part(1, x), 4, has_gradient=True) == (2 * 3 / 16, rows)
    assert {kind.value for kind in Kind} == {"whole", "copies", "part", "summands", "ragged"}
