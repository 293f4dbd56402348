"""Dims in pieces: fused projections, concatenations, paddings; convolutions, branches and loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tools import fused_models, no_cache_models
from tools.hybrid import KEY, PROMPTS, train
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.split_parts import in_parts, model_of

import zeroxla
from zeroxla import HybridEngine
from zeroxla.split.atoms import (
    atoms_in,
    block,
    dim_in_pieces,
    dim_of,
    expand,
    pieces_of,
    repeated,
    shares,
    size_of,
    together,
)
from zeroxla.split.joins import MOST_PIECES, cut, join
from zeroxla.split.layout import layout_of, planned_dims
from zeroxla.split.split_axis import SplitAxis

pytestmark = pytest.mark.usefixtures("quick_compilation")


def sizes(dim):
    """Return the sizes of a dim's atoms, a tuple for one in pieces."""
    found = []
    for atom in expand(dim):
        pieces = pieces_of(atom)
        found.append(tuple(map(size_of, pieces)) if pieces else atom.size)
    return found


def test_a_cut_reaches_every_joined_dim():
    a, b = dim_of(10), dim_of(10)
    join(a, b, "")
    first, rest = cut(a, 4)
    assert sizes(b) == [(4, 6)]
    assert cut(b, 4) == (first, rest)
    cut(b, 7)
    assert sizes(a) == [(4, 3, 3)]
    block(rest, "why")
    assert [bool(atom.blocked) for atom in atoms_in(a)] == [False, True, True]


def test_dims_with_other_pieces_are_cut_alike():
    a, b = dim_of(10), dim_of(10)
    cut(a, 4)
    cut(b, 6)
    join(a, b, "")
    assert sizes(a) == sizes(b) == [(4, 2, 4)]
    assert list(atoms_in(a)) == list(atoms_in(b))
    c = dim_of(10)
    join(c, a, "")
    assert expand(c) == expand(a)


def test_equal_pieces_are_the_inner_part_of_a_product():
    whole, product = dim_of(12), (*dim_of(3), *dim_of(4))
    cut(whole, 4), cut(whole, 8)
    join(whole, product, "")
    (outer, inner) = expand(product)
    assert outer.blocked
    assert not inner.blocked
    assert set(atoms_in(whole)) == {inner}
    assert expand(cut(product, 8)[1]) == expand(product)[1:]
    other = (*dim_of(4), *dim_of(3))
    uneven = dim_of(12)
    cut(uneven, 5)
    join(other, uneven, "regrouped")
    assert all("regrouped" in x.blocked for dim in (other, uneven) for x in atoms_in(dim))


def test_a_dim_that_contains_a_part_of_itself_is_blocked_in_the_end():
    """x + shifted(x): each cut asks for another one."""
    dim = dim_of(1000)
    shifted = dim_in_pieces([dim_of(3), cut(dim, 997)[0]])
    join(dim, shifted, "shifted")
    assert len(list(atoms_in(dim))) <= MOST_PIECES + 1
    assert sum(bool(x.blocked) for x in atoms_in(dim)) >= len(list(atoms_in(dim))) - MOST_PIECES
    assert any("shifted" in x.blocked for x in atoms_in(dim))


def test_what_is_known_of_arrays_with_pieces():
    a, b, c = dim_of(4), dim_of(6), dim_of(5)
    dims = (dim_in_pieces([a, b]), c)
    assert together(dims) == [{*a, *c}, {*b, *c}]
    assert shares(dims) == {a[0]: 0.4, b[0]: 0.6, c[0]: 1.0}
    assert repeated(dims) == set()
    assert repeated((dim_in_pieces([a, b]), a)) == {a[0]}
    assert repeated((dim_in_pieces([a, a]),)) == set()
    assert repeated((dim_in_pieces([(*a, *a), b]),)) == {a[0]}


LAYOUTS = [
    ((1, 8, 2),),
    (5,),
    ((1, 4, 3), 5, (2, 4, 1)),
    ((1, 3, 2), (1, 5, 1), 2),
]


