"""Bad input to the hybrid engine says what was wrong, before anything is computed."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.hybrid import KEY, train
from tools.hybrid_models import NoCache
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import HybridEngine
from zeroxla.hybrid.compile_cache import CompiledPrograms
from zeroxla.hybrid.prompts import LengthLimits
from zeroxla.models import GPT

pytestmark = pytest.mark.usefixtures("quick_compilation")
BATCH = {"tokens": np.zeros((8, 9), np.int32)}


class Scores(nn.Module):
    """One number for each row."""

    @nn.compact
    def __call__(self, tokens):
        return nn.Embed(32, 8)(tokens).sum((1, 2))

    def loss(self, batch, *, train):
        return jnp.mean(self(batch["tokens"]))


@pytest.fixture(scope="module")
def known():
    return train(GPT.tiny(), zeroxla.make_mesh(nodes=2), steps=0)


@pytest.fixture(scope="module")
def engine(known):
    return HybridEngine(known.step)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tensor": 3}, r"tensor=3 does not divide the 4 devices of a node .* one of \[1, 2, 4\]"),
        ({"tensor": 8}, "tensor=8 does not divide the 4 devices"),
        ({"tensor": 0}, "tensor=0"),
        ({"max_length": 64}, "max_length=64 exceeds the model's context of 32"),
        ({"prefill_tokens": 0}, "prefill_tokens=0 must be 1 or more"),
        ({"max_length": 1}, "max_length=1 must be a whole number, 2 or more"),
    ],
)
def test_options_of_an_engine(known, options, match):
    with pytest.raises(ValueError, match=match):
        HybridEngine(known.step, **options)


def test_a_tensor_that_does_not_divide_the_heads():
    step = zeroxla.make_step(GPT.tiny(heads=2, layers=1), zeroxla.make_mesh(nodes=1))
    step.abstract_state(BATCH)
    with pytest.raises(ValueError, match=r"tensor=4 does not divide the 2 heads of 'h/attn/c_attn"):
        HybridEngine(step, tensor=4)


def test_a_step_that_has_seen_nothing():
    step = zeroxla.make_step(GPT.tiny(), zeroxla.make_mesh(nodes=2))
    with pytest.raises(ValueError, match="the step has seen no batch"):
        HybridEngine(step)


def test_models_that_cannot_generate():
    mesh = zeroxla.make_mesh(nodes=2)
    pair = (
        lambda key, batch: {"w": jnp.zeros((8, 8))},
        lambda params, batch, key: jnp.mean((batch["x"] @ params["w"]) ** 2),
    )
    step = zeroxla.make_step(pair, mesh)
    step.abstract_state({"x": np.zeros((8, 8), np.float32)})
    with pytest.raises(ValueError, match=r"a pair .* needs its logits"):
        HybridEngine(step, max_length=8)

    layers = [nn.Embed(8, 8), nn.Dense(8)]
    listed = zeroxla.Pipeline(
        layers, lambda out, _: jnp.mean(out**2), inputs=lambda batch: batch["tokens"]
    )
    step = zeroxla.make_step(listed, mesh)
    step.abstract_state(BATCH)
    with pytest.raises(ValueError, match="A Pipeline of listed layers is such a pair, too"):
        HybridEngine(step, max_length=8)

    step = zeroxla.make_step(NoCache(), mesh)
    step.abstract_state(BATCH)
    with pytest.raises(ValueError, match=r"does not say how long .* pass max_length="):
        HybridEngine(step)

    step = zeroxla.make_step(Scores(), mesh)
    step.abstract_state(BATCH)
    with pytest.raises(ValueError, match=r"returned float32.*and generation needs logits"):
        HybridEngine(step, max_length=8)


@pytest.mark.parametrize(
    ("prompts", "match"),
    [
        ([], "there are no prompts"),
        ([[1], []], "prompt 1 is empty"),
        (
            [[1], [2, -3]],
            "prompt 1 holds the token -3, and the model's vocabulary is 0",
        ),
        (
            [[1, 64]],
            "prompt 0 holds the token 64, and the model's vocabulary is 0 to 63",
        ),
        ([[2**40]], "prompt 0 holds the token 1099511627776, and"),
        ([[1.5]], "prompt 0 has the shape .* and dtype float64"),
        ([[[1]]], r"prompt 0 has the shape \(1, 1\)"),
        ("text", "the prompts are a str"),
        ([list(range(1, 31))], r"longest prompt has 30 tokens and max_new_tokens=4: .* 34, .* 32"),
    ],
)
def test_prompts(known, engine, prompts, match):
    with pytest.raises(ValueError, match=match):
        engine.generate(known.state, prompts, key=KEY, max_new_tokens=4)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be 1 or more"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": 0}, "top_k=0"),
        (
            {"eos": 64},
            "eos=64, and the model's vocabulary is 0 to 63; give one of them",
        ),
        ({"eos": -1}, "eos=-1, and the model's vocabulary"),
        ({"eos": 2.0}, "eos=2.0, and the model's vocabulary"),
        ({"pad": None}, "pad=None, and the model's vocabulary"),
        (
            {"pad": 64},
            "pad=64, and the model's vocabulary is 0 to 63; the model reads",
        ),
        ({"top_p": 2.0}, "top_p=2.0"),
        ({"key": 3}, "3 is no PRNG key"),
    ],
)
def test_options_of_a_call(known, engine, options, match):
    with pytest.raises(ValueError, match=match):
        engine.generate(known.state, [[1]], **{"key": KEY, "max_new_tokens": 2, **options})


@pytest.mark.parametrize("tokens", [[1, 2], [[1.0, 2.0]], [[1]]])
def test_rows_to_score(known, engine, tokens):
    with pytest.raises(ValueError, match=r"pass whole numbers \[B, L\]"):
        engine.logprobs(known.state, tokens)


def test_rows_to_score_beyond_the_context(known, engine):
    with pytest.raises(ValueError, match="rows of 33 tokens exceed the model's context of 32"):
        engine.logits(known.state, np.zeros((2, 33), np.int32))
    with pytest.raises(ValueError, match="rows of 33 tokens exceed the model's context of 32"):
        engine.logprobs(known.state, np.zeros((2, 34), np.int32))


def test_a_target_may_lie_behind_the_context(known, engine):
    rows = np.random.default_rng(0).integers(0, 64, (2, 33)).astype(np.int32)
    logits = engine.logits(known.state, rows[:, :-1])
    want = np.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(engine.logprobs(known.state, rows), want, atol=1e-5)


def test_another_state(known, engine):
    with pytest.raises(ValueError, match="is a dict, not a TrainState"):
        engine.generate({}, [[1]], key=KEY, max_new_tokens=2)
    other = train(GPT.tiny(width=64), zeroxla.make_mesh(nodes=2), steps=0)
    with pytest.raises(ValueError, match="the engine from the step that this state belongs to"):
        engine.generate(other.state, [[1]], key=KEY, max_new_tokens=2)


def test_logits_that_are_not_finite_name_their_rows(known, engine):
    def spoil(path, x):
        is_table = "wte" in jax.tree_util.keystr(path)
        return x.at[5].set(jnp.nan) if is_table else x

    params = jax.tree_util.tree_map_with_path(spoil, known.state.params)
    state = dataclasses.replace(known.state, params=params)
    with pytest.raises(ValueError, match=r"the logits of the rows \[0, 1\] are not finite"):
        engine.generate(state, [[5, 1], [2]], key=KEY, max_new_tokens=2)
    # What the engine holds is free again.
    assert engine.generate(known.state, [[1]], key=KEY, max_new_tokens=2).tokens.shape == (1, 2)


class RulesOut(NoCache):
    """A model that never says the tokens from `first` on that are below `end`."""

    first: int = 12
    end: int = 16

    @nn.compact
    def __call__(self, tokens):
        token = jnp.arange(self.vocab)
        return jnp.where(
            (token >= self.first) & (token < self.end), -jnp.inf, super().__call__(tokens)
        )


@pytest.mark.slow
def test_tokens_that_a_model_rules_out_are_no_error():
    mesh = zeroxla.make_mesh(nodes=2)
    known = train(RulesOut(), mesh, steps=0)
    engine = HybridEngine(known.step, tensor=2, max_length=32)
    assert any(row.dim is not None for row in engine.plan.rows)
    found = engine.generate(known.state, [[1]] * 16, key=KEY, max_new_tokens=16)
    assert not np.isin(found.tokens, range(12, 16)).any()
    assert np.isfinite(found.logprobs).all()
    assert len(np.unique(found.tokens)) > 12


@pytest.mark.slow
def test_tokens_of_which_a_model_rules_out_all_are_an_error():
    mesh = zeroxla.make_mesh(nodes=2)
    known = train(RulesOut(first=0, end=24), mesh, steps=0)
    engine = HybridEngine(known.step, max_length=32)
    with pytest.raises(ValueError, match=r"the logits of the rows \[0\] are not finite"):
        engine.generate(known.state, [[1]], key=KEY, max_new_tokens=2)


class Pairs(nn.Module):
    """The probabilities of the next token, of an odd number of them, follow from the last one."""

    @nn.compact
    def __call__(self, tokens):
        return nn.log_softmax(nn.Dense(23)(jax.nn.one_hot(tokens, 23)))

    loss = NoCache.loss


def test_an_engine_that_splits_nothing_says_so():
    step = zeroxla.make_step(Pairs(), zeroxla.make_mesh(nodes=2))
    step.abstract_state(BATCH)
    with pytest.warns(UserWarning, match="tensor=2 splits none of the model's leaves") as caught:
        HybridEngine(step, tensor=2, max_length=8)
    assert caught[-1].filename == __file__


@pytest.mark.slow
def test_a_call_that_fails_leaves_nothing(known, monkeypatch):
    engine = HybridEngine(known.step, tensor=2)
    held = []

    def fail(compiled, shape, leaves, *_):
        held.extend(leaves)
        raise MemoryError

    monkeypatch.setattr(CompiledPrograms, "generate", fail)
    with pytest.raises(MemoryError):
        engine.generate(known.state, [[1]], key=KEY, max_new_tokens=2)
    assert held
    assert all(x.is_deleted() for x in held)


def test_buckets_hold_what_was_asked_for_within_the_context():
    for limit in (20, 32, 100):
        limits = LengthLimits(limit)
        for prompt in range(1, limit):
            for new in (1, 3, limit - prompt):
                if prompt + new > limit:
                    continue
                places, room = limits.buckets(prompt, new)
                assert places >= prompt
                assert room >= new
                assert places + room <= limit
