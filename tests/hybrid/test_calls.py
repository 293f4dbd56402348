"""Calls and caches of public models generate as whole passes do; others are refused."""

import functools
import inspect
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.call_models import (
    Bidirectional,
    Blocks,
    Dictionary,
    Given,
    Hidden,
    HiddenNnx,
    NeverPadded,
    OneToken,
    OneTokenMasked,
    OneTokenNnx,
    PublicModel,
    Recurrent,
    Shifted,
)
from tools.hybrid import KEY, PROMPTS, Trained, padded, train
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import HybridEngine
from zeroxla.hybrid.call_names import CallNames
from zeroxla.hybrid.calls import OWN
from zeroxla.hybrid.check_calls import Trial

pytestmark = pytest.mark.usefixtures("quick_compilation")
BATCH = {"tokens": np.zeros((8, 33), np.int32)}
CASES = {
    "public": (PublicModel, {}, ("padded", False)),
    "one token": (OneToken, {}, ("aligned", True)),
    "one token, masked": (OneTokenMasked, {}, ("padded", True)),
    "one token, nnx": (lambda: lambda rngs: OneTokenNnx(rngs=rngs), {}, ("aligned", True)),
    "given": (Given, {}, ("padded", False)),
    "recurrent": (Recurrent, {"make_cache": Recurrent.make_cache}, ("aligned", False)),
    "several tokens see each other": (NeverPadded, {}, ("aligned", True)),
}


@functools.cache
def made(make, whole=None, **config):
    """Make a model's state; its logits are those of `whole`, without an engine."""
    model = make()
    whole = whole or getattr(model, "whole", OneTokenNnx.whole)
    known = train(model, zeroxla.make_mesh(nodes=2), steps=0, **config)
    step, state = known.step, known.state
    bound = functools.partial(step.adapted.bound, zeroxla.full_params(state), state.model_state)
    return Trained(step, state, jax.jit(lambda tokens: whole(bound(), tokens)))


def shaped(model, **config):
    """Return a step that has been given the shapes of a batch."""
    step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=2), config=zeroxla.ZeroConfig(**config))
    step.abstract_state(BATCH)
    return step


def uses_of(engine):
    """Return how an engine uses the model's cache; None if it does not."""
    how = engine._model.calls.with_cache
    return None if how is None else (how.rows, how.one_token)


def generate(engine, known, prompts=PROMPTS, num=6, **options):
    options = {"key": KEY, "max_new_tokens": num, "temperature": 0, **options}
    return engine.generate(known.state, prompts, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_call_by_names_with_its_cache(name):
    make, options, uses = CASES[name]
    known = made(make)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = HybridEngine(known.step, **options)
    assert uses_of(engine) == uses
    assert engine._buckets.limits.max_length == 32
    found = generate(engine, known)
    np.testing.assert_array_equal(found.tokens, known.greedy(PROMPTS, 6))
    np.testing.assert_array_equal(found.lengths, 6)
    rows = np.array([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]], np.int32)
    np.testing.assert_allclose(engine.logits(known.state, rows), known.logits(rows), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one token", "public"])
def test_caches_are_split_over_tensor(name):
    known = made(CASES[name][0])
    engine = HybridEngine(known.step, tensor=2)
    assert uses_of(engine) == CASES[name][2]
    assert any(row.dim is not None for row in engine.plan.rows)
    found = generate(engine, known)
    np.testing.assert_array_equal(found.tokens, known.greedy(PROMPTS, 6))


def test_rows_that_begin_together_end_on_their_own():
    """Prompts of the same length are read at once; a row that is done waits for the others."""
    known = made(CASES["one token"][0])
    engine = HybridEngine(known.step)
    free = generate(engine, known, num=8).tokens
    eos = int(free[0, 3])
    found = generate(engine, known, num=8, eos=eos, pad=5)
    for row, length, all_of_it in zip(found.tokens, found.lengths, free, strict=True):
        met = np.flatnonzero(all_of_it == eos)
        assert length == (met[0] + 1 if met.size else 8)
        np.testing.assert_array_equal(row[:length], all_of_it[:length])
        assert (row[length:] == 5).all()


@pytest.mark.slow
def test_rows_that_begin_together_are_drawn_on_their_own():
    known = made(CASES["one token"][0])
    engine = HybridEngine(known.step)
    drawn = generate(engine, known, temperature=1.0).tokens
    again = generate(engine, known, [[9] * 6, *PROMPTS[1:]], temperature=1.0).tokens
    np.testing.assert_array_equal(again[1:], drawn[1:])
    prompts = [list(range(1, 13))] * 3
    found = generate(engine, known, prompts)
    np.testing.assert_array_equal(found.tokens, known.greedy(prompts, 6))


def test_a_call_of_the_users():
    known = made(Dictionary)

    def call(model, tokens, *, positions, mask, cache):
        assert cache is None
        assert positions.shape == mask.shape == tokens.shape
        return model({"ids": tokens, "places": positions})

    with pytest.raises(ValueError, match=r"fails on rows of 4, 8, 16, 32 tokens: .* pass call="):
        HybridEngine(known.step)
    engine = HybridEngine(known.step, call=call)
    found = generate(engine, known)
    np.testing.assert_array_equal(found.tokens, known.greedy(PROMPTS, 6))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [lambda: lambda rngs: HiddenNnx(rngs=rngs), Hidden],
    ids=["nnx", "linen"],
)
def test_a_call_of_the_users_that_reads_a_part_of_the_module(make):
    """The call's result is no logits, though it looks like them; the embedding makes some of it."""
    known = made(make, Hidden.whole)
    with pytest.raises(ValueError, match=r"holds the token 20, .* pass call= if its call returns "):
        generate(HybridEngine(known.step), known, [[20]])
    engine = HybridEngine(known.step, call=lambda model, tokens, **_: Hidden.whole(model, tokens))
    found = generate(engine, known)
    np.testing.assert_array_equal(found.tokens, known.greedy(PROMPTS, 6))


