"""Caches made from the trace: read token by token, a model gives the logits of whole rows."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools import no_cache_models as models
from tools.hybrid import KEY, PROMPTS, train
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import HybridEngine
from zeroxla.hybrid.from_trace.cache import TracedCache
from zeroxla.hybrid.from_trace.places import ForbiddenError

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROWS, PLACES, WIDTH = 3, 12, models.WIDTH
HEADS = (ROWS, PLACES, 2, 8)
X = (ROWS, PLACES, WIDTH)
# What is kept: keys and values, the carries of recurrences, the inputs of convolutions.
KEPT = {
    "Attention": [HEADS] * 4,
    "Rotary": [(ROWS, PLACES, 2, 1, 8), X],
    "Scanned": [(3, *HEADS)] * 2,
    "Recurrent": [(ROWS, WIDTH)] * 3,
    "ScannedRecurrent": [(2, ROWS, WIDTH)],
    "Convolutions": [X] * 2,
    "Shifts": [X] * 4,
    "Merged": [(ROWS * PLACES, WIDTH)],
}


def traced(model):
    """Return a model's cache, its leaves, its logits of whole rows, and the rows."""
    tokens = np.random.default_rng(0).integers(0, models.VOCAB, (ROWS, PLACES)).astype(np.int32)
    params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]

    def forward(params, state, tokens):
        return model.apply({"params": params}, tokens)

    return TracedCache(forward=forward), params, jax.jit(forward)(params, {}, tokens), tokens


# Slow are those whose parts are in the tests below, or in the others.
SLOW = ("Attention", "Scanned", "Recurrent", "Shifts")


@pytest.mark.parametrize("name", thinned([name for name in KEPT if name not in SLOW], slow=SLOW))
def test_one_place_at_a_time_gives_the_logits_of_whole_rows(name):
    cache, params, expected, tokens = traced(getattr(models, name)())
    kept = cache.empty(params, {}, ROWS, PLACES)
    assert sorted(x.shape for x in kept) == sorted(KEPT[name])

    @jax.jit
    def read(kept, token, place):
        return cache.read(params, {}, kept, token[:, None], place, PLACES)

    for place, token in enumerate(tokens.T):
        logits, kept = read(kept, token, place)
        np.testing.assert_allclose(logits[:, 0], expected[:, place], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"),
    thinned([("Recurrent", jnp.float32)], slow=[("Attention", jnp.bfloat16)], rows=True),
)
def test_kept_arrays_may_have_another_dtype(name, dtype):
    """The carry of a recurrence keeps its own dtype, since its errors would add up."""
    cache, params, expected, tokens = traced(getattr(models, name)())
    kept = cache.empty(params, {}, ROWS, PLACES, jnp.bfloat16)
    assert {x.dtype for x in kept} == {jnp.dtype(dtype)}
    read = jax.jit(functools.partial(cache.read, params, {}, places=PLACES))
    for place, token in enumerate(tokens.T[:4]):
        logits, kept = read(kept, token[:, None], place)
        assert {x.dtype for x in kept} == {jnp.dtype(dtype)}
        np.testing.assert_allclose(logits[:, 0], expected[:, place], atol=0.05)


def test_a_place_costs_no_pass_over_the_row():
    """A token of 64 takes less than a 16th of the FLOPs of the row."""
    model, places = models.Attention(), 64
    cache, params, _, _ = traced(model)
    tokens = jnp.zeros((ROWS, places), jnp.int32)
    kept = cache.empty(params, {}, ROWS, places)

    def flops(function, *args):
        cost = jax.jit(function).lower(*args).compile().cost_analysis()
        return cost["flops"]

    whole = flops(lambda p, t: model.apply({"params": p}, t), params, tokens)
    one = flops(
        lambda p, k, t, i: cache.read(p, {}, k, t, i, places), params, kept, tokens[:, :1], 3
    )
    assert one < whole / 16


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Switched", r"`cond` to float32\[3,12,16\]"),
        ("Summary", "`scan` .*: it is wanted for all places at once"),
    ],
)
def test_an_equation_that_needs_all_places_is_named(name, told):
    cache, params, _, _ = traced(getattr(models, name)())
    with pytest.raises(ForbiddenError, match=told):
        cache.plan(params, {}, ROWS, PLACES)


memory = functools.partial(zeroxla.inspect.memory, phases=True, num_prompts=4)


def generated(engine, known, prompts=PROMPTS, num=6):
    options = {"key": KEY, "max_new_tokens": num, "temperature": 0}
    return engine.generate(known.state, prompts, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tensor", "dtype"),
    [
        *((name, 2, "float32") for name in KEPT),
        ("Recurrent", 1, "float32"),
        ("Attention", 1, "bfloat16"),
    ],
)
def test_an_engine_generates_with_it(name, tensor, dtype):
    model = getattr(models, name)()
    known = train(model, zeroxla.make_mesh(nodes=2), steps=0, compute_dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = HybridEngine(known.step, tensor=tensor, max_length=32)
        assert engine._model.calls.with_cache.traced is not None
        found = generated(engine, known)
    np.testing.assert_array_equal(found.tokens, known.greedy(PROMPTS, 6))
    assert memory(engine, length=16).cache_bytes > 0


class Longer(models.Attention):
    """Longer rows take a branch."""

    def mix(self, x):
        x = super().mix(x)
        return x if x.shape[1] < 16 else models.Switched.mix(self, x)


@pytest.mark.slow
def test_rows_whose_trace_is_another_are_read_whole_and_a_warning_says_so():
    known = train(Longer(), zeroxla.make_mesh(nodes=2))
    engine = HybridEngine(known.step, max_length=32)
    with pytest.warns(UserWarning, match=r"has no \d+ places \(`cond` to .* whole sequence"):
        found = generated(engine, known, num=12)
    np.testing.assert_array_equal(found.tokens, known.greedy(PROMPTS, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        short = generated(engine, known, [[1, 2]], num=4)
    np.testing.assert_array_equal(short.tokens, known.greedy([[1, 2]], 4))
    assert memory(engine, length=8).cache_bytes > memory(engine, length=20).cache_bytes == 0


def test_a_plan_is_made_for_shapes_alone():
    cache, params, _, _ = traced(models.Attention())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    plan = functools.partial(cache.plan, shapes, {})
    assert [x.shape for x in plan(7, 20).states] == [(7, 20, 2, 8)] * 4
