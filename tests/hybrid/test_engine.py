"""Generation from the training state equals whole forward passes, on every mesh and layout."""

import dataclasses
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.hugging_face import hub_folder, recorded
from tools.hybrid import KEY, PROMPTS, live_bytes, padded, reference, train
from tools.hybrid_models import NoCache, ParallelGPT, RepeatedHeads
from tools.no_cache_models import Switched
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import HybridEngine
from zeroxla.checkpoint.weights.pretrained import from_pretrained
from zeroxla.models import GPT, Llama, from_hugging_face

pytestmark = pytest.mark.usefixtures("quick_compilation")


def _with_lora(make, frozen):
    """With adapters on every kernel."""
    return zeroxla.lora(make(), targets=r"kernel$", rank=4, frozen=frozen)


MODELS = {
    "gpt": lambda: GPT.tiny(width=64),
    "llama": lambda: Llama.tiny(heads=8, kv_heads=4, width=64),
    "parallel": lambda: ParallelGPT(width=64, vocab=51),  # which nothing divides
    "gpt listed": lambda: GPT.tiny(scan=False, tie=False),
    "llama listed": lambda: Llama.tiny(scan=False, tie=True),
}
LORA = {
    f"{name}, {kind}": functools.partial(_with_lora, make, frozen)
    for kind, frozen in (("lora", None), ("lora int8", "int8"))
    for name, make in list(MODELS.items())[:3]
}
MATRIX = [
    (name, nodes, tensor)
    for name in [*list(MODELS)[:3], *LORA]
    for nodes in (2, 1)
    for tensor in (4, 2, 1)
]


# One row of the matrix is quick. The slow ones have the other models, also those that the matrix
# has not, on both numbers of nodes. All other rows run with `-m full`.
SMOKE = ("gpt", 2, 4)
SLOW = [
    ("parallel", 2, 1),
    ("llama", 2, 2),
    ("gpt, lora", 1, 4),
    ("llama, lora", 1, 2),
    ("parallel, lora", 1, 1),
    ("llama, lora int8", 2, 4),
    ("parallel, lora int8", 2, 2),
    ("gpt listed", 2, 2),
    ("llama listed", 2, 2),
]
ROWS = [
    pytest.param(*SMOKE, marks=pytest.mark.smoke),
    *thinned([], slow=SLOW, rows=True),
    *(pytest.param(*row, marks=pytest.mark.full) for row in MATRIX if row not in (SMOKE, *SLOW)),
]


@pytest.fixture(scope="module")
def trained():
    """Trained models by name and nodes, made when asked for."""
    made = {}

    def get(name, nodes=2, **config):
        key = name, nodes, *config.items()
        if key not in made:
            mesh = zeroxla.make_mesh(nodes=nodes, devices_per_node=8 // nodes)
            made[key] = train((MODELS | LORA)[name](), mesh, **config)
        return made[key]

    return get


@pytest.fixture(scope="module")
def engine_of(trained):
    """Engines by name, tensor and nodes, made when asked for. They share compiled programs.

    The engine of SMOKE reads longer prompts in pieces that do not divide them."""

    def make(name, tensor, nodes=2):
        pieces = {"prefill_tokens": 5} if (name, nodes, tensor) == SMOKE else {}
        return HybridEngine(trained(name, nodes).step, tensor=tensor, **pieces)

    return functools.cache(make)


@pytest.mark.parametrize(("name", "nodes", "tensor"), ROWS)
def test_greedy_tokens_and_logits_equal_whole_passes(trained, engine_of, name, nodes, tensor):
    known, engine = trained(name, nodes), engine_of(name, tensor, nodes)
    found = engine.generate(known.state, PROMPTS, key=KEY, max_new_tokens=6, temperature=0)
    np.testing.assert_array_equal(found.tokens, known.greedy(PROMPTS, 6))
    np.testing.assert_array_equal(found.lengths, 6)

    rows = padded([[*p, *r] for p, r in zip(PROMPTS, found.rows(), strict=True)])
    want = known.logprobs(rows)
    for i, prompt in enumerate(PROMPTS):
        mine = want[i, len(prompt) - 1 :][:6]
        np.testing.assert_allclose(found.logprobs[i], mine, atol=1e-5)
    np.testing.assert_allclose(engine.logprobs(known.state, rows), want, atol=1e-5)
    logits = known.logits(rows)
    np.testing.assert_allclose(engine.logits(known.state, rows), logits, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["d_llama_gqa_tied", "d_gpt2", "d_llama_mha"])
def test_continuations_equal_transformers(name, tmp_path):
    """Greedy, 16 tokens, left padding of ragged prompts included; with and without an end token."""
    _, _, data = recorded(name)
    folder = hub_folder(tmp_path / name, name)
    model = from_hugging_face(folder)
    step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=2), optax.sgd(1e-3))
    step.abstract_state({"tokens": np.zeros((8, 9), np.int32)})
    state = from_pretrained(model, folder, step)
    real = data["attention_mask"] != 0
    prompts = [row[mask] for row, mask in zip(data["input_ids"], real, strict=True)]
    engine = HybridEngine(step, tensor=2)
    for recorded_as, eos in (("gen_noeos", None), ("gen_eos", int(data["gen_eos_token"]))):
        options = {"max_new_tokens": 16, "temperature": 0, "eos": eos, "pad": 0}
        found = engine.generate(state, prompts, key=KEY, **options)
        np.testing.assert_array_equal(found.tokens, data[recorded_as][:, 12:])
        if eos is not None:
            ended = [row.tolist().index(eos) + 1 if eos in row else 16 for row in found.tokens]
            np.testing.assert_array_equal(found.lengths, ended)
            assert min(ended) < 16, "no row met the end"