def given_to_a_call(step):
    """Return an engine with a call and a cache of the user's, and the caches it made."""
    makes = []

    def call(model, tokens, *, positions, mask, cache):
        places = positions + (mask == 0).sum(1, keepdims=True)
        seen = (places[..., None] >= jnp.arange(mask.shape[1])) & (mask[:, None] != 0)
        logits, cache = model(tokens, positions, cache, seen)
        return {"logits": logits, "memory": cache}

    def make_cache(rows, places, dtype):
        makes.append((rows, places))
        return Given().init_cache(rows, places, dtype)

    return HybridEngine(step, tensor=2, call=call, make_cache=make_cache), makes


def test_a_call_of_the_users_with_a_given_cache():
    engine, makes = given_to_a_call(shaped(Given(), persistence_threshold=0))
    assert uses_of(engine) == ("padded", False)
    assert any(row.dim is not None for row in engine.plan.rows)
    assert makes


@pytest.mark.slow
def test_a_call_of_the_users_generates_with_a_given_cache():
    known = made(Given)
    engine, _ = given_to_a_call(known.step)
    found = generate(engine, known)
    np.testing.assert_array_equal(found.tokens, known.greedy(PROMPTS, 6))


class Encoded(PublicModel):
    """A call that needs what generation knows nothing of."""

    def __call__(self, input_ids, encoder_outputs):
        return super().__call__(input_ids, encoder_outputs, input_ids)

    @staticmethod
    def whole(call, tokens):
        return call(tokens, jnp.ones_like(tokens)).logits


def test_a_call_that_needs_more_than_generation_has():
    step = zeroxla.make_step(Encoded(), zeroxla.make_mesh(nodes=2))
    step.abstract_state(BATCH)
    with pytest.raises(ValueError, match=r"call takes encoder_outputs, which .* pass call="):
        HybridEngine(step)