@pytest.mark.parametrize("pieces", thinned(LAYOUTS[1:3], slow=[LAYOUTS[0], LAYOUTS[3]]))
@pytest.mark.parametrize("parts", thinned([2], slow=[4]))
def test_parts_of_pieces(pieces, parts):
    """A part has its part of each piece; `collect` puts them together, `place` finds them."""
    size = sum(x if isinstance(x, int) else int(np.prod(x)) for x in pieces)
    dims = planned_dims((2, size), 1, pieces)
    assert layout_of(dims[1]) == pieces
    x = np.arange(2.0 * size, dtype=np.float32).reshape(2, size)
    axis = SplitAxis(parts=parts, name="parts")

    def run(_):
        part = axis.take(jnp.asarray(x), dims)
        assert part.shape == (2, axis.dim_size(dims[1]))
        once = axis.counted_once(part, 1, dims[1])
        return part, axis.collect(part, dims), axis.sum(once.sum())

    each, whole, total = jax.vmap(run, axis_name="parts")(jnp.arange(parts))
    np.testing.assert_array_equal(whole, np.broadcast_to(x, (parts, *x.shape)))
    if any(not isinstance(piece, int) for piece in pieces):
        np.testing.assert_array_equal(total, x.sum())
    at, end = 0, 0
    for piece in pieces:
        assert axis.place(dims[1], at) == end
        if isinstance(piece, int):
            np.testing.assert_array_equal(each[0, :, end : end + piece], x[:, at : at + piece])
            at, end = at + piece, end + piece
        else:
            outer, size, inner = piece
            at, end = at + outer * size * inner, end + outer * -(-size // parts) * inner
    assert axis.place(dims[1], at) == end == axis.dim_size(dims[1])
    for i in range(parts):
        one = SplitAxis(parts=parts, part=i).take(jnp.asarray(x), dims)
        np.testing.assert_array_equal(one, each[i])


def convolution(groups=1, **options):
    def call(x, w):
        numbers = ("NHC", "HIO", "NHC")
        return lax.conv_general_dilated(
            x, w, (1,), [(2, 0)], dimension_numbers=numbers, feature_group_count=groups, **options
        )

    return call


def one_by_one(x, w):
    return lax.conv_general_dilated(x, w, (1,), [(0, 0)], dimension_numbers=("NHC", "HIO", "NHC"))


@jax.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda x, t: (2 * x[0], t[0]))


