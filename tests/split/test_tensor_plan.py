"""Which dims are split: atoms, rules of equations, plans of models, and their proof."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.hybrid_models import NoCache, ParallelGPT, RepeatedHeads
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.split_parts import in_parts, model_of

from zeroxla.hybrid.model import check_split, plan_shortcomings
from zeroxla.models import GPT, Llama
from zeroxla.split import products, rules
from zeroxla.split.atoms import Atom, block, dim_of, expand, size_of
from zeroxla.split.joins import join
from zeroxla.split.layout import layout_of, planned_dims
from zeroxla.split.part_program import leaf_dims

pytestmark = pytest.mark.usefixtures("quick_compilation")


def splits_of(module, tensor):
    rows = model_of(module).plan(tensor).rows
    return {row.path: (row.dim, row.pieces) for row in rows if row.dim is not None}


# atoms


def sizes(dim):
    return [atom.size for atom in expand(dim)]


def test_a_joined_dim_is_refined_where_the_other_is_a_product():
    whole, parts = dim_of(12), (*dim_of(3), *dim_of(4))
    join(whole, parts, "")
    assert sizes(whole) == [3, 4]
    assert expand(whole) == expand(parts)


def test_later_refinement_reaches_every_joined_dim():
    a, b, c = dim_of(24), dim_of(24), (*dim_of(2), *dim_of(3), *dim_of(4))
    join(a, b, "")
    join(b, c, "")
    assert sizes(a) == [2, 3, 4]
    assert expand(a) == expand(c)


def test_what_does_not_nest_is_blocked():
    a, b = (*dim_of(6), *dim_of(2)), (*dim_of(4), *dim_of(3))
    join(a, b, "mixed")
    first, *rest = expand(a)
    assert first.size == 2
    assert not first.blocked
    assert all("mixed" in atom.blocked for atom in (*rest, *expand(b)[1:]))


def test_what_is_known_of_an_atom_is_known_of_its_parts():
    a = dim_of(8)
    block(a, "why")
    join(a, (*dim_of(2), *dim_of(4)), "")
    assert [dict(atom.blocked) for atom in expand(a)] == [{"why": None}] * 2


def test_a_chosen_atom_says_its_place():
    dims = planned_dims((5, 24), 1, ((3, 4, 2),))
    assert layout_of(dims[0]) == (5,)
    assert layout_of(dims[1]) == ((3, 4, 2),)
    assert size_of(dims[1]) == 24


# one equation in parts


def reshaped(x):
    return x.reshape(3, 2, 4, 5).transpose(2, 0, 1, 3)


CASES = {
    "sum of products": (
        lambda x, w: x @ w,
        [(3, 8), (8, 5)],
        [(1, ((1, 8, 1),)), (0, ((1, 8, 1),))],
    ),
    "columns": (lambda x, w: jnp.tanh(x @ w), [(3, 8), (8, 6)], [None, (1, ((1, 6, 1),))]),
    "inner columns": (lambda x, w: (x @ w)[:, None], [(3, 8), (8, 12)], [None, (1, ((3, 2, 2),))]),
    "reshape": (reshaped, [(3, 40)], [(1, ((2, 4, 5),))]),
    "a third": (lambda x: x[:, 4:8] * 2, [(3, 12)], [(1, ((3, 4, 1),))]),
    "three thirds": (lambda x: jnp.split(x, 3, axis=1), [(2, 24)], [(1, ((3, 4, 2),))]),
    "padded columns": (lambda x, w: jnp.exp(x @ w), [(3, 8), (8, 5)], [None, (1, ((1, 5, 1),))]),
    "padded runs": (lambda x: x.reshape(2, 2, 5, 3) * 2, [(2, 30)], [(1, ((2, 5, 3),))]),
    "padded lookup": (lambda t: t[jnp.array([[0, 3], [4, 1]])], [(5, 3)], [(0, ((1, 5, 1),))]),
    "padded iota": (lambda x: x * jnp.arange(5.0), [(3, 5)], [(1, ((1, 5, 1),))]),
    "softmax": (lambda x: jax.nn.softmax(x, axis=0), [(5, 4)], [(1, ((1, 4, 1),))]),
    "broadcast": (
        lambda x: jnp.broadcast_to(x[:, None], (4, 3)) * 2.0,
        [(4,)],
        [(0, ((1, 4, 1),))],
    ),
    "iota": (lambda x: x * jnp.arange(4.0), [(3, 4)], [(1, ((1, 4, 1),))]),
    "a constant": (lambda x: x * np.arange(6.0, dtype=np.float32), [(3, 6)], [(1, ((1, 6, 1),))]),
    "lookup": (lambda t: t[jnp.array([[0, 3], [2, 1]])], [(4, 3)], [(0, ((1, 4, 1),))]),
    "lookup of columns": (lambda t: t[jnp.array([2, 0])], [(4, 6)], [(1, ((3, 2, 1),))]),
    "stack": (lambda x, y: jnp.stack([x, y], 1), [(3, 4)] * 2, [(1, ((1, 4, 1),))] * 2),
    "concatenate": (lambda x, y: jnp.concatenate([x, y]), [(3, 4)] * 2, [(1, ((1, 4, 1),))] * 2),
    "update": (
        lambda c, x: jax.lax.dynamic_update_slice(c, x, (2, 0)),
        [(5, 4), (1, 4)],
        [(1, ((1, 4, 1),))] * 2,
    ),
    "scatter": (
        lambda c, x: c.at[:, jnp.arange(2) + 1].set(x),
        [(2, 5, 4), (2, 2, 4)],
        [(2, ((1, 4, 1),))] * 2,
    ),
    "a loop": (
        lambda x, w: jax.lax.scan(lambda c, w: (jnp.sin(c * w), c.sum(0)), x, w),
        [(2, 4), (3, 4)],
        [(1, ((1, 4, 1),))] * 2,
    ),
    "padding": (lambda x: jnp.pad(x, [(1, 2), (0, 0)]) * 2.0, [(3, 4)], [(1, ((1, 4, 1),))]),
    "sort": (lambda x: jnp.sort(x, axis=0), [(5, 4)], [(1, ((1, 4, 1),))]),
    "sum along another dim": (lambda x: x.sum(0), [(5, 4)], [(1, ((1, 4, 1),))]),
    "cumulative": (lambda x: jnp.cumsum(x, 0), [(5, 4)], [(1, ((1, 4, 1),))]),
}


SLOW = (  # "three thirds", "padded runs", "scatter" and the padded ones say much the same.
    *("columns", "a third", "padded columns", "lookup", "lookup of columns", "iota", "stack"),
    *("update", "broadcast", "sum along another dim", "sort", "padding"),
)
QUICK = [(name, 2) for name in CASES if name not in (*SLOW, "padded iota")] + [("padded iota", 4)]


@pytest.mark.parametrize(
    ("name", "parts"),
    thinned(
        QUICK,
        slow=[*((name, 2) for name in (*SLOW, "padded iota")), ("padded lookup", 4)],
        rows=True,
    ),
)
def test_parts_of_an_equation_make_the_whole(name, parts):
    function, shapes, chosen = CASES[name]
    whole, found = in_parts(function, shapes, chosen, parts)
    for want, have in zip(whole, found, strict=True):
        for part in have:  # every device has it whole
            np.testing.assert_allclose(part, want, rtol=1e-6, atol=1e-6)


BLOCKED = {
    "a sum": lambda x: x.sum(),
    "the middle of a dim": lambda x: x[1:3],
    "every second": lambda x: x[::2],
    "reversed": lambda x: x[::-1],
    "twice in one array": lambda x: x[:, None] * x[None],
    "an equation without a rule": lambda x: jnp.fft.fft(x),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_what_needs_a_dim_whole_blocks_it(name):
    with pytest.raises(AssertionError, match="blocked"):
        in_parts(BLOCKED[name], [(4,)], [(0, ((1, 4, 1),))])


def test_a_lookup_outside_of_a_split_table_gives_nan_as_numpy_take_does():
    whole, found = in_parts(
        lambda t: jnp.take(t, jnp.array([1, 9, -5]), axis=0), [(4, 2)], [(0, ((1, 4, 1),))]
    )
    assert np.isnan(whole[0][1:]).all()
    np.testing.assert_allclose(found[0][0], whole[0])


def test_a_sum_of_parts_is_rounded_once():
    """257 + 258 is 516 in bfloat16; of parts that are rounded first, 256 + 258, it would be 512."""

    def dot(x, w):
        return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)

    ones = np.ones((1, 64), np.float32)
    terms = np.array([226, *[1] * 31, 227, *[1] * 31], np.float32)[:, None]
    shapes, chosen = [(1, 64), (64, 1)], [(1, ((1, 64, 1),)), (0, ((1, 64, 1),))]
    _, found = in_parts(dot, shapes, chosen, arrays=[ones, terms])
    assert np.asarray(found[0], np.float32).ravel().tolist() == [516, 516]


# plans


@pytest.mark.smoke
def test_gpt_is_split_by_heads_hidden_width_and_tables():
    assert splits_of(GPT.tiny(), 2) == {
        "h/attn/c_attn/bias": (1, ((3, 4, 8),)),
        "h/attn/c_attn/kernel": (2, ((3, 4, 8),)),
        "h/attn/c_proj/kernel": (1, ((1, 4, 8),)),
        "h/mlp/c_fc/bias": (1, ((1, 128, 1),)),
        "h/mlp/c_fc/kernel": (2, ((1, 128, 1),)),
        "h/mlp/c_proj/kernel": (1, ((1, 128, 1),)),
        "wpe/embedding": (0, ((1, 32, 1),)),
        "wte/embedding": (0, ((1, 64, 1),)),
    }


def test_llama_is_split_by_the_heads_that_queries_share():
    found = splits_of(Llama.tiny(scan=False, layers=1), 2)
    attention = {path.split("/")[-2]: f for path, (_, f) in found.items() if "self_attn" in path}
    assert attention == {
        "q_proj": ((1, 2, 16),),
        "k_proj": ((1, 2, 8),),
        "v_proj": ((1, 2, 8),),
        "o_proj": ((1, 2, 16),),
    }
    assert {"lm_head", "embed_tokens/embedding"} <= found.keys()


@pytest.mark.slow
def test_an_architecture_that_is_not_known_is_split_too():
    found = splits_of(ParallelGPT(layers=1), 4)
    assert found == {
        "h_0/q/kernel": (1, ((1, 4, 1),)),
        "h_0/k/kernel": (1, ((1, 4, 1),)),
        "h_0/v/kernel": (1, ((1, 4, 1),)),
        "h_0/out/kernel": (0, ((1, 4, 1),)),
        "h_0/fc_in/kernel": (1, ((1, 96, 1),)),
        "h_0/fc_in/bias": (0, ((1, 96, 1),)),
        "h_0/fc_out/kernel": (0, ((1, 96, 1),)),
        "lm_head/kernel": (1, ((1, 48, 1),)),
        "lm_head/bias": (0, ((1, 48, 1),)),
        "wte/embedding": (0, ((1, 48, 1),)),
    }


def test_more_parts_than_key_value_heads_split_the_queries_of_each():
    found = splits_of(lambda rngs: RepeatedHeads(rngs=rngs), 4)
    assert found["q/kernel"] == (1, ((2, 4, 4),))
    assert found["o/kernel"] == (0, ((2, 4, 4),))
    assert "kv/kernel" not in found


def test_the_plan_counts_what_a_device_holds_and_says_why():
    plan = model_of(GPT.tiny()).plan(2)
    by_path = {row.path: row for row in plan.rows}
    assert by_path["h/attn/c_attn/kernel"].why == "4 heads, in columns"
    assert by_path["h/attn/c_proj/kernel"].why == "4 heads, in rows"
    assert by_path["h/mlp/c_fc/kernel"].why == "128 columns"
    assert by_path["h/mlp/c_fc/bias"].why == "128 columns"
    assert by_path["h/mlp/c_proj/kernel"].why == "128 rows"
    assert by_path["wte/embedding"].why == "64 entries of a table"
    assert plan_shortcomings(plan) == []
    assert "reduce_sum" in by_path["ln_f/scale"].why
    whole = sum(np.prod(row.shape) for row in plan.rows if row.dim is None)
    assert plan.num_elements == whole + (plan.num_parameters - whole) // 2
    text = str(plan)
    assert "28,544 parameters, tensor=2" in text
    assert "dim 2: 3 x [4] x 8" in text


@pytest.mark.slow
def test_a_width_that_does_not_divide_stays_whole_and_tables_are_padded():
    plan = model_of(GPT.tiny(vocab=63, hidden=129, length=31)).plan(2)
    split = {row.path: row for row in plan.rows if row.dim is not None}
    assert {path.split("/")[-2] for path in split} == {"c_attn", "c_proj", "wte", "wpe"}
    assert split["wte/embedding"].part_shape(2) == (32, 32)
    assert split["wpe/embedding"].part_shape(2) == (16, 32)
    assert plan_shortcomings(plan) == []
    rows = {row.path: row.why for row in plan.rows}
    assert rows["h/mlp/c_fc/kernel"].endswith("129 does not divide by 2")


@pytest.mark.parametrize(
    ("module", "heads"), thinned([(Llama.tiny(), 2)], slow=[(GPT.tiny(), 4)], rows=True)
)
def test_heads_that_do_not_divide_are_refused(module, heads):
    with pytest.raises(ValueError, match=f"tensor=3 does not divide the {heads} heads of .*attn"):
        model_of(module).plan(3)


def test_one_device_needs_no_split():
    assert splits_of(NoCache(), 1) == {}


@pytest.mark.slow
def test_a_split_that_computes_something_else_is_found_and_undone(monkeypatch):
    """A rule that forgets the sum over the parts, of products with 128 terms only."""
    right = products.RULES["dot_general"]

    def wrong(axis, dims, eq, args):
        if args[0].shape[-1] in (1, 2) and eq.inputs[0].aval.shape[-1] == 128:
            return rules.bind(eq, args)
        return right.run(axis, dims, eq, args)

    monkeypatch.setitem(products.RULES, "dot_general", rules.Rule(right.connect, wrong))
    plan = model_of(GPT.tiny(scan=False, layers=1)).plan(2)
    rows = {row.path: row for row in plan.rows}
    (said,) = plan_shortcomings(plan)
    assert "each device holds h_0/mlp/c_fc/bias, h_0/mlp/c_fc/kernel, h_0/mlp/c_proj/k" in said
    assert rows["h_0/mlp/c_fc/kernel"].dim is None
    assert "computes something else" in rows["h_0/mlp/c_fc/kernel"].why
    assert rows["h_0/attn/c_attn/kernel"].dim == 1


@pytest.mark.slow
def test_a_program_that_needs_a_split_dim_whole_says_so():
    model = model_of(ParallelGPT(layers=1))
    plan = model.plan(2)
    program = model.forward(plan, 2, 8)
    atom = next(a for atoms in program.flow.atoms() for a in atoms if a.chosen)
    block((atom,), "because")
    with pytest.raises(ValueError, match="needs it whole: because; use tensor=1"):
        check_split(program)


def test_leaf_dims_know_nothing():
    ((dim,),) = leaf_dims([jax.ShapeDtypeStruct((6,), "float32")])
    (atom,) = dim
    assert isinstance(atom, Atom)
    assert atom.size == 6
    assert not atom.blocked