@pytest.mark.filterwarnings("ignore:the model has no cache")
def test_rows_of_other_lengths_than_blocks():
    """Lengths grow until the call takes them; then all rows have a multiple of that length."""
    step = shaped(Blocks())
    with pytest.raises(ValueError, match=r"rows of 4, 8, 16, 32 tokens: .* pass sample_length="):
        HybridEngine(step)
    engine = HybridEngine(step, sample_length=12)
    assert engine._buckets.limits.max_length == 36
    with pytest.raises(ValueError, match="sample_length=48 exceeds the most tokens of a row, 40"):
        HybridEngine(step, sample_length=48)
    with pytest.raises(ValueError, match="sample_length=0 must be 1 or more"):
        HybridEngine(step, sample_length=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the model has no cache")
def test_rows_of_blocks_are_generated():
    known = made(Blocks)
    engine = HybridEngine(known.step, sample_length=12)
    found = generate(engine, known)
    np.testing.assert_array_equal(found.tokens, known.greedy(PROMPTS, 6))
    rows = np.array([[1, 2, 3, 4, 5]], np.int32)
    np.testing.assert_allclose(engine.logits(known.state, rows), known.logits(rows), atol=1e-5)


class OneLength(nn.Module):
    """Averages of the tokens before, of rows of 16 tokens and no others."""

    @nn.compact
    def __call__(self, tokens):
        assert tokens.shape[1] == 16, f"rows of 16 tokens, not {tokens.shape[1]}"
        embed, before = nn.Embed(64, 16), jnp.tril(jnp.ones((16, 16)))
        x = embed(tokens)
        mean = jnp.einsum("qk,bkd->bqd", before / before.sum(1, keepdims=True), x)
        return embed.attend(x + nn.Dense(16)(mean))


def one_length():
    step = zeroxla.make_step(
        OneLength(),
        zeroxla.make_mesh(nodes=2),
        loss=lambda apply, batch, *, train: jnp.mean(apply(batch["tokens"][:, :16]) ** 2),
    )
    step.abstract_state(BATCH)
    return step


@pytest.mark.parametrize("options", [{"sample_length": 16}, {}])
def test_rows_of_one_length_are_traced_at_no_other(options):
    engine = HybridEngine(one_length(), max_length=16, **options)
    assert (engine._model.sample_length, engine._model.sample_places) == (16, 16)
    assert engine.max_length == 16
    assert engine._model.calls.has_cache


def test_a_model_that_takes_no_longer_rows_has_no_derived_cache():
    """Its own words are in the warning, and each token takes a full pass."""
    text = r"the model takes no rows of 32 tokens: AssertionError: rows of 16 tokens, not 32"
    with pytest.warns(UserWarning, match=text):
        engine = HybridEngine(one_length(), sample_length=16, max_length=32)
    assert not engine._model.calls.has_cache


def test_lengths_that_grow_until_a_call_takes_them():
    step = zeroxla.make_step(Blocks(size=16), zeroxla.make_mesh(nodes=2))
    step.abstract_state(BATCH)
    with pytest.warns(UserWarning, match="none can be made .* it is wanted for all places at once"):
        engine = HybridEngine(step)
    assert (engine._model.sample_length, engine._model.multiple) == (16, 16)
    assert engine._buckets.limits.max_length == 32


def undone(model, tokens, **_):
    """Call a model that shifts its tokens, without the shift."""
    return model(jnp.pad(tokens, ((0, 0), (0, 1))))[:, 1:]


@pytest.mark.filterwarnings("ignore:the model has no cache")
def test_a_model_that_shifts_inside_is_refused_until_the_call_undoes_it():
    step = shaped(Shifted())
    with pytest.raises(ValueError, match="depend on the tokens before it, and not on the token"):
        HybridEngine(step)
    HybridEngine(step, call=undone)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the model has no cache")
def test_a_model_that_shifts_inside_generates_when_the_call_undoes_it():
    known = made(Shifted)
    engine = HybridEngine(known.step, call=undone)
    found = generate(engine, known)
    np.testing.assert_array_equal(found.tokens, known.greedy(PROMPTS, 6))
    rows = np.array([[1, 2, 3, 4, 5]], np.int32)
    np.testing.assert_allclose(engine.logits(known.state, rows), known.logits(rows), atol=1e-5)


@pytest.mark.slow
def test_a_cache_that_takes_only_the_dtype_of_its_module():
    engine = HybridEngine(shaped(PublicModel(), compute_dtype="bfloat16"))
    assert uses_of(engine) == ("padded", False)
    assert engine._model.calls.with_cache.dtype == OWN


@pytest.mark.slow
def test_a_model_with_a_cache_of_its_own_dtype_generates():
    known = made(PublicModel, compute_dtype="bfloat16")
    engine = HybridEngine(known.step)
    found = generate(engine, known)
    rows = padded([[*p, *r] for p, r in zip(PROMPTS, found.rows(), strict=True)])
    want = known.logprobs(rows)  # float32
    for i, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(found.logprobs[i], want[i, len(prompt) - 1 :][:6], atol=0.1)


def test_a_model_that_is_not_causal_is_refused():
    step = zeroxla.make_step(Bidirectional(), zeroxla.make_mesh(nodes=2))
    step.abstract_state(BATCH)
    with pytest.raises(ValueError, match=r"the model is not causal: .* give it with call="):
        HybridEngine(step)


def test_a_cache_that_computes_something_else_is_not_used(monkeypatch):
    """One is made from the trace instead; if that were wrong too, none would be used."""
    step = zeroxla.make_step(NeverPadded(forgets=True), zeroxla.make_mesh(nodes=2))
    step.abstract_state(BATCH)
    assert HybridEngine(step)._model.calls.with_cache.traced is not None
    monkeypatch.setattr(Trial, "cache_is_right", lambda *_: False)
    told = "the model's cache is not used, since .*, and the one made from its trace is not used, s"
    with pytest.warns(UserWarning, match=told):
        engine = HybridEngine(step)
    assert uses_of(engine) is None


def test_names_of_arguments():
    def call(x, decoder_positions, segment_ids, head_mask=None, *, padding_mask, train, cache=None):
        """The arguments of a call."""

    names = CallNames.of(inspect.signature(call))
    assert (names.tokens, names.positions, names.mask) == (
        None,
        "decoder_positions",
        "padding_mask",
    )
    assert (names.segments, names.cache, names.flags) == ("segment_ids", "cache", ("train",))
    assert names.unknown == ()
    assert names.needed == ("train",)

    def call(segment_pos, tokens, labels, use_cache, deterministic=True):
        """Tokens that do not come first, and arguments that have no usual name."""

    names = CallNames.of(inspect.signature(call))
    assert (names.tokens, names.positions) == ("tokens", "segment_pos")
    assert (names.cache, names.needed) == (None, ())
    assert names.unknown == ("labels", "use_cache")