@pytest.mark.slow
def test_rows_do_not_influence_each_other(trained):
    known = trained("llama")
    engine = HybridEngine(known.step, tensor=2)

    def draw(prompts):
        options = {"max_new_tokens": 8, "temperature": 1.0, "top_k": 20}
        return engine.generate(known.state, prompts, key=KEY, **options).tokens

    together = draw(PROMPTS)
    others = [[9, 9], PROMPTS[1], [1], [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [4]]
    np.testing.assert_array_equal(draw(others)[1], together[1])
    np.testing.assert_array_equal(draw(PROMPTS), together)
    assert (draw(others)[0] != together[0]).any()


@pytest.mark.slow
def test_equal_prompts_are_continued_differently(trained, engine_of):
    known, engine = trained("gpt"), engine_of("gpt", 4)
    found = engine.generate(known.state, [[1, 2]] * 6, key=KEY, max_new_tokens=8)
    assert len({tuple(row) for row in found.tokens.tolist()}) == 6
    again = engine.generate(known.state, [[1, 2]] * 6, key=jax.random.key(9), max_new_tokens=8)
    assert (again.tokens != found.tokens).any()


@pytest.mark.slow
def test_rows_stop_at_the_end_token_and_are_padded(trained):
    known = trained("gpt")
    engine = HybridEngine(known.step)
    free = engine.generate(known.state, PROMPTS, key=KEY, max_new_tokens=8, temperature=0)
    eos = int(free.tokens[0, 3])
    found = engine.generate(
        known.state, PROMPTS, key=KEY, max_new_tokens=8, temperature=0, eos=eos, pad=63
    )
    for row, length, all_of_it, logprobs in zip(
        found.tokens, found.lengths, free.tokens, found.logprobs, strict=True
    ):
        met = np.flatnonzero(all_of_it == eos)
        assert length == (met[0] + 1 if met.size else 8)
        np.testing.assert_array_equal(row[:length], all_of_it[:length])
        assert (row[length:] == 63).all()
        assert (logprobs[length:] == 0).all()
        assert (logprobs[:length] < 0).all()
    assert found.lengths[0] <= 4
    assert [len(row) for row in found.rows()] == found.lengths.tolist()


@pytest.mark.parametrize("model", thinned([Switched()], slow=[NoCache()]), ids=["none", "traced"])
def test_a_model_without_a_cache(model):
    """It generates with one that is made from its trace, or by whole passes, and says so."""
    known = train(model, zeroxla.make_mesh(nodes=2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = HybridEngine(known.step, tensor=2, max_length=32)
    told = "the model has no cache .* none can be made .*`cond` to .* pass over the whole sequence"
    assert len(caught) == (not engine._model.calls.has_cache) == isinstance(model, Switched)
    assert all(re.search(told, str(x.message)) for x in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = engine.generate(known.state, PROMPTS, key=KEY, max_new_tokens=6, temperature=0)
    np.testing.assert_array_equal(found.tokens, known.greedy(PROMPTS, 6))
    rows = padded([[*p, *r] for p, r in zip(PROMPTS, found.rows(), strict=True)])
    want = known.logprobs(rows)
    for i, prompt in enumerate(PROMPTS):
        mine = want[i, len(prompt) - 1 :][:6]
        np.testing.assert_allclose(found.logprobs[i], mine, atol=1e-5)


@pytest.mark.slow
def test_more_devices_than_key_value_heads():
    """Queries of a head are split where their keys and values are whole on each device."""
    known = train(lambda rngs: RepeatedHeads(rngs=rngs), zeroxla.make_mesh(nodes=2))
    engine = HybridEngine(known.step, tensor=4)
    found = engine.generate(known.state, PROMPTS, key=KEY, max_new_tokens=4, temperature=0)
    np.testing.assert_array_equal(found.tokens, known.greedy(PROMPTS, 4))


@pytest.mark.slow
def test_training_that_generates_in_between_is_bit_equal(trained, engine_of):
    known, engine = trained("gpt"), engine_of("gpt", 2)
    batch = {"tokens": np.random.default_rng(1).integers(0, 64, (8, 17)).astype(np.int32)}

    def run(generate):
        state = known.step.init(jax.random.key(5), batch)
        for _ in range(3):
            if generate:
                engine.generate(state, PROMPTS, key=KEY, max_new_tokens=6, temperature=0)
            state, _ = known.step(state, batch)
        return jax.tree.map(np.asarray, dataclasses.replace(state, key=None))

    for a, b in zip(jax.tree.leaves(run(True)), jax.tree.leaves(run(False)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_programs_are_kept_by_buckets_of_lengths(trained, engine_of, caplog):
    known, engine = trained("gpt"), engine_of("gpt", 4)
    options = {"key": KEY, "temperature": 0}
    engine.generate(known.state, PROMPTS, max_new_tokens=6, **options)
    with jax.log_compiles():
        caplog.clear()
        engine.generate(known.state, [p[:2] for p in PROMPTS], max_new_tokens=9, **options)
        assert not [r for r in caplog.records if r.getMessage().startswith("Compiling")]
        engine.generate(known.state, PROMPTS, max_new_tokens=17, **options)
        assert [r for r in caplog.records if r.getMessage().startswith("Compiling")]


@pytest.mark.slow
def test_a_kept_layout_is_used_until_the_state_changes():
    known = train(GPT.tiny(), zeroxla.make_mesh(nodes=2))
    engine = HybridEngine(known.step, tensor=2, release=False)
    options = {"key": KEY, "max_new_tokens": 4, "temperature": 0}
    first = engine.generate(known.state, PROMPTS, **options)
    again = engine.generate(known.state, PROMPTS, **options)
    assert first.reshard_s > 0
    assert again.reshard_s == 0
    batch = {"tokens": np.full((8, 17), 7, np.int32)}
    state = known.state
    for _ in range(8):
        state, _ = known.step(state, batch)
    found = engine.generate(state, PROMPTS, **options)
    assert found.reshard_s > 0
    np.testing.assert_array_equal(found.tokens, reference(known.step, state).greedy(PROMPTS, 4))
    engine.free()
    engine.free()


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "tensor"), [(2, 4), (1, 2)])
def test_memory_while_generating_is_the_models_share_and_goes_back(nodes, tensor):
    model = Llama.tiny(heads=8, kv_heads=4, width=128, hidden=256, vocab=512)
    mesh = zeroxla.make_mesh(nodes=nodes, devices_per_node=8 // nodes)
    known = train(model, mesh, steps=0)
    num = sum(x.size for x in jax.tree.leaves(zeroxla.full_params(known.state)))
    before = live_bytes()
    engine = HybridEngine(known.step, tensor=tensor, release=False)
    options = {"key": KEY, "max_new_tokens": 16, "temperature": 0}
    engine.generate(known.state, PROMPTS, **options)
    added = live_bytes() - before
    assert 0.99 <= added / (4 * num / tensor) <= 1.1
    engine.free()
    assert live_bytes() == before

    releasing = HybridEngine(known.step, tensor=tensor)
    releasing.generate(known.state, PROMPTS, **options)
    assert live_bytes() == before


@pytest.mark.slow
def test_a_cache_of_another_dtype_is_of_that_dtype(trained, engine_of):
    known, exact = trained("gpt"), engine_of("gpt", 2)
    engine = HybridEngine(known.step, tensor=2, cache_dtype="bfloat16")
    found = engine.generate(known.state, PROMPTS, key=KEY, max_new_tokens=6, temperature=0)
    want = exact.generate(known.state, PROMPTS, key=KEY, max_new_tokens=6, temperature=0)
    assert np.abs(found.logprobs - want.logprobs).max() > 0
    np.testing.assert_allclose(found.logprobs[:, 0], want.logprobs[:, 0], atol=0.05)


@pytest.mark.slow
def test_a_model_that_computes_in_bfloat16_generates_in_it(trained):
    known = trained("gpt", compute_dtype="bfloat16")
    engine = HybridEngine(known.step, tensor=2, release=False)
    before = jax.live_arrays()
    found = engine.generate(known.state, PROMPTS, key=KEY, max_new_tokens=6, temperature=0)
    kept = [x for x in jax.live_arrays() if not any(x is y for y in before)]
    assert len(kept) == len(jax.tree.leaves(known.state.params))
    assert {x.dtype for x in kept} == {jnp.dtype("bfloat16")}
    rows = padded([[*p, *r] for p, r in zip(PROMPTS, found.rows(), strict=True)])
    want = known.logprobs(rows)  # float32
    for i, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(found.logprobs[i], want[i, len(prompt) - 1 :][:6], atol=0.1)
    assert engine.plan == HybridEngine(trained("gpt").step, tensor=2).plan


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 9])
def test_a_batch_that_does_not_divide_over_the_devices(trained, engine_of, num):
    known, engine = trained("gpt"), engine_of("gpt", 1)
    prompts = [[i + 1, i + 2] for i in range(num)]
    found = engine.generate(known.state, prompts, key=KEY, max_new_tokens=3, temperature=0)
    np.testing.assert_array_equal(found.tokens, known.greedy(prompts, 3))


@pytest.mark.slow
@pytest.mark.parametrize("prefill_tokens", thinned([5], slow=[64]))
def test_prompts_up_to_the_context(trained, prefill_tokens):
    """Read at once, and in pieces that do not divide them."""
    known = trained("gpt")
    engine = HybridEngine(known.step, tensor=2, prefill_tokens=prefill_tokens)
    prompts = [list(range(1, 29)), [3]]
    found = engine.generate(known.state, prompts, key=KEY, max_new_tokens=4, temperature=0)
    np.testing.assert_array_equal(found.tokens, known.greedy(prompts, 4))


@pytest.mark.slow
def test_attention_in_blocks_is_split_like_attention_at_once(engine_of):
    step = zeroxla.make_step(
        GPT.tiny(width=64, attention_block=4),
        zeroxla.make_mesh(nodes=2),
        config=zeroxla.ZeroConfig(persistence_threshold=0),
    )
    step.abstract_state({"tokens": np.zeros((8, 17), np.int32)})
    assert HybridEngine(step, tensor=4).plan == engine_of("gpt", 4).plan


@pytest.mark.slow
def test_attention_in_blocks_generates():
    """With prompts of several blocks, which are read into the cache, and whole rows."""
    known = train(GPT.tiny(width=64, attention_block=4), zeroxla.make_mesh(nodes=2))
    engine = HybridEngine(known.step, tensor=4)
    prompts = [list(range(1, 20)), [3]]
    found = engine.generate(known.state, prompts, key=KEY, max_new_tokens=4, temperature=0)
    np.testing.assert_array_equal(found.tokens, known.greedy(prompts, 4))
    rows = padded([[*p, *r] for p, r in zip(prompts, found.rows(), strict=True)])
    np.testing.assert_allclose(engine.logprobs(known.state, rows), known.logprobs(rows), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["int8", None])
def test_ten_cycles_leave_the_base_bit_equal_and_free_every_byte(frozen):
    """Two devices a copy, adapters, prompts at the maximum context, training in between."""
    model = zeroxla.lora(GPT.tiny(width=64), targets="kernel$", rank=2, frozen=frozen)
    known = train(model, zeroxla.make_mesh(nodes=2))
    engine = HybridEngine(known.step, tensor=2)
    batch = {"tokens": np.random.default_rng(1).integers(0, 64, (8, 17)).astype(np.int32)}
    prompts = [list(range(1, 31))] * 3
    state, _ = known.step(known.state, batch)
    base = jax.device_get(state.params["base"])
    before = None
    for i in range(10):
        engine.generate(state, prompts, key=jax.random.key(i), max_new_tokens=2)
        state, _ = known.step(state, batch)
        held = live_bytes()
        before = before or held
        assert held == before
    for old, new in zip(jax.tree.leaves(base), jax.tree.leaves(state.params["base"]), strict=True):
        np.testing.assert_array_equal(old, np.asarray(new))
    want = reference(known.step, state).greedy(prompts, 2)
    found = engine.generate(state, prompts, key=KEY, max_new_tokens=2, temperature=0)
    np.testing.assert_array_equal(found.tokens, want)