FUSED = ((1, 4, 2), (1, 2, 2), 3)  # 15 elements: two pieces that are split, and a whole one
CASES = {
    "uneven slices": (lambda x: (x[:, :8] * 2, x[:, 8:12], x[:, 12:]), [(2, 15)], [(1, FUSED)]),
    "uneven split": (lambda x: jnp.split(x, [8, 12], axis=1), [(2, 15)], [(1, FUSED)]),
    "a slice of two pieces": (lambda x: jnp.tanh(x[:, :12]), [(2, 15)], [(1, FUSED)]),
    "columns": (lambda x, w: (x @ w)[:, 8:12], [(3, 5), (5, 15)], [None, (1, FUSED)]),
    "rows, some of them whole": (
        lambda x, w: x @ w,
        [(3, 15), (15, 5)],
        [(1, FUSED), (0, FUSED)],
    ),
    "concatenated, then summed": (
        lambda a, b, w: jnp.concatenate([a, b], 1) @ w,
        [(3, 4), (3, 3), (7, 5)],
        [(1, ((1, 4, 1),)), None, (0, ((1, 4, 1), 3))],
    ),
    "concatenated with itself": (
        lambda x: jnp.concatenate([x, -x], 1) + 1,
        [(3, 4)],
        [(1, ((1, 4, 1),))],
    ),
    "turned halves": (
        lambda x: x * 3 + jnp.concatenate([-x[:, 4:], x[:, :4]], 1),
        [(2, 8)],
        [(1, ((2, 4, 1),))],
    ),
    "padded along it": (
        lambda x: jnp.pad(x, [(0, 0), (1, 2)]) * 2.0,
        [(2, 4)],
        [(1, ((1, 4, 1),))],
    ),
    "padded with gaps": (
        lambda x: lax.pad(x, 0.0, [(0, 0, 1), (0, 0, 0)]),
        [(2, 4)],
        [(1, ((1, 4, 1),))],
    ),
    "cumulative": (
        lambda x: lax.associative_scan(jnp.multiply, x, axis=0),
        [(7, 15)],
        [(1, FUSED)],
    ),
    "convolution, features made": (
        convolution(),
        [(2, 6, 3), (3, 3, 4)],
        [None, (2, ((1, 4, 1),))],
    ),
    "convolution, features read": (
        convolution(),
        [(2, 6, 4), (3, 4, 5)],
        [(2, ((1, 4, 1),)), (1, ((1, 4, 1),))],
    ),
    "convolution, features read, some whole": (
        convolution(),
        [(2, 6, 15), (3, 15, 5)],
        [(2, FUSED), (1, FUSED)],
    ),
    "depthwise": (
        convolution(15),
        [(2, 6, 15), (3, 1, 15)],
        [(2, FUSED), (2, FUSED)],
    ),
    "depthwise, padded, with gaps": (
        convolution(3, rhs_dilation=(2,)),
        [(2, 6, 3), (2, 1, 3)],
        [(2, ((1, 3, 1),)), (2, ((1, 3, 1),))],
    ),
    "groups": (
        convolution(4),
        [(2, 6, 8), (3, 2, 12)],
        [(2, ((1, 4, 2),)), (2, ((1, 4, 3),))],
    ),
    "inside groups": (
        convolution(2),
        [(2, 6, 8), (3, 4, 6)],
        [(2, ((2, 4, 1),)), (1, ((1, 4, 1),))],
    ),
    "convolution along whole places": (
        one_by_one,
        [(2, 4, 3), (1, 3, 2)],
        [(1, ((1, 4, 1),)), None],
    ),
    "branches": (
        lambda x, i: lax.switch(i.astype(int)[0], [jnp.tanh, lambda x: x * i.sum()], x),
        [(2, 15), (1,)],
        [(1, FUSED), None],
    ),
    "branches with sums": (
        lambda x, w, i: lax.cond(i[0] > 9, lambda: x @ w, lambda: x @ (w * 2)),
        [(2, 4), (4, 3), (1,)],
        [(1, ((1, 4, 1),)), (0, ((1, 4, 1),)), None],
    ),
    "while": (
        lambda x, w: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1]) @ w @ w.T), (0, x)
        )[1],
        [(3, 5), (5, 4)],
        [None, (1, ((1, 4, 1),))],
    ),
    "a rule of its own": (lambda x: doubled(x) + 1, [(2, 15)], [(1, FUSED)]),
}


SLOW = (  # Other cases have the same rules.
    *("uneven split", "a slice of two pieces", "concatenated with itself", "padded with gaps"),
    *("convolution, features made", "convolution, features read"),
    *("depthwise, padded, with gaps", "inside groups", "turned halves", "branches with sums"),
    *("convolution, features read, some whole", "rows, some of them whole", "columns"),
    *("uneven slices", "depthwise"),
)


@pytest.mark.parametrize("name", thinned([x for x in CASES if x not in SLOW], slow=SLOW))
def test_parts_of_an_equation_make_the_whole(name):
    function, shapes, chosen = CASES[name]
    whole, found = in_parts(function, shapes, chosen)
    for want, have in zip(whole, found, strict=True):
        for part in have:
            np.testing.assert_allclose(part, want, rtol=1e-6, atol=1e-6)


