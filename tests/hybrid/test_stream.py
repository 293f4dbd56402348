"""`HybridEngine.stream` yields the tokens that `generate` returns, and leaves nothing behind."""

import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.hybrid import KEY, PROMPTS, live_bytes, train
from tools.hybrid_models import NoCache
from tools.no_cache_models import Switched
from tools.quick import quick_collection, quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import HybridEngine
from zeroxla.hybrid.sampling import Sampling
from zeroxla.models import GPT, Llama

pytestmark = pytest.mark.usefixtures("quick_compilation", "quick_collection")

MODELS = {
    "gpt": lambda: GPT.tiny(),
    "llama": lambda: Llama.tiny(),
    "gpt, lora int8": lambda: zeroxla.lora(
        GPT.tiny(width=64), targets=r"kernel$", rank=4, frozen="int8"
    ),
    "traced cache": lambda: NoCache(),  # all rows begin together, and longer prompts are read on
    "no cache": lambda: Switched(),
}
GREEDY, DRAWN = {"temperature": 0}, {"temperature": 1.3, "top_k": 9, "top_p": 0.9}


@pytest.fixture(scope="module")
def trained():
    """Trained models by name, made when asked for."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = train(MODELS[name](), zeroxla.make_mesh(nodes=2))
        return made[name]

    return get


@pytest.fixture(scope="module")
def engine_of(trained):
    """Engines by name and `tensor`, made when asked for. With the same OPTIONS, the prompts PROMPTS
    and as many end tokens they share compiled programs, which is most of the time of a test."""
    return functools.cache(
        lambda name, tensor: HybridEngine(trained(name).step, tensor=tensor, max_length=32)
    )


OPTIONS = {"key": KEY, "max_new_tokens": 10, **DRAWN}


def collected(stream, num_rows, new, pad=0):
    """Return the tokens of a stream as `generate` returns them, and the number of its items."""
    tokens = np.full((num_rows, new), pad)
    logprobs = np.zeros((num_rows, new))
    lengths = np.zeros(num_rows, int)
    running = np.ones(num_rows, bool)
    count = 0
    for item in stream:
        assert item.drawn.any()
        assert not (item.drawn & ~running).any()
        rows = np.flatnonzero(item.drawn)
        tokens[rows, lengths[rows]] = item.tokens[rows]
        logprobs[rows, lengths[rows]] = item.logprobs[rows]
        assert (item.tokens[~item.drawn] == pad).all()
        assert (item.logprobs[~item.drawn] == 0).all()
        lengths += item.drawn
        running, count = item.running, count + 1
    assert not running.any()
    return tokens, lengths, logprobs, count


ROWS = thinned(
    [("gpt", 2, DRAWN, 1)],
    slow=[
        ("traced cache", 1, GREEDY, 3),
        ("gpt", 1, GREEDY, 4),
        ("llama", 2, GREEDY, 1),
        ("llama", 1, DRAWN, 7),
        ("gpt, lora int8", 2, DRAWN, 1),
        ("traced cache", 2, DRAWN, 1),
        ("no cache", 2, GREEDY, 1),
    ],
    rows=True,
)


@pytest.mark.filterwarnings("ignore:the model has no cache")
@pytest.mark.parametrize(("name", "tensor", "sampling", "every"), ROWS)
def test_tokens_equal_those_of_generate(trained, engine_of, name, tensor, sampling, every):
    """Of rows of different lengths, of which some meet the end token before others."""
    known, engine = trained(name), engine_of(name, tensor)
    free = engine.generate(known.state, PROMPTS, key=KEY, max_new_tokens=10, **sampling)
    for eos in (None, [int(free.tokens[0, 2]), int(free.tokens[3, 6])]):
        options = {"key": KEY, "max_new_tokens": 10, "eos": eos, "pad": 3, **sampling}
        want = engine.generate(known.state, PROMPTS, **options)
        with engine.stream(known.state, PROMPTS, every=every, **options) as stream:
            tokens, lengths, logprobs, _ = collected(stream, len(PROMPTS), 10, pad=3)
        np.testing.assert_array_equal(tokens, want.tokens)
        np.testing.assert_array_equal(lengths, want.lengths)
        np.testing.assert_allclose(logprobs, want.logprobs, atol=1e-5)
        if eos is not None:
            assert lengths.min() < 10


def test_several_end_tokens(trained, engine_of):
    known, engine = trained("gpt"), engine_of("gpt", 2)
    free = engine.generate(known.state, PROMPTS, **OPTIONS).tokens
    ends = [int(free[0, 2]), int(free[1, 4])]
    found = engine.generate(known.state, PROMPTS, eos=ends, **OPTIONS)
    for row, whole, length in zip(found.tokens, free, found.lengths, strict=True):
        met = np.flatnonzero(np.isin(whole, ends))
        assert length == (met[0] + 1 if met.size else 10)
        np.testing.assert_array_equal(row[:length], whole[:length])


def test_a_training_step_between_two_tokens_changes_nothing(trained, engine_of):
    """Nor does `generate`, of the old state or of the new one. The state's memory is taken, and the
    stream goes on with its parameters; its copy goes away with it."""
    known, engine = trained("gpt"), engine_of("gpt", 2)
    want = engine.generate(known.state, PROMPTS, **OPTIONS).tokens
    state = jax.tree.map(jnp.copy, known.state)
    batch = {"tokens": np.full((8, 17), 7, np.int32)}
    stream = engine.stream(state, PROMPTS, **OPTIONS)
    first = next(stream)
    again = engine.generate(state, PROMPTS, **OPTIONS).tokens
    for _ in range(3):
        state, _ = known.step(state, batch)
    second = next(stream)
    new = engine.generate(state, PROMPTS, **OPTIONS).tokens
    rest = [item.tokens for item in stream]
    np.testing.assert_array_equal(again, want)
    np.testing.assert_array_equal(np.stack([first.tokens, second.tokens, *rest], axis=1), want)
    assert (new != want).any()
    taken = jax.tree.map(jnp.copy, known.state)
    late = engine.stream(taken, PROMPTS, **OPTIONS)
    known.step(taken, batch)
    with pytest.raises(ValueError, match="the state was deleted by the step"):
        next(late)


@pytest.mark.parametrize("release", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_stream_that_is_left_frees_its_copy(trained, engine_of, release):
    known = trained("gpt")
    engine = engine_of("gpt", 2) if release else HybridEngine(known.step, tensor=2, release=False)
    for _ in engine.stream(known.state, PROMPTS, **OPTIONS):
        pass  # compiled, and what is kept is kept
    engine.free()
    before = live_bytes()
    with engine.stream(known.state, PROMPTS, **OPTIONS) as stream:
        next(stream)
        assert live_bytes() > before
    with pytest.raises(StopIteration):
        next(stream)
    kept = live_bytes()
    assert (kept > before) == (not release)
    stream = engine.stream(known.state, PROMPTS, **OPTIONS)
    next(stream)
    engine.free()  # and it goes on
    next(stream)
    del stream
    gc.collect()
    assert live_bytes() == before
    engine.stream(known.state, PROMPTS, **OPTIONS).close()  # without an item
    assert live_bytes() == before


def test_bad_arguments_are_refused_at_once(trained, engine_of):
    known, engine = trained("gpt"), engine_of("gpt", 2)
    for given, match in (
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be 1 or more"),
        ({"every": 0}, "every=0 must be 1 or more"),
        ({"eos": [1, 64]}, r"eos=\[1, 64\], and the model's vocabulary is 0 to 63"),
        ({"top_p": 2.0}, "top_p=2.0"),
    ):
        with pytest.raises(ValueError, match=match):
            engine.stream(known.state, [[1]], **{"key": KEY, "max_new_tokens": 2, **given})


def test_logits_that_are_not_finite_end_the_stream(trained, engine_of):
    known, engine = trained("gpt"), engine_of("gpt", 2)

    def spoil(path, x):
        is_table = "wte" in jax.tree_util.keystr(path)
        return x.at[5].set(jnp.nan) if is_table else x

    params = jax.tree_util.tree_map_with_path(spoil, known.state.params)
    state = dataclasses.replace(known.state, params=params)
    before = live_bytes()
    stream = engine.stream(state, PROMPTS, **OPTIONS)
    with pytest.raises(ValueError, match=r"logits of the rows \[0, 1, 2, 3, 4\] are not finite"):
        next(stream)
    assert live_bytes() <= before


@pytest.mark.slow
def test_programs_are_those_of_the_lowered_one(trained):
    """`lower` knows the shape of several end tokens and of one."""
    engine = HybridEngine(trained("gpt").step)
    assert engine.max_length == 32
    assert "while" in engine.trace(2, 5, 4, Sampling()).lower().as_text()