BLOCKED = {
    "a window moves along it": (convolution(), [(2, 6, 3), (3, 3, 4)], [(1, ((1, 6, 1),)), None]),
    "a slice through a split piece": (lambda x: x[:, :6], [(2, 15)], [(1, FUSED)]),
    "pieces that are regrouped": (lambda x: x.reshape(2, 5, 3), [(2, 15)], [(1, FUSED)]),
    "a sum": (lambda x: x.max(1), [(2, 15)], [(1, FUSED)]),
    "padded between": (
        lambda x: lax.pad(x, 0.0, [(0, 0, 0), (0, 0, 1)]),
        [(2, 4)],
        [(1, ((1, 4, 1),))],
    ),
    "a branch by one element": (
        lambda x: lax.cond(x[0, 0] > 0, jnp.tanh, jnp.sin, x),
        [(2, 4)],
        [(1, ((1, 4, 1),))],
    ),
    "cut off": (lambda x: lax.pad(x, 0.0, [(0, 0, 0), (-1, 0, 0)]), [(2, 4)], [(1, ((1, 4, 1),))]),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_what_needs_a_dim_whole_blocks_it(name):
    with pytest.raises(AssertionError, match="blocked"):
        in_parts(*BLOCKED[name])


# models

MODELS = {
    "FusedBlocks": fused_models.FusedBlocks,
    "StateSpaces": fused_models.StateSpaces,
    "Branches": fused_models.Branches,
    "Convolutions": no_cache_models.Convolutions,
}
WHOLE = {  # Leaves that stay whole, biases behind sums and norms aside.
    "FusedBlocks": set(),
    "StateSpaces": set(),
    "Branches": {"share"},
    "Convolutions": {"Conv_1/kernel"},  # Sums over the features of the other cost less.
}


@pytest.mark.parametrize(
    "name", thinned(["Branches", "Convolutions"], slow=["FusedBlocks", "StateSpaces"])
)
def test_fused_projections_and_convolutions_are_split(name):
    plan = model_of(MODELS[name]()).plan(2)
    assert not plan.refused
    whole = {row.path for row in plan.rows if row.dim is None}
    assert {x for x in whole if "Norm" not in x and "bias" not in x} == WHOLE[name], str(plan)
    assert plan.num_elements < 1.15 * plan.num_parameters / 2


@pytest.mark.slow
def test_each_piece_of_a_fused_projection_is_split_by_its_own_heads():
    rows = {row.path: row for row in model_of(fused_models.FusedBlocks()).plan(2).rows}
    assert rows["Dense_1/kernel"].pieces == ((1, 2, 16), (2, 2, 8))
    assert rows["Dense_1/kernel"].why == "2 heads, in columns"
    assert "dim 1: [2] x 16 + 2 x [2] x 8" in str(model_of(fused_models.FusedBlocks()).plan(2))
    assert rows["Dense_2/kernel"].pieces == ((2, 24, 1),)
    assert rows["Dense_3/kernel"].pieces == ((1, 2, 16), (1, 24, 1))
    # With a width that does not divide, only the heads are split.
    rows = {row.path: row for row in model_of(fused_models.FusedBlocks(hidden=23)).plan(2).rows}
    assert rows["Dense_2/kernel"].dim is None
    assert rows["Dense_3/kernel"].pieces == ((1, 2, 16), 23)


def test_no_plan_depends_on_the_length_of_a_row():
    """A table of positions is cut where the sample ends; longer rows take more of it."""
    plan = model_of(no_cache_models.Attention()).plan(2)
    (row,) = (row for row in plan.rows if row.path == "places")
    assert row.dim is None


@pytest.mark.parametrize(
    ("name", "options", "nodes"),
    thinned(
        [],
        slow=[
            ("FusedBlocks", {"hidden": 23}, 2),
            *((name, {}, nodes) for name in MODELS for nodes in (1, 2)),
        ],
        rows=True,
    ),
)
@pytest.mark.filterwarnings("ignore:the model has no cache")  # "Branches"
def test_split_models_generate_what_whole_ones_do(name, options, nodes):
    known = train(MODELS[name](**options), zeroxla.make_mesh(nodes=nodes))
    engine = HybridEngine(known.step, tensor=2, max_length=32)
    assert any(row.dim is not None for row in engine.plan.rows)
    found = engine.generate(known.state, PROMPTS, key=KEY, max_new_tokens=6, temperature=0)
    np.testing.assert_array_equal(found.tokens, known.greedy(PROMPTS, 6))
